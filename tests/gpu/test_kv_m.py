"""cute/kv_m against the float64 oracle, on the plans and shapes that break kernels."""

from __future__ import annotations

import math

import pytest
import torch

from mla_lab import jit
from mla_lab.errors import BuildError
from mla_lab.inputs import make_inputs
from mla_lab.plan import make_plan
from mla_lab.plan.config import KernelConfig
from mla_lab.problem import Problem
from mla_lab.reference import decode_reference

pytestmark = pytest.mark.gpu

#: most clusters that may wait for each other's slots; every H200 holds these
WORKERS = {1: 132, 2: 60, 4: 28, 8: 12, 16: 4}
Options = tuple[tuple[str, int], ...]
#: heads, q_lens, kv_lens
SHAPES = [
    (1, (1, 1, 1, 1, 1, 1), (0, 1, 63, 64, 65, 1000)),
    (7, (3, 1, 8), (129, 0, 515)),
    (16, (1, 1, 1), (8192, 0, 700)),
    (24, (2, 5), (64, 2048)),
    (100, (1, 4), (127, 3)),
    (128, (1, 2), (1000, 65)),
]


def built(config: KernelConfig) -> jit.Kernel:
    """These configurations do not ship: they want the compiler on the GPU's own host."""
    try:
        return jit.load(jit.compile(config))
    except BuildError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("policy", ["none", "uniform", "greedy"])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: f"h{s[0]}")
@pytest.mark.parametrize(
    ("rows", "cluster"), [(8, 16), (16, 1), (16, 8), (32, 4), (64, 1), (64, 8)]
)
def test_matches_the_oracle(rows: int, cluster: int, shape: tuple, policy: str) -> None:  # type: ignore[type-arg]
    heads, q_lens, kv_lens = shape
    check(Problem(q_lens, kv_lens, heads), rows, cluster, policy)


@pytest.mark.parametrize("page_size", [16, 32, 128])
def test_pages(page_size: int) -> None:
    check(Problem((1, 2), (1000, 65), 16, page_size=page_size), 16, 8, "uniform")


def test_half_precision() -> None:
    problem = Problem((1, 2), (1000, 65), 16, q_dtype="fp16", kv_format="fp16", out_dtype="fp16")
    check(problem, 16, 8, "uniform")


@pytest.mark.parametrize("splits", [1, 3, 16])
@pytest.mark.parametrize(
    ("rows", "cluster", "merge", "pair"),
    [(16, 1, 2, 1), (16, 8, 1, 1), (16, 4, 2, 1), (64, 1, 2, 1), (16, 1, 3, 1), (16, 1, 3, 2)],
)
def test_grid_mode(rows: int, cluster: int, merge: int, pair: int, splits: int) -> None:
    for q_lens in ((1, 1, 1), (2, 1, 3)):
        problem = Problem(q_lens, (1000, 0, 65), 16)
        tiles = -(-max(q_lens) * 16 // rows)
        splits = min(splits, WORKERS[cluster] // (3 * (tiles + pair - 1)))
        options = (("fused_merge", merge), ("grid", 1), ("pair", pair))
        check_grid(problem, rows, cluster, options, splits, tiles)


def check_grid(
    problem: Problem, rows: int, cluster: int, options: Options, splits: int, tiles: int
) -> None:
    """A launch without a plan: right, equal bits, nothing outside, counters at zero."""
    config = KernelConfig(
        "cute/kv_m", tile_rows=rows, cluster=cluster, mask="causal", options=options
    )
    kernel = built(config)
    inputs = make_inputs(problem, seed=2, features=("ragged", "page_gap"), device="cuda")
    q = inputs.query.reshape(-1, problem.head_dim)
    uniform = problem.q_lens[0] if len(set(problem.q_lens)) == 1 else 0
    slots = problem.batch * tiles * splits
    counters = torch.zeros(16384, dtype=torch.int32, device="cuda")
    partial = torch.full((slots, rows, 512), math.nan, device="cuda")
    partial_lse = partial[:, :, 0].contiguous()
    kept = counters
    if config.option("fused_merge", 1) == 3:
        # partials that are their own flags: zero before, and after
        partial.zero_()
        partial_lse = torch.zeros(slots * (splits + rows // 2), 4, device="cuda")
        kept = partial.view(torch.int32)
    results = []
    for _ in range(2):
        out = torch.full((len(q) + 3, 512), math.nan, dtype=q.dtype, device="cuda")
        lse = torch.full((len(q) + 3,), 7e7, device="cuda")
        kernel(
            q, inputs.kv_cache, out, lse, partial, partial_lse, counters,
            inputs.block_tables, inputs.seq_lens, inputs.cum_seq_lens_q, problem.heads,
            float(inputs.bmm1_scale) / math.log(2.0), float(inputs.bmm2_scale),
            splits, tiles, uniform,
        )  # fmt: skip
        torch.cuda.synchronize()
        assert not counters.any()
        assert not kept.any()
        assert out[len(q) :].isnan().all()
        assert (lse[len(q) :] == 7e7).all()
        results.append((out[: len(q)], lse[: len(q)]))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])
    expected = decode_reference(inputs)
    out, lse = results[0][0].double(), results[0][1].double()
    wanted, wanted_lse = expected.out.reshape(-1, 512).to(out), expected.lse.reshape(-1).to(lse)
    assert (out - wanted).norm() <= 4e-3 * wanted.norm()
    torch.testing.assert_close(lse, wanted_lse, rtol=1e-5, atol=1e-5)


def check(problem: Problem, rows: int, cluster: int, policy: str) -> None:
    """One launch twice: right, equal bits, nothing written outside, counters left at zero."""
    config = KernelConfig(
        "cute/kv_m", tile_rows=rows, cluster=cluster, mask="causal", page_size=problem.page_size,
        q_dtype=problem.q_dtype, kv_format=problem.kv_format, out_dtype=problem.out_dtype,
    )  # fmt: skip
    kernel = built(config)
    plan = make_plan(problem, tile_rows=rows, num_workers=WORKERS[cluster], policy=policy)
    inputs = make_inputs(problem, seed=2, features=("ragged", "page_gap"), device="cuda")
    q = inputs.query.reshape(-1, problem.head_dim)
    expected = decode_reference(inputs)
    results = []
    for _ in range(2):
        out = torch.full((len(q) + 3, 512), math.nan, dtype=q.dtype, device="cuda")
        lse = torch.full((len(q) + 3,), 7e7, device="cuda")
        counters = launch(kernel, plan, inputs, out, lse)
        assert not counters.any()
        assert out[len(q) :].isnan().all()
        assert (lse[len(q) :] == 7e7).all()
        results.append((out[: len(q)], lse[: len(q)]))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])
    out, lse = results[0][0].double(), results[0][1].double()
    wanted, wanted_lse = expected.out.reshape(-1, 512).to(out), expected.lse.reshape(-1).to(lse)
    assert (out - wanted).norm() <= 4e-3 * wanted.norm()
    torch.testing.assert_close(lse, wanted_lse, rtol=1e-5, atol=1e-5)


def launch(kernel, plan, inputs, out, lse):  # type: ignore[no-untyped-def]
    """The kernel ABI, from a plan and a call; returns the counters."""
    device = out.device
    slots = max(1, plan.num_slots)
    partial_out = torch.full((slots, plan.tile_rows, 512), math.nan, device=device)
    partial_lse = torch.full((slots, plan.tile_rows), math.nan, device=device)
    counters = torch.zeros(16384, dtype=torch.int32, device=device)
    tables = inputs.block_tables, inputs.seq_lens, inputs.cum_seq_lens_q
    walk = [torch.from_numpy(a).to(device) for a in (plan.tiles, plan.worker_begin)]
    scale = float(inputs.bmm1_scale) / math.log(2.0)
    q = inputs.query.reshape(-1, plan.problem.head_dim)
    kernel(
        q, inputs.kv_cache, out, lse, partial_out, partial_lse, counters, *tables, *walk,
        plan.problem.heads, scale, float(inputs.bmm2_scale),
    )  # fmt: skip
    torch.cuda.synchronize()
    return counters
