"""Cost of a feature: time of a call with it over the time of the same call without it.

Both calls read the same KV copies in rotation, so that neither has its keys in the L2; their graphs
are replayed in turn, in changing order. A row's ratio is the median over rounds of (time with) /
(time without); `low` and `high` are its 95 % confidence interval by ranks. Where differences of 1 %
matter, the call without the feature is captured a second time and timed in the same rounds:
`control` is its ratio to the first capture, an estimate of the noise.

A sparse call takes an eighth of the dense call's time and draws less power, and the clock follows
the power within milliseconds. In alternating replays it would run at the clock of the dense call
(this ratio is `turns`); the row's ratio is from times that each follow a warm-up of the same call.

A feature is timed at uniform shapes, where the call without it exists. Skip-softmax is timed on
concentrated and heavy-tailed inputs, and on Gaussian ones, where there is nothing to skip. "dense
path" compares a plain call of one query token with the same kernel compiled without a mask; a plain
build has no code of the other features.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor

from ..api import replay
from ..api.decode import decode
from ..backends.cute.families import costs
from ..bench.cases import Case
from ..bench.rotation import MIN_LAUNCHES, WORKSPACE_BYTES, kv_bytes, make_rotation
from ..bench.timers import Replay, Timer, timer_for
from ..core import masks
from ..core.errors import MlaLabError
from ..core.gpu import H200, Gpu
from ..core.problem import Problem
from ..plan import Plan, choose
from ..reference.inputs import DecodeInputs
from ..reference.mla import TileWalk, skip_tiles
from ..reference.operands import operands

ROUNDS = 41
#: rounds of calls that are timed at the clock of their own power, and seconds until a clock settles
SETTLED_ROUNDS, SETTLE_US = 15, 30_000.0
#: least launches of a replay for calls that read less than this many bytes, so that it takes 0.4 ms
LAUNCHES, SHORT_BYTES = 48, 150_000_000
TOP_K = 2048
#: standard deviations of a normal distribution that hold 95 %
SIGMAS_95 = 1.96
#: factors of skip-softmax; 0 is exact attention
FACTORS = (0.0, 1e-3, 1e-2, 1.0)


@dataclass(frozen=True)
class Comparison:
    """One feature at one shape."""

    feature: str
    batch: int
    q_len: int
    heads: int
    kv_len: int
    distribution: str = "gauss"
    #: features of both calls
    also: str = "dense"
    #: time each call after a warm-up of the same call
    settled: bool = False

    @property
    def problem(self) -> Problem:
        return Problem.uniform(self.batch, self.q_len, self.kv_len, self.heads)


def comparisons() -> list[Comparison]:
    """All of them, most important first."""
    uniform = [
        Comparison("ragged", *shape)
        for shape in (
            (1, 1, 128, 8192),
            (4, 1, 16, 8192),
            (16, 1, 16, 4096),
            (16, 2, 128, 4096),
            (64, 1, 16, 4096),
            (64, 1, 128, 4096),
            (64, 2, 64, 2048),
            (128, 1, 128, 2048),
        )
    ]
    plain = [
        Comparison("dense path", *shape, also="bare")
        for shape in (
            (1, 1, 16, 8192),
            (1, 1, 64, 8192),
            (1, 1, 8, 8192),
            (4, 1, 16, 8192),
            (8, 1, 16, 4096),
            (16, 1, 16, 4096),
            (16, 1, 32, 8192),
            (32, 1, 16, 4096),
            (64, 1, 16, 4096),
            (128, 1, 16, 2048),
            (4, 1, 128, 8192),
            (64, 1, 128, 4096),
        )
    ]
    drafts = [
        Comparison(mask, *shape)
        for shape in ((16, 8, 16, 8192), (64, 8, 16, 4096), (16, 8, 128, 4096), (64, 8, 128, 2048))
        for mask in ("tree mask", "chain mask")
    ]
    sparse = [Comparison("sparse", 64, 1, heads, 32768, settled=True) for heads in (16, 128)]
    skipping = [
        Comparison(f"skip {factor:g}", *shape, distribution, also)
        for shape, distribution, also in (
            ((64, 1, 128, 8192), "concentrated", "dense"),
            ((32, 4, 128, 8192), "concentrated", "dense"),
            ((32, 4, 128, 8192), "concentrated", "ragged"),
            ((16, 1, 128, 32768), "concentrated", "dense"),
            ((64, 1, 128, 8192), "heavy_tailed", "dense"),
            ((32, 4, 128, 8192), "gauss", "dense"),
        )
        for factor in FACTORS
    ]
    extras = [
        Comparison(feature, *shape)
        for shape in ((16, 1, 16, 4096), (64, 1, 64, 4096), (64, 2, 128, 4096))
        for feature in ("sinks", "device scales")
    ]
    return [*plain, *uniform, *drafts, *sparse, *skipping, *extras]


def varied(inputs: DecodeInputs, feature: str) -> DecodeInputs:
    """The call with one feature added; none for "dense"."""
    problem, device = inputs.problem, inputs.query.device
    q_len = problem.q_lens[0]
    if feature == "ragged":
        sums = torch.arange(problem.batch + 1, dtype=torch.int32, device=device) * q_len
        query = inputs.query.flatten(0, 1)
        return replace(inputs, query=query, cum_seq_lens_q=sums, max_q_len=q_len)
    if feature in ("tree mask", "chain mask"):
        random = torch.Generator().manual_seed(q_len)
        tree = feature == "tree mask"
        seen = [
            masks.tree(masks.random_parents(q_len, random)) if tree else masks.chain(q_len)
            for _ in range(problem.batch)
        ]
        return replace(inputs, mask=masks.pack(torch.stack(seen)).to(device))
    if feature == "sparse":
        return _sparse(inputs)
    if feature == "sinks":
        return replace(inputs, sinks=torch.linspace(-2, 2, problem.heads, device=device))
    if feature == "device scales":
        scales = torch.tensor([float(inputs.bmm1_scale), 1.0], device=device)
        return replace(inputs, bmm1_scale=scales[:1], bmm2_scale=scales[1:])
    if feature.startswith("skip"):
        return replace(inputs, skip_softmax_threshold_scale_factor=float(feature.split()[1]))
    return inputs


def _sparse(inputs: DecodeInputs) -> DecodeInputs:
    """`TOP_K` distinct random keys for each query token."""
    problem = inputs.problem
    random = torch.Generator(device=inputs.query.device).manual_seed(1)
    lists = []
    for row in inputs.block_tables:
        for _ in range(problem.q_lens[0]):
            draw = torch.randperm(problem.kv_lens[0], generator=random, device=row.device)
            at = draw[: min(TOP_K, len(draw))]
            lists.append(row[at // problem.page_size] * problem.page_size + at % problem.page_size)
    slots = torch.stack(lists).int().unflatten(0, (problem.batch, -1))
    return replace(inputs, block_tables=slots, sparse_mla_top_k=slots.shape[-1])


def run(
    chosen: Iterable[Comparison],
    device: str,
    *,
    backend: str = "cute",
    rounds: int = ROUNDS,
    timer: Timer | None = None,
    progress: Callable[[str], None] = lambda text: None,
) -> Iterator[dict[str, Any]]:
    """A row for each comparison; a refused one has the reason."""
    timer = timer or timer_for(device)
    for c in chosen:
        row: dict[str, Any] = {"kind": "case", **_named(c)}
        try:
            row.update(status="ok", **_measure(c, torch.device(device), backend, rounds, timer))
        except MlaLabError as error:
            row.update(status="refused", reason=str(error))
        told = "".join(f" {row[name]:.3f}" for name in ("low", "ratio", "high") if name in row)
        shape = f"B{c.batch} q{c.q_len} H{c.heads} kv{c.kv_len} {c.distribution}"
        progress(f"{c.feature} beside {c.also}, {shape}: {row.get('reason', told)}")
        yield row


def _named(c: Comparison) -> dict[str, Any]:
    shape = {name: getattr(c, name) for name in ("batch", "q_len", "heads", "kv_len")}
    return {"feature": c.feature, "beside": c.also, "inputs": c.distribution, "shape": shape}


def _measure(
    c: Comparison, device: torch.device, backend: str, rounds: int, timer: Timer
) -> dict[str, Any]:
    case = Case("", "", c.problem, distribution=c.distribution)
    rotation = make_rotation(case, device=device, workspace_bytes=WORKSPACE_BYTES)
    without = [varied(copy, c.also) for copy in rotation.copies]
    having = [varied(copy, c.feature) for copy in without]
    order = rotation.order(LAUNCHES if kv_bytes(c.problem) < SHORT_BYTES else MIN_LAUNCHES)
    replays = []
    for copies, plan in zip((without, having), plans_of(c), strict=True):
        out = _out(copies[0])
        replay.clear()
        calls = [_launch(copy, backend, out, plan) for copy in copies]
        for call in calls:
            call()
        replays.append(timer.ready([calls[i] for i in order]))
        if c.also == "bare" and copies is without:
            replays.append(timer.ready([calls[i] for i in order]))
    times = _times(replays, rounds)
    more = {"control": _ratios(times)[:-1]}
    if c.settled:
        more["turns"] = _ratios(times)
        rounds = min(rounds, SETTLED_ROUNDS)
        times = _times(replays, rounds, SETTLE_US)
    found = {"us": median(times[-1]) / len(order), "beside_us": median(times[0]) / len(order)}
    found |= interval(_ratios(times)[-1])
    for name, ratios in more.items():
        for one in ratios:
            around = interval(one)
            found |= {name: around["ratio"]}
            found |= {f"{name}_{side}": around[side] for side in ("low", "high")}
    if c.feature.startswith("skip"):
        found |= _skipped(having[0], without[0], backend)
    return {"rounds": rounds, **{name: float(f"{value:.5g}") for name, value in found.items()}}


def _ratios(times: list[list[float]]) -> list[list[float]]:
    """Time of each other replay over that of the first, round by round."""
    first, *others = times
    return [[b / a for a, b in zip(first, other, strict=True)] for other in others]


def _times(replays: list[Replay], rounds: int, settle_us: float = 0.0) -> list[list[float]]:
    """Microseconds of each replay in each round; rounds start with different replays."""
    took = [replay() for replay in replays]
    again = [max(1, math.ceil(settle_us / us)) for us in took]
    times: list[list[float]] = [[] for _ in replays]
    for turn in range(rounds):
        for place in range(len(replays)):
            which = (turn + place) % len(replays)
            replay, n = replays[which], again[which]
            if settle_us:
                replay.repeat(n)
            times[which].append(replay.repeat(n) / n)
    return times


def plans_of(c: Comparison) -> tuple[Plan | None, Plan | None]:
    """Plans of the two calls; for "dense path" one plan for two builds."""
    if c.also != "bare":
        return None, None
    plan = choose(c.problem, Gpu.here() or H200, costs=costs()).plan(c.problem)
    if plan.config is None:
        return None, None
    return replace(plan, config=replace(plan.config, mask="none")), plan


def _launch(
    inputs: DecodeInputs, backend: str, out: Tensor, plan: Plan | None = None
) -> Callable[[], Any]:
    named = {k: v for k, v in inputs.contract_args().items() if k != "qk_nope_head_dim"}
    return partial(decode, **named, out=out, backend=backend, plan=plan)


def interval(values: list[float]) -> dict[str, float]:
    """Median, and its 95 % confidence interval by ranks."""
    ordered, n = sorted(values), len(values)
    margin = SIGMAS_95 * math.sqrt(n) / 2
    low, high = max(0, math.floor(n / 2 - margin)), min(n - 1, math.ceil(n / 2 + margin))
    return {"ratio": median(ordered), "low": ordered[low], "high": ordered[high]}


def _skipped(having: DecodeInputs, without: DecodeInputs, backend: str) -> dict[str, float]:
    """Tiles that the oracle keeps of the first request in one split; the largest softmax mass that
    the timed kernel dropped of any row; and the relative difference of its out from exact.
    """
    request = next(operands(having, torch.float32))
    factor = having.skip_softmax_threshold_scale_factor or 0.0
    kept = skip_tiles(request, float(having.bmm1_scale), factor, TileWalk())
    replay.clear()
    results = [
        _launch(replace(inputs, return_lse=True), backend, _out(inputs))()
        for inputs in (having, without)
    ]
    (out, lse), (exact, exact_lse) = results
    gap = (out.float() - exact.float()).norm() / exact.float().norm()
    return {
        "kept": float(kept.visible.double().mean() / request.visible.double().mean()),
        "dropped": float((1 - torch.exp(lse - exact_lse)).max()),
        "moved": float(gap),
    }


def _out(inputs: DecodeInputs) -> Tensor:
    query = inputs.query
    shape = (*query.shape[:-1], inputs.kv_lora_rank)
    return torch.empty(shape, dtype=torch.bfloat16, device=query.device)
