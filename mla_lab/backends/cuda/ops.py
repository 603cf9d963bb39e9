"""The device planner, a CUDA C++ kernel before attention.

Callers check shapes and dtypes. It runs on torch's current stream, allocates nothing and copies
nothing to the host.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from ... import jit
from ...core.errors import invalid
from ...plan.config import KernelConfig
from ..base import current

#: bound of the planner's shared memory, see kernels/planner/planner.h
MAX_BATCH = 4096


@cache
def kernel(device: torch.device) -> jit.Kernel:
    """The planner's kernel for `device`, compiled at its first use."""
    return jit.kernel(KernelConfig("cuda/planner"), jit.device_arch(device.index))


@dataclass(frozen=True)
class DevicePlanner:
    """Makes on the device the plan that `plan.make_plan` makes on the host by the policy
    "fixed_size", which is batch invariant, tile for tile.

    It is made for bounds of lengths: at most `max_batch` requests, `max_q_len` query tokens
    and `max_kv_len` cached tokens each, and `total_q` query tokens in all if given.
    """

    heads: int
    max_batch: int
    max_q_len: int
    max_kv_len: int
    tile_rows: int = 64
    tile_kv: int = 64
    num_workers: int = 132
    split_blocks: int = 16
    max_splits: int = 32
    half_blocks: int = 0
    total_q: int | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.max_batch <= MAX_BATCH:
            raise invalid("max_batch", self.max_batch, f"1 to {MAX_BATCH}")
        for name in ("heads", "tile_rows", "tile_kv", "num_workers", "split_blocks", "max_splits"):
            if getattr(self, name) < 1:
                raise invalid(name, getattr(self, name), "1 or more")

    @property
    def max_row_tiles(self) -> int:
        """Row tiles of the batch: n requests with t rows in all have (t + n (tile - 1)) / tile."""
        most = self.max_batch * max(1, -(-self.max_q_len * self.heads // self.tile_rows))
        if self.total_q is None:
            return most
        rows = self.total_q * self.heads + self.max_batch * (self.tile_rows - 1)
        return min(most, max(1, rows // self.tile_rows))

    @property
    def most_splits(self) -> int:
        """Pieces that a request within the bounds has at most. One of a greater length has as many,
        each of more blocks: the other requests of its batch keep their tiles.
        """
        blocks = max(1, -(-self.max_kv_len // self.tile_kv))
        size = max(self.split_blocks, min(self.half_blocks, -(-blocks // 2)))
        fewest = 2 if blocks > self.split_blocks else 1  # a shorter one may be in halves
        return min(self.max_splits, max(fewest, -(-blocks // size)))

    @property
    def most_tokens(self) -> int:
        """Query tokens of the batch, or their bound."""
        return self.max_batch * self.max_q_len if self.total_q is None else self.total_q

    @property
    def capacity(self) -> tuple[int, int, int]:
        """Tiles, slots and groups that no batch within the bounds exceeds."""
        rows, splits = self.max_row_tiles, self.most_splits
        return rows * splits, rows * splits if splits > 1 else 0, rows if splits > 1 else 0

    def __call__(self, seq_lens: Tensor, q_begin: Tensor, plan: DevicePlan) -> None:
        """Enqueue the planner for `seq_lens` int32 [batch] and `q_begin` int32 [batch + 1]."""
        with current(seq_lens.device):
            kernel(seq_lens.device).launch(
                seq_lens,
                q_begin,
                plan.tiles,
                plan.worker_begin,
                plan.counts,
                *self.capacity[1:],
                self.most_tokens,
                self.heads,
                self.tile_rows,
                self.tile_kv,
                self.split_blocks,
                self.most_splits,
                self.half_blocks,
            )


@dataclass(frozen=True)
class DevicePlan:
    """A plan in device memory: int32 tensors that kernels read and the planner rewrites."""

    tiles: Tensor
    worker_begin: Tensor
    #: [4]: tiles, slots, groups, and 1 if a capacity was too small (then all workers idle)
    counts: Tensor

    @classmethod
    def empty(cls, planner: DevicePlanner, device: str = "cuda") -> DevicePlan:
        """Memory for any plan of `planner`."""
        tiles = planner.capacity[0]

        def words(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        return cls(words(tiles, 8), words(planner.num_workers + 1), words(4))
