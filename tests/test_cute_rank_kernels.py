"""The kernels of decode context parallel, emulated: the merge against the one in float64, the mask
against PyTorch's."""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from mla_lab import jit
from mla_lab.api.context_parallel import Done, Gathering, merge, merged_by_torch, shard
from mla_lab.backends import rank_kernels
from mla_lab.backends.rank_mask import RankMask
from mla_lab.bench.rank_kernels import measure
from mla_lab.call.decode_args import native_args
from mla_lab.cli import main
from mla_lab.core.dims import LATENT_DIM
from mla_lab.core.errors import InvalidInput
from mla_lab.core.problem import Problem
from mla_lab.emulate import EmulatedKernel, Options
from mla_lab.reference.inputs import make_inputs
from mla_lab.reference.mla import merge_partials

from .needs import needs_cxx

UNTOUCHED = 9.0
BASES = (rank_kernels.NATURAL, rank_kernels.BASE_2)
DTYPES = {config: dtype for dtype, config in rank_kernels.MERGES.items()}


@pytest.fixture(
    scope="module", params=[*rank_kernels.MERGES.values()], ids=lambda config: config.out_dtype
)
def kernel(request: pytest.FixtureRequest) -> tuple[EmulatedKernel, torch.dtype]:
    emulated = EmulatedKernel.of(jit.compile(request.param), Options(check=True))
    return emulated, DTYPES[request.param]


def results(ranks: int, rows: int, heads: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Of all ranks, flat. Rank 0 has no key for the first row, no rank has one for the last, and
    what they leave there is no number; of the second row one lse is NaN."""
    made = torch.Generator().manual_seed(ranks)
    outs = torch.randn(ranks, rows * heads, LATENT_DIM, generator=made).to(dtype)
    lses = 4 * torch.randn(ranks, rows * heads, generator=made)
    lses[0, 0], outs[0, 0] = -math.inf, math.nan
    lses[:, -1], outs[:, -1] = -math.inf, math.inf
    lses[-1, 1] = math.nan
    return outs, lses


@needs_cxx
@pytest.mark.parametrize("base", BASES, ids=["natural", "base2"])
@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize(("ranks", "rows", "heads"), [(1, 3, 1), (2, 5, 3), (5, 2, 8), (32, 3, 5)])
def test_it_is_the_merge_in_float64(
    kernel: tuple[EmulatedKernel, torch.dtype],
    ranks: int, rows: int, heads: int, with_sinks: bool, base: tuple[float, float],
) -> None:  # fmt: skip
    run, dtype = kernel
    outs, lses = results(ranks, rows, heads, dtype)
    sinks = torch.linspace(-3, 3, heads) if with_sinks else None
    out = torch.full((rows * heads, LATENT_DIM), UNTOUCHED, dtype=dtype)
    lse = torch.full((rows * heads,), UNTOUCHED)
    unit = math.log(2) if base is rank_kernels.BASE_2 else 1.0
    run(
        outs, lses / unit, lses.view(-1) if sinks is None else sinks, out, lse,
        0 if sinks is None else heads, *base,
    )  # fmt: skip
    assert run.run.findings == []
    alone = (lses.isfinite().sum(0) == 1) & ~lses.isnan().any(0)
    own = (lses / unit).nan_to_num(neginf=0.0).sum(0)
    assert torch.equal(lse[alone], own[alone])
    shape = (ranks, rows, heads)
    kept = torch.where(lses.isneginf()[..., None], 0.0, outs.double())
    expected = merge_partials(kept.view(*shape, -1), lses.double().view(shape), sinks)
    eps = torch.finfo(dtype).eps
    assert torch.allclose(
        out.view(expected.out.shape).double(), expected.out, rtol=eps, atol=eps / 8, equal_nan=True
    )
    assert torch.allclose(
        unit * lse.double().view(rows, heads),
        expected.lse.double(),
        rtol=1e-6,
        atol=2e-6,
        equal_nan=True,
    )
    assert expected.out.view(rows * heads, -1)[1].isnan().all()
    assert not out[-1].any() and bool(lse[-1].isneginf())


@pytest.fixture(scope="module")
def mask_kernel() -> EmulatedKernel:
    return EmulatedKernel.of(jit.compile(rank_kernels.MASK), Options(check=True))


@needs_cxx
@pytest.mark.parametrize("seed", range(24))
def test_the_mask_is_pytorch_s(
    mask_kernel: EmulatedKernel, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of one length of drafts and of several, some of them none, with trees and without; ranks that
    hold tokens behind a request's end, and a sum of query tokens that ends early."""
    rng = random.Random(seed)
    ragged, tree, batch = bool(seed & 1), bool(seed & 2), rng.choice((1, 3, 6))
    most = rng.choice((2, 5, 40))
    q_lens = tuple(rng.randint(0, most) if ragged else most for _ in range(batch))
    q_lens = (most, *q_lens[1:])
    kv_lens = tuple(q_len + rng.randint(0, 90) for q_len in q_lens)
    features = [*(["tree_mask"] if tree else []), *(["max_q_len"] if ragged else [])]
    inputs = make_inputs(Problem(q_lens, kv_lens, 2), seed, features, workspace_bytes=0)
    world = rng.randint(2, 5)
    for rank in shard(inputs, world):
        args = native_args(**rank.contract_args())
        if seed % 3 == 0:
            args = replace(args, causal_seqlens_kv_global=inputs.seq_lens - rng.randint(0, 3))
        if args.cum_seq_lens_q is not None and seed % 5 == 0:
            args = replace(args, cum_seq_lens_q=(args.cum_seq_lens_q - 1).clamp_min(0))
        of = RankMask(most if args.cum_seq_lens_q is None else None, sum(q_lens), most)
        expected = of.by_torch(args)
        with monkeypatch.context() as patched:
            patched.setattr(rank_kernels, "can_mask", lambda args: True)
            patched.setattr(rank_kernels, "_kernel", lambda *given: mask_kernel)
            got = of(args)
        assert mask_kernel.run.findings == []
        assert torch.equal(got.seq_lens, expected.seq_lens)
        assert got.mask is not None and expected.mask is not None
        assert got.mask.shape == expected.mask.shape
        assert torch.equal(got.mask.view(torch.int16), expected.mask.view(torch.int16))


@needs_cxx
@pytest.mark.parametrize("world", [2, 3, 7])
def test_lengths_at_the_ends_of_int32_are_pytorch_s(
    mask_kernel: EmulatedKernel, world: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_all = torch.tensor([2**31 - 1, 2**31 - 3, 0, -1, -5, -(2**31)], dtype=torch.int32)
    inputs = make_inputs(Problem((1,) * 6, (9,) * 6, 2), 0, workspace_bytes=0)
    monkeypatch.setattr(rank_kernels, "can_mask", lambda args: True)
    monkeypatch.setattr(rank_kernels, "_kernel", lambda *given: mask_kernel)
    for rank in shard(inputs, world):
        args = native_args(**rank.contract_args())
        held = torch.full_like(of_all, 2**31 - 1)
        args = replace(args, seq_lens=held, causal_seqlens_kv_global=of_all)
        exact = [max(0, -(-(n - rank.cp_rank) // world)) for n in of_all.tolist()]
        of = RankMask(1, 6, 1)
        assert of(args).seq_lens.tolist() == of.by_torch(args).seq_lens.tolist() == exact


@pytest.fixture
def on_card(
    kernel: tuple[EmulatedKernel, torch.dtype], monkeypatch: pytest.MonkeyPatch
) -> torch.dtype:
    """The public merge runs the kernel, emulated, for this dtype."""
    run, dtype = kernel
    monkeypatch.setattr(rank_kernels, "_can_run", lambda *given: True)
    monkeypatch.setattr(rank_kernels, "_kernel", lambda *given: run)
    return dtype


@needs_cxx
@pytest.mark.parametrize("base", [None, "base2"])
@pytest.mark.parametrize("as_list", [False, True])
def test_the_public_merge_by_the_kernel(
    on_card: torch.dtype, base: str | None, as_list: bool
) -> None:
    made = torch.Generator().manual_seed(0)
    outs = torch.randn(3, 2, 5, 4, LATENT_DIM, generator=made).to(on_card)
    lses = 4 * torch.randn(3, 10, 4, generator=made)
    sinks = torch.linspace(-2, 2, 8)[::2]
    given = [sinks] if as_list else sinks
    out, lse = merge(list(outs), list(lses), sinks=given, lse_base=base)
    assert out.shape == (2, 5, 4, LATENT_DIM) and lse.shape == (10, 4)
    flat = outs.view(3, 10, 4, -1)
    expected = merged_by_torch(flat, lses, sinks, base)
    assert torch.allclose(out.view_as(expected[0]).float(), expected[0].float(), atol=2e-2)
    assert torch.allclose(lse, expected[1], atol=1e-5)
    gathered = Gathering(lses, flat, (Done(), Done()), (out.shape, lse.shape))
    for got, same in zip(gathered.merged(sinks=given, lse_base=base), (out, lse), strict=True):
        assert torch.equal(got, same)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
def test_what_autograd_follows_is_merged_by_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_kernels, "_can_run", lambda *given: True)
    outs, lses = torch.randn(2, 3, 4, LATENT_DIM).bfloat16(), torch.randn(2, 3, 4)
    sinks = torch.nn.Parameter(torch.zeros(4))
    assert rank_kernels.can_merge(outs, lses, sinks.detach())
    with torch.no_grad():
        assert rank_kernels.can_merge(outs, lses, sinks)
    out, _ = merge(list(outs), list(lses), sinks=sinks)
    out.float().sum().backward()
    assert sinks.grad is not None and sinks.grad.abs().sum() > 0
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(lses, torch.ones_like(lses))
        assert not rank_kernels.can_merge(outs, dual)


def test_a_cpu_merges_by_pytorch() -> None:
    outs = torch.zeros(2, 3, 4, LATENT_DIM, dtype=torch.bfloat16)
    assert not rank_kernels.can_merge(outs, torch.zeros(2, 3, 4))


def test_the_record(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = tmp_path / "rank_kernels.jsonl"
    sizes = ["--ranks", "1,3", "--batch", "1", "--heads", "2", "--rounds", "1"]
    assert main(["bench", "rank-kernels", str(record), *sizes]) == 0
    rows = [json.loads(line) for line in record.read_text().splitlines()]
    assert [row.get("ranks") for row in rows] == [1, 3, None]
    assert all(row["ok"] and not row["kernel"] for row in rows)
    assert len(capsys.readouterr().out.splitlines()) == 4


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ranks": (2, 0)}, "ranks: got 0"),
        ({"batches": (0,)}, "batch: got 0"),
        ({"heads": 0}, "heads: got 0"),
        ({"rounds": 0}, "rounds: got 0"),
        ({"batches": (2, 3, 2)}, "batch: got"),
        ({"heads": 10**11}, "ranks x batch x heads x 512: got"),
        ({"ranks": (10**20,)}, "ranks x batch x heads x 512: got"),
    ],
)
def test_sizes_that_nothing_has(tmp_path: Path, change: dict[str, object], message: str) -> None:
    sizes: dict[str, object] = {"ranks": (2,), "batches": (1,), "heads": 1, "rounds": 1} | change
    with pytest.raises(InvalidInput, match=message):
        next(measure(tmp_path / "rank_kernels.jsonl", **sizes))  # type: ignore[arg-type]


def test_a_file_that_is_no_record_stays(tmp_path: Path) -> None:
    other = tmp_path / "notes.txt"
    other.write_text("mine")
    with pytest.raises(InvalidInput, match="holds something else"):
        next(measure(other, (2,), (1,), 1, 1))
    assert other.read_text() == "mine"
