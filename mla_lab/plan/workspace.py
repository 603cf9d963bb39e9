"""Layout of the caller's workspace buffer: merge counters and partials of a plan.

Slices in order, each beginning at a multiple of 256 bytes:

1. `counters` int32 [16384]: one merge counter a group. First and of fixed size, so that any
   sequence of plans on one stream may share a buffer that was zeroed once: kernels leave it zero.
2. `ll_partials` fp32 [LL_WORDS]: partials and softmax stats of the LL merge, in which a nonzero
   word is its own arrival flag (see `formula.ll_words`). Of fixed size in every layout with
   partials and left zero like the counters, so that no other plan's partials overlap it.
3. `schedule` int32 [256, KEPT_WORDS]: what each CTA of a launch that schedules itself found, with
   what it was found from, so that the next launch compares and takes it. It may hold anything.
4. `partial_out` fp32 [num_slots, tile_rows, latent]
5. `partial_lse` fp32 [num_slots, tile_rows], base e, without the sink
6. only where the plan is made on the device: `tiles` int32 [max_tiles, 8], `worker_begin` int32
   [num_workers + 1], and `counts` int32 [4], what the planner found.

A plan without partials, made on the host, needs no bytes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from ..core.errors import invalid, unsupported

#: bytes: of slices inside the buffer, and of the buffer itself (torch's allocator on a CPU)
ALIGNMENT = 256
BASE_ALIGNMENT = 64
MAX_GROUPS = 16384
#: 9.5 MiB: partials of 32 rows for each of 132 workers, and their softmax stats
LL_WORDS = 19 * 2**17
#: int32 words that a CTA keeps (see `cute.common.kept_schedule`): 32 each of its tiles and
#: their key, then lengths and query tokens of the requests that a warp holds at once
HELD_REQUESTS = 256
KEPT_WORDS = 32 * 2 + 2 * HELD_REQUESTS
MAX_CTAS = 256
#: slices with the same offset in every layout
SHARED = ("counters", "ll_partials")
#: bytes of an element of every slice: int32 or fp32
WORD_BYTES = 4
TILE_WORDS = 8
PLANNER_COUNTS = 4


@dataclass(frozen=True)
class Slice:
    """A named array inside the workspace; `offset` in bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * WORD_BYTES


@dataclass(frozen=True)
class WorkspaceLayout:
    """Slices of one workspace, in address order."""

    slices: tuple[Slice, ...]

    @classmethod
    def of(
        cls,
        num_slots: int,
        num_groups: int,
        tile_rows: int,
        latent_dim: int,
        device_tiles: int = 0,
        device_workers: int = 0,
        ll: bool = False,
    ) -> WorkspaceLayout:
        """Layout for `num_slots` partials in `num_groups` groups; with `device_tiles` also for a
        plan of up to so many tiles that is made on the device; with `ll` for a launch with an LL
        merge.
        """
        if num_groups > MAX_GROUPS:
            raise unsupported("plan", f"{num_groups} split row tiles", f"up to {MAX_GROUPS}")
        shapes: list[tuple[str, str, tuple[int, ...]]] = []
        if num_slots or device_tiles or ll:
            shapes = [("counters", "int32", (MAX_GROUPS,)), ("ll_partials", "float32", (LL_WORDS,))]
        if num_slots or device_tiles:
            shapes += [
                ("schedule", "int32", (MAX_CTAS, KEPT_WORDS)),
                ("partial_out", "float32", (num_slots, tile_rows, latent_dim)),
                ("partial_lse", "float32", (num_slots, tile_rows)),
            ]
        if device_tiles:
            shapes += [
                ("tiles", "int32", (device_tiles, TILE_WORDS)),
                ("worker_begin", "int32", (device_workers + 1,)),
                ("counts", "int32", (PLANNER_COUNTS,)),
            ]
        return cls(_place(shapes))

    def behind(self, other: WorkspaceLayout) -> WorkspaceLayout:
        """The same slices after those of `other`, another launch of the same call; the two share
        counters and LL partials.
        """
        step = -(-other.nbytes // ALIGNMENT) * ALIGNMENT
        moved = [
            part if part.name in SHARED else replace(part, offset=part.offset + step)
            for part in self.slices
        ]
        return WorkspaceLayout(tuple(moved))

    @property
    def nbytes(self) -> int:
        """Bytes that the caller's buffer must hold."""
        return self.slices[-1].offset + self.slices[-1].nbytes if self.slices else 0

    def __getitem__(self, name: str) -> Slice:
        for part in self.slices:
            if part.name == name:
                return part
        raise invalid("slice", repr(name), tuple(part.name for part in self.slices))

    def check(self, nbytes: int, address: int = 0) -> None:
        """Refuse a buffer that is too small or badly aligned."""
        if nbytes < self.nbytes:
            raise invalid(
                "workspace_buffer", f"{nbytes} bytes", f"{self.nbytes} bytes or more for this plan"
            )
        if self.slices and address % BASE_ALIGNMENT:
            raise invalid(
                "workspace_buffer",
                f"address {address:#x}, {address % BASE_ALIGNMENT} past a boundary",
                f"an address that is a multiple of {BASE_ALIGNMENT}",
            )

    def __str__(self) -> str:
        if not self.slices:
            return "workspace: 0 bytes"
        lines = [f"workspace: {self.nbytes:,} bytes"]
        lines += [
            f"  {part.offset:>12,}  {part.name:<12} {part.dtype:<8} {list(part.shape)}"
            for part in self.slices
        ]
        return "\n".join(lines)


def _place(shapes: list[tuple[str, str, tuple[int, ...]]]) -> tuple[Slice, ...]:
    slices, end = [], 0
    for name, dtype, shape in shapes:
        offset = -(-end // ALIGNMENT) * ALIGNMENT
        slices.append(Slice(name, dtype, shape, offset))
        end = offset + slices[-1].nbytes
    return tuple(slices)
