"""Calls of our own builds: poisoned inputs, the launch arguments, and what must come out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..call.feature_operands import LOG2_E, Empty, feature_operands, mask
from ..core.errors import invalid
from ..core.kv_cache import DTYPES
from ..core.problem import Problem
from ..plan import make_plan
from ..plan.config import KernelConfig
from ..plan.fixed_pieces import LEAST_BUNDLES, PieceCuts, fixed_pieces, most_slots
from ..plan.gate import dual_gate, gated
from ..plan.launch_modes import costs_of
from ..plan.promotion import promoted_slots
from ..plan.tile import WorkTile
from ..plan.workspace import KEPT_WORDS, LL_WORDS, MAX_CTAS
from ..reference.inputs import DecodeInputs, make_inputs
from ..reference.mla import Result, TileWalk, decode_reference
from ..reference.tolerance import error, lse_error

#: arguments of the kernels' launch, in order
NAMES = (
    *("query", "kv_cache", "out", "lse", "partial_out", "partial_lse", "counters"),
    *("block_tables", "seq_lens", "q_begin"),
)
#: kernels of decode calls; others have arguments of their own
KERNELS = ("cute/keep_ab_sm90", "cute/swap_ab_sm90", "cute/mla_sm100")
COUNTERS = 64
#: of skip-softmax: leaves most tiles out
SKIP_FACTOR = 800.0
#: that find their work from the lengths; of a dual build twice a request's row tiles of 16 rows; of
#: a batch-invariant call the fewest that the rule takes
WORKERS, DUAL_WORKERS, PIECE_WORKERS = 5, 8, LEAST_BUNDLES
#: of a batch-invariant call: pieces of one block, so that short requests have several
PIECE_CUTS = PieceCuts(split_blocks=1, half_blocks=1)
#: largest errors of out (relative) and lse, of 16-bit operands, and of e4m3 ones, whose weights are
#: rounded before they are summed
SIXTEEN_BITS, EIGHT_BITS = (0.008, 1e-5), (0.06, 0.02)


@dataclass
class Call:
    """Inputs, arguments in the order of the kernel, results, and the oracle's."""

    config: KernelConfig
    inputs: DecodeInputs
    args: tuple[Any, ...]
    out: Tensor
    lse: Tensor
    expected: Result

    @property
    def written(self) -> tuple[Tensor, ...]:
        """Arguments that the kernel writes: results, partials and counters."""
        return self.args[2:7]

    @property
    def results(self) -> tuple[Tensor, Tensor]:
        """out and lse."""
        return self.out, self.lse

    def errors(self) -> tuple[float, float]:
        """Errors of out (relative) and lse; infinite where one is NaN and the oracle's is not."""
        expected = self.expected.out.reshape(self.out.shape)
        return error(self.out, expected).relative, lse_error(self.lse, self.expected.lse)


def is_right(call: Call) -> bool:
    """Whether results lie as near to the oracle as the build's formats allow."""
    config = call.config
    coarse = config.q_dtype == "e4m3" or config.out_dtype == "e4m3"
    out, lse = call.errors()
    bounds = EIGHT_BITS if coarse else SIXTEEN_BITS
    return out <= bounds[0] and lse <= bounds[1]


def problem_for(
    config: KernelConfig,
    kv_lens: tuple[int, ...],
    heads: int = 0,
    q_len: int = 1,
    top_k: int = 0,
    page_size: int = 0,
) -> Problem:
    """A decode problem in the formats of a build; as many heads as its tile has rows by default."""
    return Problem(
        q_lens=(q_len,) * len(kv_lens),
        kv_lens=kv_lens,
        heads=heads or min(128, config.tile_rows if config.tile_rows > 16 else 16),
        q_dtype=config.q_dtype,
        kv_format=config.kv_format,
        out_dtype=config.out_dtype,
        page_size=page_size or config.page_size,
        top_k=top_k or (128 if config.option("gather") == 2 else 0),
    )


def make_call(
    config: KernelConfig,
    problem: Problem,
    splits: int = 1,
    seed: int = 0,
    workers: int = 0,
    scale: float | None = None,
) -> Call:
    """A call of a build, cut as `call_of` says. Seeded inputs hold NaN where nothing is read.
    `scale` is the value of a bmm1_scale in memory, and of a build that reads it there."""
    features = ["lse"]
    tree = config.mask == "tree"
    if feature_operands(config):
        features += ["sinks"]
        if config.kernel == "cute/swap_ab_sm90" or config.option("scales"):
            features += ["device_scales"]
        if tree:
            features += ["tree_mask"]
    inputs = make_inputs(problem, seed, features, workspace_bytes=64)
    if scale is not None:
        if not isinstance(inputs.bmm1_scale, Tensor):
            raise invalid("scale", scale, "builds that read bmm1_scale in memory")
        inputs.bmm1_scale.fill_(scale)
    if config.option("skip"):
        inputs = replace(inputs, skip_softmax_threshold_scale_factor=SKIP_FACTOR)
    return call_of(config, inputs, splits, workers)


def call_of(
    config: KernelConfig,
    inputs: DecodeInputs,
    splits: int = 1,
    workers: int = 0,
    pieces: Mapping[str, int] | None = None,
) -> Call:
    """A call of a build on `inputs`, cut in `splits` pieces a request where they are long enough; 0
    where WORKERS workers find their pieces from the lengths, as they always do in a build with the
    option pieces. With `pieces`, arguments of `plan.policies.fixed_size`, they follow from a
    request's own length instead. `workers` share the pieces of a plan, one for each piece of a
    request by default. A dual build has a gate (`plan.gate.dual_gate`)."""
    problem = inputs.problem
    if config.option("pieces") and splits:
        raise invalid("splits", splits, "0: a build with pieces takes no plan")
    if config.option("dual") and splits:
        raise invalid("splits", splits, "0: a dual build takes no plan")
    if config.option("dual") == 1 and problem.batch != 1:
        raise invalid("batch", problem.batch, "1: what this dual build takes")
    query = inputs.query.unsqueeze(0) if inputs.query.dim() == 3 else inputs.query
    out = torch.full((*query.shape[:-1], problem.latent_dim), 7.0).to(DTYPES[config.out_dtype])
    lse = torch.full((problem.total_q, problem.heads), 7.0)
    asked = _requests(config, problem)
    work, slots = _work(config, asked, splits, workers, pieces)
    scales = (inputs.bmm1_scale, inputs.bmm2_scale)
    first, second = (1.0 if isinstance(s, Tensor) else float(s) for s in scales)
    first = first if isinstance(scales[0], Tensor) else first * LOG2_E
    q_begin = torch.tensor([0, *np.cumsum(asked.q_lens)], dtype=torch.int32)
    partials = _partials(config, asked, slots, work)
    views = _views(config, query, out, lse)
    args: list[Any] = [views[0], inputs.kv_cache, *views[1:], *partials]
    table = inputs.block_tables
    lens = inputs.seq_lens
    if problem.top_k:  # of a list of slots every one counts where there are no lengths
        lens = lens[:0] if asked is problem else torch.tensor(asked.kv_lens, dtype=torch.int32)
    args += [table.flatten(0, 1) if table.dim() == 3 else table, lens, q_begin, *work]
    args += [problem.heads, first, second]
    # 0: each request's own, by q_begin
    q_len = asked.q_lens[0] if len(set(asked.q_lens)) == 1 else 0
    if config.option("grid"):
        args += [splits, _row_tiles(config, problem), 1 if problem.top_k else q_len]
    elif splits:
        args += [len(work[1]) - 1, q_len, 0]
    else:
        args += [finders(config), q_len, _weights(config, problem)]
    if feature_operands(config):
        args.append(_extras(config, inputs))
    expected = decode_reference(inputs, walk=_walk(config, problem, work))
    return Call(config, inputs, tuple(args), out, lse, expected)


def finders(config: KernelConfig) -> int:
    """Workers of a launch that find their work from the lengths."""
    if config.option("pieces"):
        return PIECE_WORKERS
    return DUAL_WORKERS if config.option("dual") else WORKERS


def _weights(config: KernelConfig, problem: Problem) -> int:
    """The launch argument `costs` of workers that find their work."""
    if config.option("pieces"):
        return PIECE_CUTS.packed
    return gated(costs_of(config).packed, _gate(config, problem))


def _gate(config: KernelConfig, problem: Problem) -> int:
    """The gate of a dual build, else none."""
    dual = config.option("dual")
    return dual_gate(dual, max(problem.q_lens) * problem.heads, DUAL_WORKERS) if dual else 0


def _requests(config: KernelConfig, problem: Problem) -> Problem:
    """The problem as a launch has it: workers that find their pieces take each query token of a
    sparse call as a request of its own."""
    if not problem.top_k or config.option("grid"):
        return problem
    tokens = problem.total_q
    lists = (problem.top_k,) * tokens
    return replace(problem, q_lens=(1,) * tokens, kv_lens=lists, top_k=0)


def _walk(config: KernelConfig, problem: Problem, work: list[Tensor]) -> TileWalk | None:
    """Where a build with skip-softmax starts its running maximum anew; None of others."""
    if not config.option("skip"):
        return None
    begins: list[list[int]] = [[0] for _ in problem.q_lens]
    tiles = work[0].numpy()
    if config.option("pieces"):
        rows, workers = config.tile_rows, finders(config)
        tiles = fixed_pieces(problem, tile_rows=rows, num_workers=workers, cuts=PIECE_CUTS).tiles
    for tile in tiles.tolist():
        word = WorkTile(*tile)
        begins[word.request].append(word.block_begin)
    return TileWalk(config.tile_rows, config.tile_kv, begins)


def _views(config: KernelConfig, *tensors: Tensor) -> list[Tensor]:
    """Query, out and lse as a build takes them: with the option shaped as callers have them, else
    as rows.
    """
    if config.option("shaped"):
        return list(tensors)
    query, out, lse = tensors
    return [query.flatten(0, -2), out.flatten(0, -2), lse.flatten()]


def _extras(config: KernelConfig, inputs: DecodeInputs) -> tuple[Any, ...]:
    """The tuple of feature operands; the mask as `_views` says."""
    empty, found = Empty.on(inputs.query.device), []
    for take in feature_operands(config):
        value = take(inputs, empty)
        rows = take is mask and not config.option("shaped")
        found.append(value.flatten(0, 1) if rows else value)
    return tuple(found)


def _row_tiles(config: KernelConfig, problem: Problem) -> int:
    tokens = 1 if problem.top_k else max(problem.q_lens)
    return max(1, -(-tokens * problem.heads // config.tile_rows))


def _work(
    config: KernelConfig,
    problem: Problem,
    splits: int,
    workers: int,
    pieces: Mapping[str, int] | None,
) -> tuple[list[Tensor], int]:
    """Tiles and worker_begin of a plan, or what takes their place, none of a build by formula; and
    the number of partials."""
    if config.option("grid"):
        return [], splits
    if not splits:
        kept = torch.full((MAX_CTAS * KEPT_WORDS,), 7, dtype=torch.int32)
        found = [torch.empty(0, 8, dtype=torch.int32), kept]
        if config.option("dual"):
            found.append(torch.zeros(LL_WORDS))
        if config.option("pieces"):
            return found, most_slots(finders(config))
        ran = finders(config)
        return found, 2 * ran + promoted_slots(problem, config.tile_rows, ran, config)
    knobs: dict[str, Any] = {**pieces} if pieces else {"num_splits": splits}
    plan = make_plan(
        problem,
        tile_rows=config.tile_rows,
        tile_kv=config.tile_kv,
        num_workers=workers or max(1, splits * problem.batch),
        policy="fixed_size" if pieces else "fixed",
        **knobs,
    )
    words = [torch.from_numpy(np.array(w)) for w in (plan.tiles, plan.worker_begin)]
    promoted = promoted_slots(problem, config.tile_rows, plan.num_workers, config)
    return words, max(1, plan.num_slots + promoted)


def _partials(
    config: KernelConfig, problem: Problem, splits: int, work: list[Tensor]
) -> list[Tensor]:
    """Room for partials and counters, all zero."""
    rows = config.tile_rows
    lists = problem.total_q if problem.top_k else problem.batch
    slots = splits if work else lists * _row_tiles(config, problem) * splits
    out = torch.zeros(slots, rows, problem.latent_dim)
    if config.option("fused_merge", 1) == 3:
        lse = torch.zeros(slots * (splits + rows // 2), 4)
    else:
        lse = torch.zeros(slots, rows)
    # where CTAs share a row tile its counters lie 128 bytes apart (`counter_of` of keep_ab),
    # workers that find their work number row tiles by worker, and fixed pieces have a flag a slot
    groups, flags = lists * _row_tiles(config, problem), 0
    if work and not len(work[0]):
        flags = slots if config.option("pieces") else 0
        groups = max(groups, flags or finders(config))
    apart = 0 if config.kernel == "cute/swap_ab_sm90" and config.cluster == 1 else 32 * groups
    counters = torch.zeros(max(COUNTERS, flags, apart) * config.cluster, dtype=torch.int32)
    return [out, lse, counters]
