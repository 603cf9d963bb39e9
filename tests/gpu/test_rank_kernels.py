"""On a card one kernel each does what PyTorch does elsewhere: the merge of ranks, their masks."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from mla_lab.api.context_parallel import merge, merged_by_torch, shard
from mla_lab.backends import rank_kernels
from mla_lab.backends.rank_mask import RankMask
from mla_lab.call.decode_args import native_args
from mla_lab.core.dims import LATENT_DIM
from mla_lab.core.errors import InvalidInput
from mla_lab.core.problem import Problem
from mla_lab.reference.inputs import make_inputs
from mla_lab.reference.mla import merge_partials

pytestmark = pytest.mark.gpu
HEADS = 16


def results(ranks: int, rows: int, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor]:
    """Of all ranks; of a tenth of the rows a rank has no key and leaves NaN, of the last no one
    has one."""
    made = torch.Generator(device="cuda").manual_seed(ranks)
    shape, where = (ranks, rows, HEADS), {"generator": made, "device": "cuda"}
    outs = torch.randn(*shape, LATENT_DIM, **where).to(dtype)  # type: ignore[call-overload]
    lses = 4 * torch.randn(shape, **where)  # type: ignore[call-overload]
    lses[torch.rand(shape, **where) < 0.1] = -math.inf  # type: ignore[call-overload]
    lses[:, -1] = -math.inf
    outs[lses.isneginf()] = math.nan
    return outs, lses


@pytest.mark.parametrize("dtype", list(rank_kernels.MERGES))
@pytest.mark.parametrize(("ranks", "rows"), [(1, 1), (2, 3), (7, 130), (8, 1024), (32, 9)])
@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("base", ["basee", "base2"])
def test_the_kernel_is_the_merge_in_float64(
    dtype: torch.dtype, ranks: int, rows: int, with_sinks: bool, base: str
) -> None:
    outs, lses = results(ranks, rows, dtype)
    sinks = torch.linspace(-3, 3, 2 * HEADS, device="cuda")[::2] if with_sinks else None
    given = lses / math.log(2) if base == "base2" else lses
    assert rank_kernels.can_merge(outs, given)
    out, lse = merge(list(outs), list(given), sinks=sinks, lse_base=base)
    kept = torch.where(lses.isneginf()[..., None], 0.0, outs.double())
    expected = merge_partials(kept, lses.double(), sinks)
    eps = torch.finfo(dtype).eps
    assert torch.allclose(out.double(), expected.out, rtol=eps, atol=eps / 8)
    natural = lse.double() * (math.log(2) if base == "base2" else 1.0)
    assert torch.allclose(natural, expected.lse.double(), rtol=1e-6, atol=2e-6)
    assert not out[-1].any() and bool(lse[-1].isneginf().all())


def test_a_nan_stays() -> None:
    outs, lses = results(4, 3)
    lses[2, 1, 5] = math.nan
    out, lse = merge(list(outs), list(lses))
    expected = merged_by_torch(outs, lses)
    assert torch.equal(out.isnan(), expected[0].isnan()) and bool(out[1, 5].isnan().all())
    assert torch.equal(lse.isnan(), expected[1].isnan())


def test_what_the_kernel_does_not_take_is_merged_by_pytorch() -> None:
    outs, lses = results(3, 2)
    for other in (outs.float(), outs[..., :256].contiguous(), outs.transpose(1, 2)):
        assert not rank_kernels.can_merge(other, lses)
    assert not rank_kernels.can_merge(outs, lses.double())
    out, lse = merge(list(outs.float()), list(lses))
    expected = merge(list(outs), list(lses))
    assert torch.allclose(out, expected[0].float(), atol=2e-2)
    assert torch.allclose(lse, expected[1], atol=1e-5)


def test_a_graph_merges_what_is_there_when_it_is_replayed() -> None:
    outs, lses = results(2, 5)
    parts = (list(outs), list(lses))
    merge(*parts)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = merge(*parts)
    outs.copy_(results(2, 5)[0].roll(1, dims=-1))
    graph.replay()
    for got, expected in zip(captured, merge(*parts), strict=True):
        assert torch.equal(got, expected)


@pytest.mark.parametrize("features", [[], ["tree_mask"], ["max_q_len"], ["tree_mask", "max_q_len"]])
@pytest.mark.parametrize("q_lens", [(4,) * 5, (3, 0, 1, 17, 40)])
def test_the_mask_is_pytorch_s(features: list[str], q_lens: tuple[int, ...]) -> None:
    lengths = tuple(q_len + 70 * i for i, q_len in enumerate(q_lens))
    whole = make_inputs(Problem(q_lens, lengths, 2), 1, features, workspace_bytes=0, device="cuda")
    for rank in shard(whole, 3):
        args = native_args(**rank.contract_args())
        q_len = q_lens[0] if args.cum_seq_lens_q is None else None
        of = RankMask(q_len, sum(q_lens), max(q_lens))
        assert rank_kernels.can_mask(args)
        got, expected = of(args), of.by_torch(args)
        assert got.mask is not None and expected.mask is not None
        assert torch.equal(got.seq_lens, expected.seq_lens)
        assert torch.equal(got.mask.view(torch.int16), expected.mask.view(torch.int16))


def test_the_first_use_is_not_captured() -> None:
    outs, lses = results(2, 5)
    rank_kernels._kernel.cache_clear()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), pytest.raises(InvalidInput, match="merge: got the first use"):
        merge(list(outs), list(lses))
    merge(list(outs), list(lses))
