"""The torch backend: a plan's work tiles, one after another, on a CPU or a CUDA device.

It does what a kernel does: stage a chunk of KV tokens, scores, online softmax, values; then
either the result itself or a partial in the workspace, and partials merged in split order.
A row tile is finished by exactly `num_splits` work tiles; a plan that brings one too few or too
many leaves NaN in its rows, so that a hole in a plan shows and stale memory does not.

On a CUDA device every call synchronises: lengths are read on the host.

Sources: online softmax, Milakov and Gimelshein, arXiv:1805.02867; splits and their merge by
lse, "Flash-Decoding for long-context inference" (Dao, Haziza, Massa, Sizov, 2023).
"""

from __future__ import annotations

import math
from collections import Counter

import torch
from torch import Tensor

from ..call import Call, Features
from ..gpu import Gpu
from ..plan import Plan, WorkTile
from ..problem import Problem
from ..workspace import Workspace
from .base import plan_for
from .epilogue import Epilogue
from .staging import Addresses, Stage
from .visibility import Visibility

#: tokens of a chunk: below, the cost of a Python step shows; above, a chunk leaves the L2 cache
CHUNK_TOKENS = 512


class TorchBackend:
    """All of the contract, in torch operations."""

    name = "torch"
    reads_lengths = True

    def supports(self, features: Features, problem: Problem, gpu: Gpu | None) -> str | None:
        """It refuses only what asks for a launch attribute."""
        if features.pdl:
            return "enable_pdl=True: torch operations have no programmatic dependent launch"
        return None

    def plan(self, call: Call, gpu: Gpu | None) -> Plan:
        """The plan that a kernel would get on `gpu`, or on an H200."""
        return plan_for(call.problem, gpu, call.features.batch_invariant)

    def run(self, call: Call, plan: Plan, workspace: Workspace) -> None:
        """Walks the tiles in the plan's order, then merges what was split."""
        with torch.no_grad():
            tiles = MainLoop(call, plan)
            epilogue = Epilogue(call, plan, workspace)
            arrived: Counter[tuple[int, int]] = Counter()
            for tile in plan:
                epilogue.store(tile, *tiles.attend(tile))
                arrived[tile.request, tile.row_tile] += 1
            epilogue.finish(arrived)


class MainLoop:
    """The main loop of a kernel: one work tile's keys, chunk by chunk."""

    def __init__(self, call: Call, plan: Plan) -> None:
        problem = call.problem
        self.call, self.plan, self.problem = call, plan, problem
        self.dtype = compute_dtype(problem)
        self.factor = call.given.skip_softmax_threshold_scale_factor or 0.0
        blocks = 1 if self.factor else max(1, CHUNK_TOKENS // plan.tile_kv)
        self.chunk = blocks * plan.tile_kv
        self.keys = Stage(call, self.chunk, problem.head_dim, self.dtype)
        self.values = self.keys
        if call.features.separate_tables:
            self.values = Stage(call, self.chunk, problem.latent_dim, self.dtype)
        self.addresses = Addresses(call)
        self.visibility = Visibility(call)
        self.query = call.query_rows
        self.tables = (call.key_table, call.value_table)

    def attend(self, tile: WorkTile) -> tuple[Tensor, Tensor]:
        """Normalised out [rows, latent] and natural lse [rows] of one work tile."""
        rows = self.plan.rows(tile)
        begin, end = self.plan.kv_range(tile)
        query = self._query(tile, rows)
        softmax = OnlineSoftmax(rows[1] - rows[0], self.problem.latent_dim, query)
        for chunk in range(begin, end, self.chunk):
            span = (chunk, min(chunk + self.chunk, end))
            keys = self._keys(tile, rows, span)
            scores = query @ keys.t()
            hidden = None
            if not self.problem.top_k:
                hidden = self.visibility.hidden(tile.request, rows, span)
            if hidden is not None:
                scores.masked_fill_(hidden, -math.inf)
            if self.factor and chunk > begin:
                threshold = self.factor / self.problem.kv_lens[tile.request]
                if softmax.negligible(scores, threshold):
                    continue
            softmax.add(scores, self._values(tile, span, keys))
        return softmax.result()

    def _query(self, tile: WorkTile, rows: tuple[int, int]) -> Tensor:
        """The tile's rows in the computing dtype, times bmm1_scale."""
        first = self.visibility.q_begin[tile.request] * self.problem.heads
        query = self.query[first + rows[0] : first + rows[1]].to(self.dtype)
        return query * self.call.given.bmm1_scale

    def _keys(self, tile: WorkTile, rows: tuple[int, int], span: tuple[int, int]) -> Tensor:
        table = self.tables[0]
        if self.problem.top_k:
            token = self.visibility.q_begin[tile.request] + rows[0] // self.problem.heads
            return self.keys.load(self.addresses.slots(table[token, slice(*span)]))
        return self.keys.load(self.addresses.positions(table[tile.request], *span))

    def _values(self, tile: WorkTile, span: tuple[int, int], keys: Tensor) -> Tensor:
        if self.values is self.keys:
            return keys[:, : self.problem.latent_dim]
        return self.values.load(self.addresses.positions(self.tables[1][tile.request], *span))


class OnlineSoftmax:
    """Running maximum, sum and weighted values of some rows.

    The maximum starts at the least finite number: a row that has seen no key keeps it, its
    weights are exp(-inf) = 0, and no difference of infinities arises.
    """

    def __init__(self, rows: int, latent_dim: int, like: Tensor) -> None:
        self.maximum = like.new_full((rows, 1), torch.finfo(like.dtype).min)
        self.total = like.new_zeros(rows, 1)
        self.out = like.new_zeros(rows, latent_dim)

    def negligible(self, scores: Tensor, threshold: float) -> bool:
        """Whether exp(tile_max - running_max) < threshold in every row."""
        tile_maximum = scores.amax(1, keepdim=True)
        return bool((torch.exp(tile_maximum - self.maximum) < threshold).all())

    def add(self, scores: Tensor, values: Tensor) -> None:
        """Takes in a chunk: scores [rows, n] (overwritten) and values [n, latent]."""
        if not len(values):
            return
        maximum = torch.maximum(self.maximum, scores.amax(1, keepdim=True))
        rescale = torch.exp(self.maximum - maximum)
        weights = scores.sub_(maximum).exp_()
        self.total.mul_(rescale).add_(weights.sum(1, keepdim=True))
        self.out.mul_(rescale).addmm_(weights, values)
        self.maximum = maximum

    def result(self) -> tuple[Tensor, Tensor]:
        """out [rows, latent] and lse [rows]; without a key 0 and -inf."""
        lse = self.maximum + self.total.log()
        return self.out.div_(self.total.masked_fill(self.total == 0, 1)), lse.view(-1)


def compute_dtype(problem: Problem) -> torch.dtype:
    """float64 for float64 queries, float32 for all others."""
    return torch.float64 if problem.q_dtype == "fp64" else torch.float32
