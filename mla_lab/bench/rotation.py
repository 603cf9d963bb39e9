"""KV copies over which launches rotate, so that no launch has its KV in L2.

Copies represent the layers of one decode step: they share query, lengths, block table, workspace
and plan; their caches differ in address and values. Pages are in random order, and every slot that
must not be read is poisoned (see `mla_lab.reference.inputs`).
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from ..core import kv_cache as formats
from ..core.problem import Problem
from ..reference import tolerance as accuracy
from ..reference.inputs import DecodeInputs, make_inputs
from ..reference.mla import decode_reference
from .cases import Case

#: KV bytes of a rotation on a GPU, and the share of its memory that the caches may take. Lines that
#: are loaded with the policy evict_first replace each other, so that 60 MB of any rotation may stay
#: in an H200's L2: 1.3 % of this one. Of 64 requests of 8,192 tokens and 16 heads, with 604 MB in
#: one copy, ours took 143.1 us, with 5.4 GB in nine copies 147.1 us; FlashInfer fa3 147.8 us with
#: either (H200, 2026-11-29, by hand)
ROTATION_BYTES, CACHE_SHARE = 4_800_000_000, 4
#: four times that L2: enough on a CPU, and where more would take over MANY copies, whose calls are
#: so short that latencies bind and not the read
LEAST_BYTES, MANY = 240_000_000, 32
#: least launches of a replay, so that its start and end count little
MIN_LAUNCHES = 8
#: workspace bytes of a call; partials of two row tiles for each of 132 workers take 35 MB
WORKSPACE_BYTES = 192 << 20
#: share of the columns whose sign is flipped in each copy: results differ between copies, while the
#: distribution (heavy tails included) stays the same
TURNED_COLUMNS = 1 / 16


def rotation_bytes_on(device: torch.device | str) -> int:
    """KV bytes of a rotation on a device."""
    return ROTATION_BYTES if torch.device(device).type == "cuda" else LEAST_BYTES


def rotation_words(rotation_bytes: int) -> str:
    """What a record's `rotation_bytes` stand for, for its readers."""
    copies = f"KV copies of {rotation_bytes / 1e6:.0f} MB in rotation"
    few = f" (small ones: {MANY}, and {LEAST_BYTES / 1e6:.0f} MB at least)"
    return copies + (few if rotation_bytes > LEAST_BYTES else "")


def copies_for(problem: Problem, rotation_bytes: int) -> int:
    """Number of KV copies of a call that reach `rotation_bytes` together; of more than MANY, those
    that reach LEAST_BYTES."""
    one = kv_bytes(problem)
    if not one:
        return 1
    wanted, least = (-(-size // one) for size in (rotation_bytes, LEAST_BYTES))
    return max(1, min(wanted, max(least, MANY)))


def kv_bytes(problem: Problem) -> int:
    """KV bytes that one call reads; a sparse call at most those of the cache."""
    tokens = min(problem.total_kv, sum(problem.kv_lens))
    return tokens * problem.kv_token_bytes


@dataclass(frozen=True, eq=False)
class Rotation:
    """Inputs of one case, once for each KV copy."""

    case: Case
    copies: tuple[DecodeInputs, ...]

    @property
    def device(self) -> torch.device:
        return self.copies[0].query.device

    @property
    def kv_bytes(self) -> int:
        """KV bytes that one round over all copies reads."""
        return len(self.copies) * kv_bytes(self.case.problem)

    def order(self, min_launches: int = MIN_LAUNCHES) -> list[int]:
        """Index of the copy of each launch of a replay: whole rounds over all copies."""
        rounds = max(1, -(-min_launches // len(self.copies)))
        return list(range(len(self.copies))) * rounds

    @cached_property
    def expected(self) -> tuple[Tensor, ...]:
        """float64 reference of each copy, kept as fp32 [total_q, heads, latent]."""
        return tuple(_reference(copy) for copy in self.copies)

    @cached_property
    def sdpa_error(self) -> float | None:
        """Relative error of torch's attention on the first copy; None if torch cannot run it."""
        try:
            return accuracy.sdpa_error(self.copies[0]).relative
        except RuntimeError:  # out of memory, or no such kernel: fixed limits apply
            return None

    @cached_property
    def without_poison(self) -> tuple[DecodeInputs, ...]:
        """The copies with finite unread slots and legal unused table entries.

        For peers that multiply masked values by a probability of 0, where NaN would propagate.
        """
        table = self.copies[0].block_tables
        legal = (table >= 0) & (table < len(self.copies[0].kv_cache))
        table = torch.where(legal, table, 0)
        return tuple(
            replace(copy, kv_cache=torch.nan_to_num(copy.kv_cache, nan=0.0), block_tables=table)
            for copy in self.copies
        )


def make_rotation(
    case: Case,
    *,
    seed: int = 0,
    device: torch.device | str = "cpu",
    rotation_bytes: int | None = None,
    workspace_bytes: int = WORKSPACE_BYTES,
) -> Rotation:
    """Random inputs of `case` on `device`, in as many copies as `copies_for` says, or as fit into a
    CACHE_SHARE-th of a GPU's memory. `rotation_bytes`: None for what `rotation_bytes_on` says."""
    first = make_inputs(
        case.problem,
        seed,
        case.features,
        distribution=case.distribution,
        device=device,
        workspace_bytes=workspace_bytes,
    )
    random = torch.Generator().manual_seed(seed)
    wanted = rotation_bytes_on(device) if rotation_bytes is None else rotation_bytes
    more = range(min(copies_for(case.problem, wanted), _most_copies(first.kv_cache)) - 1)
    turned = [_turn_signs(first.kv_cache, case.problem, random) for _ in more]
    return Rotation(case, (first, *(replace(first, kv_cache=kv_cache) for kv_cache in turned)))


def _most_copies(kv_cache: Tensor) -> int:
    """Copies of a cache that a GPU's memory has room for: at least the first."""
    if kv_cache.device.type != "cuda":
        return 1 << 31
    memory = torch.cuda.get_device_properties(kv_cache.device).total_memory
    return max(1, memory // CACHE_SHARE // max(1, kv_cache.nbytes))


def _turn_signs(kv_cache: Tensor, problem: Problem, random: torch.Generator) -> Tensor:
    """A cache of the same shape, strides and poison, with the sign of some columns flipped."""
    raw = kv_cache.view(torch.uint8)
    signs = _sign_bytes(problem, random).to(raw.device)
    size = raw.stride(0) * len(raw)  # slots between pages, if there are any, are poisoned too
    flat = torch.full((size,), formats.POISON_BYTE, dtype=torch.uint8, device=raw.device)
    copy = flat.as_strided(raw.shape, raw.stride())
    return torch.bitwise_xor(raw, signs, out=copy).view(kv_cache.dtype)


def _sign_bytes(problem: Problem, random: torch.Generator) -> Tensor:
    """uint8 [token bytes]: 0x80 at the sign byte of each column to flip. Keeps NaN a NaN."""
    turned = torch.rand(problem.head_dim, generator=random) < TURNED_COLUMNS
    signs = torch.zeros(problem.kv_token_bytes, dtype=torch.uint8)
    if problem.kv_format == "fp8_656":
        latent, _, rope = formats.split_656(signs)
        latent.view(torch.uint8)[turned[: problem.latent_dim]] = 0x80
        rope.view(torch.uint8)[1::2][turned[problem.latent_dim :]] = 0x80
        return signs
    width = problem.kv_token_bytes // problem.head_dim
    signs[width - 1 :: width][turned] = 0x80  # little-endian: the sign is in the last byte
    return signs


def page_lists(copy: DecodeInputs) -> tuple[Tensor, Tensor]:
    """A call's pages without the table's padding: prefix sums int32 [batch + 1], ids int32 [n]."""
    problem = copy.problem
    counts = [formats.pages_of(n, problem.page_size) for n in problem.kv_lens]
    device = copy.block_tables.device
    ids = torch.cat([row[:n] for row, n in zip(copy.block_tables, counts, strict=True)])
    sums = torch.tensor([0, *itertools.accumulate(counts)], dtype=torch.int32, device=device)
    return sums, ids


def _reference(copy: DecodeInputs) -> Tensor:
    out = decode_reference(copy).out
    return out.reshape(copy.problem.total_q, copy.problem.heads, -1).float()
