"""The CUDA C++ kernels around attention: the merge of split partials and the device planner.

Callers check shapes and dtypes. Both kernels run on torch's current stream, allocate nothing and
copy nothing to the host.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import numpy as np

from ... import jit
from ...core.errors import invalid
from ...plan.config import KernelConfig
from ...plan.tile import Plan

if TYPE_CHECKING:
    from torch import Tensor

#: bounds of the planner's shared memory, see kernels/planner/planner.h
MAX_BATCH, MAX_WORKERS = 4096, 1024
#: more query rows than a request has
ANY_ROWS = 2**31 - 1
POLICIES = ("greedy", "fixed_size")
LOG2_E = math.log2(math.e)


@cache
def kernel(name: str) -> jit.Kernel:
    """A CUDA C++ kernel for the current device, compiled at the first call of its life."""
    return jit.kernel(KernelConfig(f"cuda/{name}"), jit.device_arch())


def merge_items(plan: Plan) -> np.ndarray:
    """Row tiles of `plan` that have partials: int32 [groups, 4], in the order of their groups.

    Columns: request, row tile, first slot, number of splits.
    """
    first = plan.tiles[(plan.tiles[:, 7] >= 0) & (plan.tiles[:, 4] == 0)]
    return first[np.argsort(first[:, 7])][:, [0, 1, 6, 5]]


@dataclass(frozen=True)
class Merge:
    """The merge kernel and its numbers: heads, output scale, base of lse."""

    heads: int
    out_scale: float = 1.0
    lse_base2: bool = False
    #: may start while the attention kernel before it drains
    programmatic_launch: bool = False

    def __call__(
        self,
        partials: tuple[Tensor, Tensor],
        items: Tensor,
        q_begin: Tensor,
        out: Tensor,
        lse: Tensor,
        sinks: Tensor,
        scale: Tensor | None = None,
    ) -> None:
        """Merge `partials` = (fp32 [slots, rows, 512], natural lse fp32 [slots, rows]).

        `items` int32 [groups, 4] as from `merge_items`, `q_begin` int32 [batch + 1] on the
        device; writes rows of out [total_q * heads, 512] and lse fp32 [total_q * heads] (or no
        element, where no lse is wanted). sinks: fp32 [heads], or no element. scale: fp32 [1] in
        place of `out_scale`, or no element.
        """
        kernel("merge").launch(
            *partials,
            items,
            q_begin,
            out,
            lse,
            sinks,
            sinks.new_empty(0) if scale is None else scale,
            self.heads,
            self.out_scale,
            LOG2_E if self.lse_base2 else 1.0,
            self.programmatic_launch,
        )


@dataclass(frozen=True)
class DevicePlanner:
    """Makes on the device the plan that `plan.make_plan` makes on the host, tile for tile.

    Bounds, not lengths, are known here: at most `max_batch` requests, `max_q_len` query tokens
    and `max_kv_len` cached tokens each, and `total_q` query tokens in all if given. `policy` is
    "greedy" (with `overhead`) or "fixed_size" (batch invariant; `split_blocks`, `max_splits`,
    `half_blocks`), both persistent. Requests with fewer query rows than `least_rows`, or more than
    `most_rows`, are left to another plan.
    """

    heads: int
    max_batch: int
    max_q_len: int
    max_kv_len: int
    tile_rows: int = 64
    tile_kv: int = 64
    num_workers: int = 132
    policy: str = "greedy"
    overhead: int = 5
    split_blocks: int = 16
    max_splits: int = 32
    half_blocks: int = 0
    total_q: int | None = None
    least_rows: int = 1
    most_rows: int = ANY_ROWS

    def __post_init__(self) -> None:
        if self.policy not in POLICIES:
            raise invalid("policy", repr(self.policy), POLICIES)
        for name, most in (("max_batch", MAX_BATCH), ("num_workers", MAX_WORKERS)):
            if not 1 <= getattr(self, name) <= most:
                raise invalid(name, getattr(self, name), f"1 to {most}")

    @property
    def max_row_tiles(self) -> int:
        """Row tiles of the batch: n requests with t rows in all have (t + n (tile - 1)) / tile."""
        longest = min(self.max_q_len * self.heads, self.most_rows)
        most = self.max_batch * max(1, -(-longest // self.tile_rows))
        if self.total_q is None:
            return most
        rows = self.total_q * self.heads + self.max_batch * (self.tile_rows - 1)
        return min(most, max(1, rows // self.tile_rows))

    @property
    def capacity(self) -> tuple[int, int, int]:
        """Tiles, slots and groups that no batch within the bounds exceeds.

        Greedy: P parts of R row tiles have P x R <= workers, and make P - 1 cuts of at most R
        row tiles each; a cut adds a tile, and gives at most two tiles a slot.
        """
        rows, workers = self.max_row_tiles, self.num_workers
        if self.policy == "greedy":
            return rows + workers, 2 * workers, workers
        blocks = max(1, -(-self.max_kv_len // self.tile_kv))
        size = max(self.split_blocks, min(self.half_blocks, -(-blocks // 2)))
        fewest = 2 if blocks > self.split_blocks else 1  # a shorter one may be in halves
        splits = min(self.max_splits, max(fewest, -(-blocks // size)))
        return rows * splits, rows * splits if splits > 1 else 0, rows if splits > 1 else 0

    def __call__(self, seq_lens: Tensor, q_begin: Tensor, plan: DevicePlan) -> None:
        """Enqueue the planner for `seq_lens` int32 [batch] and `q_begin` int32 [batch + 1]."""
        kernel("planner").launch(
            seq_lens,
            q_begin,
            plan.tiles,
            plan.worker_begin,
            plan.merge_items,
            plan.counts,
            self.capacity[1],
            self.heads,
            self.tile_rows,
            self.tile_kv,
            POLICIES.index(self.policy),
            self.overhead,
            self.split_blocks,
            self.max_splits,
            self.half_blocks,
            self.least_rows,
            self.most_rows,
        )


@dataclass(frozen=True)
class DevicePlan:
    """A plan in device memory: int32 tensors that kernels read and the planner rewrites."""

    tiles: Tensor
    worker_begin: Tensor
    #: [groups, 4], number of splits 0 where unused
    merge_items: Tensor
    #: [4]: tiles, slots, groups, and 1 if a capacity was too small (then all workers idle)
    counts: Tensor

    @classmethod
    def empty(cls, planner: DevicePlanner, device: str = "cuda") -> DevicePlan:
        """Memory for any plan of `planner`."""
        import torch

        tiles, _, groups = planner.capacity

        def words(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        return cls(words(tiles, 8), words(planner.num_workers + 1), words(groups, 4), words(4))
