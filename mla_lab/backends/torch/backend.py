"""The torch backend: a plan's work tiles, one after another, on a CPU or a CUDA device.

It follows a kernel's steps: stage a chunk of KV tokens, scores, online softmax, values; then the
result itself or a partial, and partials merged in split order. A row tile is finished by exactly
`num_splits` work tiles; where a plan has one too few or too many, its rows stay NaN.

On a CUDA device every call synchronises, since lengths are read on the host. There products of fp32
follow torch's setting for the process, and have TF32's error where that allows it.

Sources: online softmax, Milakov and Gimelshein, arXiv:1805.02867; splits and their merge by
lse, "Flash-Decoding for long-context inference" (Dao, Haziza, Massa, Sizov, 2023).
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator

import torch
from torch import Tensor

from ...call.bind import Call
from ...call.form import Features
from ...call.workspace import Workspace
from ...core.gpu import Gpu
from ...core.problem import Problem
from ...plan import Plan, WorkTile
from ...plan.refit import refit
from ..base import not_taken, plan_for
from .epilogue import Epilogue, number
from .kv_staging import Addresses, Stage
from .mask import Visibility

#: begin and end
Range = tuple[int, int]

#: tokens of a chunk: with fewer, Python's overhead dominates; more do not fit the L2 cache
CHUNK_TOKENS = 512
#: work tiles of equal shape in one batched product: each thread gets whole matrices, and threads
#: synchronise a quarter as often (two Zen 4 cores, 2026-11-20: 14 ms, 38 ms one by one, SDPA 77 ms)
MOST_TOGETHER = 4


#: features of a call that it takes
TAKES = frozenset(
    (
        *("ragged", "causal", "mask", "sinks", "lse", "sparse", "top_k_lens", "skip_softmax"),
        *("tensor_scales", "nonpositive_scale", "separate_tables", "context_parallel"),
        *("batch_invariant", "strided_query", "strided_pages", "strided_tables"),
        *("no_pdl", "planned"),
    )
)


class TorchBackend:
    """Every feature of the contract, in torch operations."""

    name = "torch"
    reads_lengths = True
    follows_plans = True

    def supports(self, features: Features, problem: Problem, gpu: Gpu | None) -> str | None:
        """Refuses programmatic dependent launch alone."""
        if features.pdl:
            return "enable_pdl=True: torch operations have no programmatic dependent launch"
        return not_taken(features.names(), TAKES, "its operations have")

    def plan(self, call: Call, gpu: Gpu | None) -> Plan:
        """The plan that a kernel would get on `gpu`, or on an H200."""
        return plan_for(call.problem, gpu, call.features.batch_invariant)

    def run(self, call: Call, plan: Plan, workspace: Workspace) -> None:
        """Compute the tiles in the plan's order, then merge what was split.

        A plan may be one for other key lengths (see `refit`); bounds of lengths are not used.
        Partials lie in memory of this call, not in the workspace, so that threads may share one.
        """
        plan = refit(plan, call.problem)
        # the results may be inference tensors; autocast would round the products
        autocast = torch.autocast(call.form.device.type, enabled=False)
        with torch.inference_mode(), autocast:
            loop = MainLoop(call, plan)
            epilogue = Epilogue(call, plan)
            for tiles in loop.groups():
                for tile, out, lse in zip(tiles, *loop.attend(tiles), strict=True):
                    epilogue.store(tile, out, lse)
            epilogue.finish(Counter((tile.request, tile.row_tile) for tile in plan))


class MainLoop:
    """The mainloop of a kernel: the keys of work tiles, chunk by chunk.

    Tiles of equal shape share one batched product. Under batch invariance, where the bits of a
    product must not depend on the others, each tile is computed alone; so are tiles that skip
    chunks, and those of sparse calls.
    """

    def __init__(self, call: Call, plan: Plan) -> None:
        problem, features = call.problem, call.features
        self.call, self.plan, self.problem = call, plan, problem
        self.dtype = compute_dtype(problem)
        self.factor = float(call.args.skip_softmax_threshold_scale_factor or 0.0)
        alone = self.factor > 0 or features.sparse or features.batch_invariant
        self.together = 1 if alone else MOST_TOGETHER
        blocks = 1 if self.factor else max(1, CHUNK_TOKENS // plan.tile_kv)
        self.chunk = blocks * plan.tile_kv
        tokens = self.chunk * self.together
        self.keys = Stage(call, tokens, problem.head_dim, self.dtype)
        self.values = self.keys
        if features.separate_tables:
            self.values = Stage(call, tokens, problem.latent_dim, self.dtype)
        self.addresses = Addresses(call)
        self.visibility = Visibility(call)
        self.query = call.query_rows
        self.key_table, self.value_table = call.key_table, call.value_table

    def groups(self) -> Iterator[list[WorkTile]]:
        """The plan's tiles in its order, collected until enough have the same shape."""
        waiting: defaultdict[tuple[int, int], list[WorkTile]] = defaultdict(list)
        for tile in self.plan:
            first, last = self.plan.rows(tile)
            begin, end = self.plan.kv_range(tile)
            group = waiting[last - first, end - begin]
            group.append(tile)
            if len(group) == self.together:
                yield group.copy()
                group.clear()
        yield from filter(None, waiting.values())

    def attend(self, tiles: list[WorkTile]) -> tuple[Tensor, Tensor]:
        """Normalised out [tiles, rows, latent] and natural lse [tiles, rows] of equal shapes."""
        rows = [self.plan.rows(tile) for tile in tiles]
        spans = [self.plan.kv_range(tile) for tile in tiles]
        query = self._query(tiles, rows)
        softmax = OnlineSoftmax(query, self.problem.latent_dim)
        for done in range(0, spans[0][1] - spans[0][0], self.chunk):
            chunks = [(b + done, min(b + done + self.chunk, e)) for b, e in spans]
            keys = self._keys(tiles, rows, chunks)
            scores = torch.bmm(query, keys.mT)
            values = self._values(tiles, chunks, keys)
            self._hide(scores, values, tiles, rows, chunks)
            if self.factor and done:
                threshold = self.factor / self.problem.kv_lens[tiles[0].request]
                if softmax.negligible(scores, threshold):
                    continue
            softmax.add(scores, values)
        return softmax.result()

    def _query(self, tiles: list[WorkTile], rows: list[Range]) -> Tensor:
        """The tiles' rows in the computing dtype, times bmm1_scale: [tiles, rows, head_dim]."""
        begins = [self.visibility.q_begin[tile.request] * self.problem.heads for tile in tiles]
        parts = [self.query[q + b : q + e] for q, (b, e) in zip(begins, rows, strict=True)]
        return torch.stack([part.to(self.dtype) for part in parts]) * number(
            self.call.args.bmm1_scale
        )

    def _keys(self, tiles: list[WorkTile], rows: list[Range], chunks: list[Range]) -> Tensor:
        """[tiles, n, head_dim]; n is the chunk's length, less skipped slots if sparse."""
        if self.problem.top_k:
            token = self.visibility.q_begin[tiles[0].request] + rows[0][0] // self.problem.heads
            slots = self.key_table[token, slice(*chunks[0])]
            return self.keys.load(self.addresses.slots(slots)).unsqueeze(0)
        return self._load(self.keys, self.key_table, tiles, chunks)

    def _values(self, tiles: list[WorkTile], chunks: list[Range], keys: Tensor) -> Tensor:
        """[tiles, n, latent]: the latent columns of the keys, or tokens of their own pages."""
        if self.values is self.keys:
            return keys[..., : self.problem.latent_dim]
        return self._load(self.values, self.value_table, tiles, chunks)

    def _load(
        self, stage: Stage, table: Tensor, tiles: list[WorkTile], chunks: list[Range]
    ) -> Tensor:
        where = [
            self.addresses.positions(table[tile.request], *chunk)
            for tile, chunk in zip(tiles, chunks, strict=True)
        ]
        return stage.load(torch.cat(where)).unflatten(0, (len(tiles), -1))

    def _hide(
        self,
        scores: Tensor,
        values: Tensor,
        tiles: list[WorkTile],
        rows: list[Range],
        chunks: list[Range],
    ) -> None:
        """Scores of -inf where a row must not see a key, and staged values of 0 where no row of the
        tile does, as they may be NaN. Sparse rows see all of their slots.
        """
        if self.problem.top_k:
            return
        for own, value, tile, row, chunk in zip(scores, values, tiles, rows, chunks, strict=True):
            hidden = self.visibility.hidden(tile.request, row, chunk)
            if hidden is not None:
                own.masked_fill_(hidden, -math.inf)
                value.masked_fill_(hidden.all(0).unsqueeze(-1), 0.0)


class OnlineSoftmax:
    """Running maximum, sum and weighted values of rows: all [tiles, rows, ...].

    The maximum starts at the least finite number: a row that has seen no key keeps it, its
    weights are exp(-inf) = 0, and no difference of infinities arises.
    """

    def __init__(self, query: Tensor, latent_dim: int) -> None:
        tiles, rows = query.shape[:2]
        self.maximum = query.new_full((tiles, rows, 1), torch.finfo(query.dtype).min)
        self.total = query.new_zeros(tiles, rows, 1)
        self.out = query.new_zeros(tiles, rows, latent_dim)

    def negligible(self, scores: Tensor, threshold: float) -> bool:
        """Whether exp(tile_max - running_max) < threshold in every row."""
        tile_maximum = scores.amax(-1, keepdim=True)
        return bool((torch.exp(tile_maximum - self.maximum) < threshold).all())

    def add(self, scores: Tensor, values: Tensor) -> None:
        """Takes in a chunk: scores [tiles, rows, n] (overwritten), values [tiles, n, latent]."""
        if not scores.shape[-1]:
            return
        maximum = torch.maximum(self.maximum, scores.amax(-1, keepdim=True))
        rescale = torch.exp(self.maximum - maximum)
        weights = scores.sub_(maximum).exp_()
        self.total.mul_(rescale).add_(weights.sum(-1, keepdim=True))
        self.out.mul_(rescale).baddbmm_(weights, values)
        self.maximum = maximum

    def result(self) -> tuple[Tensor, Tensor]:
        """out [tiles, rows, latent] and lse [tiles, rows]; without a key 0 and -inf."""
        lse = self.maximum + self.total.log()
        return self.out.div_(self.total.masked_fill(self.total == 0, 1)), lse.squeeze(-1)


def compute_dtype(problem: Problem) -> torch.dtype:
    """float64 for float64 queries, float32 for all others."""
    return torch.float64 if problem.q_dtype == "fp64" else torch.float32
