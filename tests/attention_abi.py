"""The attention kernels' interface, done by torch on a CPU: what a launch hands over, and means.

`AbiKernel` takes the arguments of a launch in their order, walks the tiles of every worker as a
kernel does, leaves partials, and merges as the last arriver. `plan_on_host` stands for the planner.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field, replace
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from mla_lab.backends.cuda.ops import DevicePlan, DevicePlanner
from mla_lab.core import masks
from mla_lab.core.problem import Problem
from mla_lab.plan import KernelConfig, WorkTile
from mla_lab.plan.extent import row_tiles
from mla_lab.plan.fixed_pieces import PieceCuts, bundle_of, fixed_pieces, ring_slots
from mla_lab.plan.formula import WHOLE_BLOCKS
from mla_lab.plan.launch_modes import costs_of
from mla_lab.plan.self_schedule import self_schedule
from mla_lab.plan.workspace import LL_WORDS

from .planner_cases import host_plan

LATENT = 512
#: place of the LL merge's words among the arguments of a dual build
LL_PARTIALS = 12


@dataclass
class AbiKernel:
    """One "compiled" kernel. Refuses, as the real entry does, what has another rank or dtype."""

    config: KernelConfig
    launches: list[tuple[Any, ...]] = field(default_factory=list)

    def __call__(self, *arguments: Any) -> None:
        self.launches.append(arguments)
        extras: tuple[Tensor, ...] = ()
        options = {"features", "scales", "skip"} & {name for name, _ in self.config.options}
        if options or self.config.mask == "tree":
            *rest, extras = arguments
            arguments = tuple(rest)
        if "skip" in options:  # a factor, by which it may leave out tiles: it does not
            *rest, factor = cast("tuple[Any, ...]", extras)
            assert type(factor) is float and factor > 0
            extras = tuple(rest)
        if self.config.option("grid"):
            self._follow_formula(arguments, extras)
            return
        *tensors, num_workers, q_len, costs = arguments
        dual = bool(self.config.option("dual"))
        if dual:  # room for the other mainloop's merge, behind the schedule
            ll_partials = tensors.pop(LL_PARTIALS)
            assert ll_partials.shape == (LL_WORDS,)
            assert not ll_partials.any()
        words: list[Any] = [*tensors, extras]
        launch = _Launch(*words)
        launch.check(self.config)
        if self.config.option("pieces"):
            launch.find_pieces(self.config, num_workers, costs)
            costs = 0
        costs, gate = costs & 0xFFFF, costs >> 16
        assert (gate > 0) == dual
        if not len(launch.tiles):
            launch.find_work(self.config, num_workers, q_len, costs)
        assert len(launch.worker_begin) == num_workers + 1
        for begin, end in itertools.pairwise(launch.worker_begin.tolist()):
            for words in launch.tiles[begin:end].tolist():
                launch.attend(WorkTile(*words), self.config)

    def _follow_formula(self, arguments: tuple[Any, ...], extras: tuple[Tensor, ...]) -> None:
        """No plan; at the end num_splits, row_tiles of the longest request, and q_len or 0."""
        *tensors, heads, scale_log2, out_scale, splits, row_tiles, q_len = arguments
        nothing = torch.empty(0)
        words: list[Any] = [*tensors, nothing, nothing, heads, scale_log2, out_scale, extras]
        launch = _Launch(*words)
        launch.check(self.config)
        assert all(type(number) is int for number in (splits, row_tiles, q_len))
        if self.config.option("gather") == 2:  # every query token is a request
            assert q_len == 1
            if not launch.seq_lens.numel():  # otherwise how many slots count
                launch.seq_lens = torch.full(
                    launch.block_table.shape[:1], launch.block_table.shape[1]
                )
        batch = len(launch.seq_lens)
        if self.config.option("fused_merge", 1) == 3:
            launch.by_ll(self.config.tile_rows, batch * row_tiles * splits, splits)
        elif splits > 1:
            assert len(launch.partial_out) == len(launch.partial_lse) == batch * row_tiles * splits
        if q_len:  # then nobody reads the caller's
            launch.q_begin = torch.arange(batch + 1) * q_len
        for request, row_tile in itertools.product(range(batch), range(row_tiles)):
            rows = (launch.q_begin[request + 1] - launch.q_begin[request]) * heads
            if row_tile * self.config.tile_rows >= rows:
                continue
            held = -(-int(launch.seq_lens[request]) // 64)
            blocks = max(held, 1)
            group = request * row_tiles + row_tile
            pieces = 1 if blocks <= WHOLE_BLOCKS else min(splits, blocks)
            for i in range(pieces):
                cut = (blocks * i // pieces, min(blocks * (i + 1) // pieces, held))
                slot, counter = group * splits + i, group * self.config.cluster
                launch.attend(
                    WorkTile(request, row_tile, *cut, i, pieces, slot, counter), self.config
                )


@dataclass
class _Launch:
    query: Tensor
    cache: Tensor
    out: Tensor
    lse: Tensor
    partial_out: Tensor
    partial_lse: Tensor
    counters: Tensor
    block_table: Tensor
    seq_lens: Tensor
    q_begin: Tensor
    tiles: Tensor
    worker_begin: Tensor
    heads: int
    scale_log2: float
    out_scale: float
    #: sinks, bmm1, bmm2 and, for a packed mask, its words: each may have no element
    extras: tuple[Tensor, ...] = ()

    def check(self, config: KernelConfig) -> None:
        shaped = (self.query.dim(), self.out.dim(), self.lse.dim()) == (4, 4, 2)
        boxed = config.option("gather") or self.cache.shape[1] == config.page_size
        if not shaped or self.cache.dim() != 3 or not boxed:
            raise ValueError("Mismatched Tensor, expected another ndim")
        table = self.block_table
        if table.dim() != 2 or self.seq_lens.dim() != 1 or self.q_begin.dim() != 1:
            raise ValueError("Mismatched Tensor, expected another ndim")
        whole = (self.query, self.out, self.lse, self.seq_lens, self.q_begin, *self.extras[:4])
        # torch takes any stride of a dimension of one element for contiguous, and so does the entry
        dense = all(tensor.is_contiguous() for tensor in whole if isinstance(tensor, Tensor))
        if not dense or not self.cache[0].is_contiguous() or not table[0].is_contiguous():
            raise ValueError("Mismatched Tensor, expected other strides")
        names = {"bf16": torch.bfloat16, "fp16": torch.float16}
        given = [
            (names[config.q_dtype], self.query),
            (names[config.kv_format], self.cache),
            (names[config.out_dtype], self.out),
        ]
        given += [(torch.float32, tensor) for tensor in (self.lse, *self.extras[:3])]
        given += [(torch.int32, tensor) for tensor in (table, self.seq_lens, self.q_begin)]
        if any(tensor.dtype is not name for name, tensor in given):
            raise ValueError("Mismatched Tensor, expected another dtype")
        assert type(self.scale_log2) is float
        assert type(self.out_scale) is float
        for scale in self.extras[1:3]:
            assert scale.shape in ((0,), (1,))
        if self.extras and self.extras[1].numel():
            self.scale_log2 = float(self.extras[1]) / math.log(2)
        if self.extras and self.extras[2].numel():
            self.out_scale = float(self.extras[2])

    def find_pieces(self, config: KernelConfig, num_workers: int, cuts: int) -> None:
        """What each worker finds by the rule of `plan.fixed_pieces`; in slots of their own."""
        q_lens = tuple((self.q_begin[1:] - self.q_begin[:-1]).tolist())
        problem = Problem(q_lens, tuple(self.seq_lens.tolist()), self.heads)
        few, many = bool(cuts >> 16 & 1), bool(cuts >> 17)
        of_call = PieceCuts(cuts & 255, cuts >> 8 & 255, few, many)
        plan = fixed_pieces(
            problem, tile_rows=config.tile_rows, num_workers=num_workers, cuts=of_call
        )
        tiles = row_tiles(problem, config.tile_rows)
        lanes = bundle_of(np.where(of_call.takes(problem.rows), tiles, 0), num_workers)
        assert len(self.partial_out) >= lanes * ring_slots(num_workers // lanes)
        self.tiles = torch.from_numpy(plan.tiles.copy())
        self.worker_begin = torch.from_numpy(plan.worker_begin.copy())

    def find_work(self, config: KernelConfig, num_workers: int, q_len: int, costs: int) -> None:
        """What each worker finds by the rule of `plan.self_schedule`."""
        assert all(type(number) is int for number in (num_workers, q_len, costs))
        q_lens = tuple(self.q_begin.diff().tolist())
        assert q_len in (0, *set(q_lens)) if len(set(q_lens)) == 1 else q_len == 0
        problem = Problem(q_lens, tuple(self.seq_lens.tolist()), self.heads)
        plan = self_schedule(
            problem,
            tile_rows=config.tile_rows,
            num_workers=num_workers,
            costs=replace(costs_of(config), piece=costs & 255, merge=costs >> 8),
        )
        assert len(self.partial_out) >= plan.num_slots
        self.tiles, self.worker_begin = torch.tensor(plan.tiles), torch.tensor(plan.worker_begin)

    def slots(self, request: int, span: Tensor, config: KernelConfig) -> Tensor:
        """Token slots of positions of a request, -1 for none."""
        if config.option("gather") == 2:
            return self.block_table[request][span]
        page_size = self.cache.shape[1]
        return self.block_table[request][span // page_size] * page_size + span % page_size

    def sees(self, token: Tensor, span: Tensor, prefix: int, config: KernelConfig) -> Tensor:
        """bool [rows, positions]; token: of each row, in the call. keep_ab has the causal rule in
        its build without a mask.
        """
        mask = self.extras[3] if len(self.extras) > 3 else torch.empty(0)
        if not mask.numel():
            if config.mask == "none" and "swap_ab" in config.kernel:
                return torch.ones(len(token), len(span), dtype=torch.bool)
            first = self.q_begin[torch.searchsorted(self.q_begin, token, right=True) - 1]
            return span[None] <= prefix + (token - first)[:, None]
        bits = masks.unpack(mask.view(-1, mask.shape[-1])[token], mask.shape[-1] * 16)
        column = (span - prefix).clamp(0, bits.shape[1] - 1)
        return bits[:, column] | (span < prefix)[None]

    def with_sinks(self, out: Tensor, lse: Tensor, row: Tensor) -> Tensor:
        """Results of rows (of the request) with their sink in the denominator."""
        if not self.extras or not self.extras[0].numel():
            return out
        share = torch.sigmoid(lse - self.extras[0][row % self.heads])
        return out * share.nan_to_num()[:, None]

    def by_ll(self, rows: int, slots: int, splits: int) -> None:
        """Partials are zero before and after, so that what is here meanwhile lies elsewhere."""
        if splits > 1:
            assert self.partial_out.shape == (slots, rows, LATENT)
            assert self.partial_lse.shape == (slots * (splits + rows // 2), 4)
            assert self.partial_out.is_contiguous()
            assert not self.partial_out.any()
            assert not self.partial_lse.any()
        self.partial_out = torch.zeros(slots, rows, LATENT)
        self.partial_lse = torch.zeros(slots, rows)
        self.counters = torch.zeros(slots, dtype=torch.int32)

    def attend(self, tile: WorkTile, config: KernelConfig) -> None:
        q_begin, q_end = self.q_begin[tile.request : tile.request + 2].tolist()
        rows = (q_end - q_begin) * self.heads
        # a plan of more query tokens has row tiles without rows
        first = min(tile.row_tile * config.tile_rows, rows)
        row = torch.arange(first, rows)[: config.tile_rows]
        kv_len = int(self.seq_lens[tile.request])
        end = kv_len if tile.split_idx + 1 == tile.num_splits else tile.block_end * 64
        span = torch.arange(min(tile.block_begin * 64, kv_len), min(end, kv_len))
        slots = self.slots(tile.request, span, config)
        keys = self.cache[slots // self.cache.shape[1], slots % self.cache.shape[1]].float()
        keys[slots < 0] = 0
        query = self.query.view(-1, 576)[q_begin * self.heads + row].float()
        token = q_begin + row // self.heads
        seen = self.sees(token, span, kv_len - (q_end - q_begin), config)
        if config.option("gather") == 2:
            seen = (slots >= 0)[None].expand(seen.shape)
        scores = (query @ keys.T * self.scale_log2).masked_fill(~seen, -math.inf) * math.log(2)
        lse = torch.logsumexp(scores, 1) if len(span) else torch.full((len(row),), -math.inf)
        weights = torch.exp(scores - lse.nan_to_num(neginf=0)[:, None])
        out = weights @ keys[:, :LATENT]
        where = q_begin * self.heads + row
        if tile.num_splits == 1:
            self.write(where, self.with_sinks(out, lse, row), lse)
            return
        self.partial_out[tile.slot, : len(row)] = out
        self.partial_lse[tile.slot, : len(row)] = lse
        self.counters[tile.group] += 1
        if int(self.counters[tile.group]) == tile.num_splits:
            first = tile.slot - tile.split_idx
            pieces = slice(first, first + tile.num_splits)
            outs, lses = self.partial_out[pieces, : len(row)], self.partial_lse[pieces, : len(row)]
            total = torch.logsumexp(lses, 0)
            share = torch.exp(lses - total.nan_to_num(neginf=0))
            merged = self.with_sinks((outs * share[..., None]).sum(0), total, row)
            self.write(where, merged, total)
            self.counters[tile.group] = 0

    def write(self, where: Tensor, out: Tensor, lse: Tensor) -> None:
        self.out.view(-1, LATENT)[where] = (out * self.out_scale).to(self.out.dtype)
        if self.lse.numel():
            self.lse.view(-1)[where] = lse


def plan_on_host(
    planner: DevicePlanner, seq_lens: Tensor, q_begin: Tensor, words: DevicePlan
) -> None:
    """What the planner kernel writes, from the Python plan."""
    sums = q_begin.tolist()
    q_lens = tuple(after - before for before, after in itertools.pairwise(sums))
    plan = host_plan(planner, Problem(q_lens, tuple(seq_lens.tolist()), planner.heads))
    counts = (plan.num_tiles, plan.num_slots, plan.num_groups)
    if any(count > room for count, room in zip(counts, planner.capacity, strict=True)):
        words.worker_begin.zero_()  # more than the bounds said: all workers are idle
        return
    words.tiles[: plan.num_tiles] = torch.tensor(plan.tiles)
    words.worker_begin.copy_(torch.tensor(plan.worker_begin))
