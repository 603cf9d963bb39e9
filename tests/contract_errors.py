"""Every wrong argument of the contract's call, as a table: what is changed, what is raised.

Checked by explicit raises, not by assert, so that `python -O` can run it too.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from mla_lab.api.contract import trtllm_batch_decode_with_kv_cache_mla
from mla_lab.core.errors import InvalidInput, InvalidType, Unsupported
from mla_lab.core.problem import Problem
from mla_lab.plan import make_plan
from mla_lab.reference.inputs import make_inputs

from .needs import LONG

Named = dict[str, Any]


class Case(NamedTuple):
    name: str
    kind: str
    change: Callable[[Named], object]
    error: type[Exception]
    #: a pattern that the message holds
    says: str


def arguments(kind: str) -> Named:
    """A right call of one kind; each case spoils one."""
    shapes = {
        "dense": (Problem((2, 2, 2), (100, 7, 64), 4, page_size=32), ()),
        "masked": (Problem((2, 2, 2), (100, 7, 64), 4, page_size=32), ("chain_mask",)),
        "ragged": (Problem((2, 1, 3), (100, 7, 64), 4, page_size=32), ("tree_mask",)),
        "separate": (Problem((2, 2), (100, 7), 4, page_size=32), ("separate_tables",)),
        "sparse": (Problem((2, 2), (100, 7), 4, page_size=32, top_k=8), ()),
        "packed": (Problem((1, 1), (100, 7), 4, page_size=32, kv_format="fp8_656"), ()),
        "e4m3": (Problem((1,), (9,), 4, page_size=32, q_dtype="e4m3", kv_format="e4m3"), ()),
    }
    problem, features = shapes[kind]
    return make_inputs(problem, 0, features, workspace_bytes=8 << 20).contract_args()


def put(**values: Any) -> Callable[[Named], None]:
    return lambda a: a.update(values)


def edit(name: str, change: Callable[[Any], Any]) -> Callable[[Named], None]:
    def apply(a: Named) -> None:
        a[name] = change(a[name])

    return apply


def ints(values: list[Any]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def meta(value: torch.Tensor) -> torch.Tensor:
    return value.to("meta")


def uneven(query: torch.Tensor) -> torch.Tensor:
    """Requests with a token between them, [3, 2, heads, 576]."""
    return torch.cat([query, query], 1)[:, : query.shape[1]]


def askew(query: torch.Tensor) -> torch.Tensor:
    """Rows with one element between them."""
    return torch.nn.functional.pad(query, (0, 1))[..., : query.shape[-1]]


def strided(value: torch.Tensor) -> torch.Tensor:
    """The same values with a gap after every element."""
    return torch.stack([value, value], -1)[..., 0]


def shifted(value: torch.Tensor) -> torch.Tensor:
    """The workspace from its eighth byte on."""
    return value[8:]


def bad_page(value: torch.Tensor, page: int, where: tuple[int, ...] = (0, 0)) -> torch.Tensor:
    value = value.clone()
    value[where] = page
    return value


def set_padding(mask: torch.Tensor) -> torch.Tensor:
    mask = mask.clone().view(torch.int16)
    mask[..., 0] |= 1 << 9
    return mask.view(torch.uint16)


def other_plan(**fields: Any):
    shape = {"q_lens": (2, 2, 2), "kv_lens": (100, 7, 64), "heads": 4} | fields
    return make_plan(Problem(**shape))


def gap_in_page(value: torch.Tensor) -> torch.Tensor:
    wide = torch.zeros(*value.shape[:-1], value.shape[-1] + 8, dtype=value.dtype)
    return wide[..., : value.shape[-1]]


def odd_page_stride(value: torch.Tensor) -> torch.Tensor:
    pages, size, width = value.shape
    return torch.zeros(pages, size * width + 1, dtype=value.dtype)[:, :-1].unflatten(
        1, (size, width)
    )


I, T, U = InvalidInput, InvalidType, Unsupported  # noqa: E741
f32 = torch.float32
#: of more digits than Python prints
HUGE = 10**5000
CASES = [
    Case("query type", "dense", put(query=[1.0]), T, r"query: got list.*torch.Tensor"),
    Case("query dtype", "dense", edit("query", lambda q: q.int()), T, r"query: got torch.int32"),
    Case("query rank", "dense", edit("query", lambda q: q[0]), I, r"query: got shape \[2, 4, "),
    Case("query width", "dense", edit("query", lambda q: q[..., :500].contiguous()), I, r"500\]"),
    Case("query layout", "dense", edit("query", strided), I, r"query: got stride 2 in the last"),
    Case("query tokens apart", "dense", edit("query", uneven), I, r"query: .*equal distances"),
    Case("query rows askew", "dense", edit("query", askew), I, r"query: .*multiples of 16 bytes"),
    Case("query empty", "dense", edit("query", lambda q: q[:, :0]), I, r"at least one token"),
    Case("query device", "dense", edit("query", meta), I, r"got device cpu; .*device, meta"),
    Case("query rank, ragged", "ragged", edit("query", lambda q: q[None]), I, r"\[total_q, heads"),
    Case("cache type", "dense", put(kv_cache=None), T, r"kv_cache: got NoneType"),
    Case("cache dtype", "dense", edit("kv_cache", lambda c: c.half()), T, r"kv_cache: got .*16"),
    Case("e4m3 cache under fp16", "dense", lambda a: a.update(
        query=a["query"].half(), kv_cache=a["kv_cache"].to(torch.float8_e4m3fn)), T, r"kv_cache"),
    Case("cache dtype under fp32", "dense", edit("query", lambda q: q.float()), T, r"kv_cache"),
    Case("packed under e4m3", "e4m3", lambda a: a.update(
        kv_cache=torch.zeros(4, 32, 656, dtype=torch.uint8)), T, r"kv_cache: got torch.uint8"),
    Case("cache rank", "dense", edit("kv_cache", lambda c: c[0]), I, r"kv_cache: got shape"),
    Case("cache heads", "dense", edit("kv_cache", lambda c: torch.stack([c, c], 1)), I, r"s, 1"),
    Case("cache width", "packed", edit("kv_cache", lambda c: c[..., :600]), I, r"656"),
    Case("cache empty", "dense", edit("kv_cache", lambda c: c[:0]), I, r"at least one page"),
    Case("cache device", "dense", edit("kv_cache", meta), I, r"kv_cache: got device meta"),
    Case("cache columns apart", "dense", edit("kv_cache", strided), I, r"kv_cache: got stride 2"),
    Case("cache tokens apart", "dense", edit("kv_cache", gap_in_page), I, r"token stride 584"),
    Case("packed pages askew", "packed", edit("kv_cache", odd_page_stride), I, r"multiple of 4"),
    Case("workspace type", "dense", put(workspace_buffer=4096), T, r"workspace_buffer: got int"),
    Case("workspace dtype", "dense", edit("workspace_buffer", lambda w: w.view(f32)), T, r"uint8"),
    Case("workspace rank", "dense", edit("workspace_buffer", lambda w: w[None]), I, r"\[bytes\]"),
    Case("workspace layout", "dense", edit("workspace_buffer", strided), I, r"workspace.*strides"),
    Case("workspace device", "dense", edit("workspace_buffer", meta), I, r"device meta"),
    Case("nope type", "dense", put(qk_nope_head_dim=1.5), T, r"qk_nope_head_dim: got float"),
    Case("latent", "dense", put(kv_lora_rank=448), U, r"\(448, 64\); supported: \(512, 64\)"),
    Case("rope", "dense", put(qk_rope_head_dim=0), U, r"\(512, 0\)"),
    Case("latent type", "dense", put(kv_lora_rank="512"), T, r"kv_lora_rank: got str"),
    Case("latent of packed", "packed", lambda a: a.update(
        query=a["query"][..., :320].contiguous(), kv_lora_rank=256), U, r"656-byte tokens"),
    Case("table type", "dense", put(block_tables=[[0]]), T, r"block_tables: got list"),
    Case("table dtype", "dense", edit("block_tables", lambda t: t.long()), T, r"torch.int64"),
    Case("table rank", "dense", edit("block_tables", lambda t: t[0]), I, r"bles: got shape"),
    Case("table batch", "dense", edit("block_tables", lambda t: t[:2]), I, r"\[3, max_pages\]"),
    Case("table layout", "dense", edit("block_tables", strided), I, r"stride 2"),
    Case("table without pages", "dense", edit("block_tables", lambda t: t[:, :0]), I,
         r"block_tables: got shape \[3, 0\]; supported: at least one page"),
    Case("tables without pages", "separate", edit("block_tables", lambda t: t[..., :0]), I,
         r"block_tables: got shape \[2, 2, 0\]"),
    Case("table device", "dense", edit("block_tables", meta), I, r"block_tables: got device"),
    Case("tables not separate", "dense", put(uses_shared_paged_kv_idx=False), I, r"3, 2, max_p"),
    Case("tables separate", "separate", put(uses_shared_paged_kv_idx=True), I, r"\[2, max_pages\]"),
    Case("slots shape", "sparse", put(sparse_mla_top_k=9), I, r"\[2, 2, 9\]"),
    Case("slots layout", "sparse", edit("block_tables", strided), I, r"block_tables: got strides"),
    Case("top_k negative", "sparse", put(sparse_mla_top_k=-1), I, r"sparse_mla_top_k: got -1"),
    Case("top_k type", "sparse", put(sparse_mla_top_k=8.0), T, r"sparse_mla_top_k: got float"),
    Case("slot too low", "sparse", edit("block_tables", lambda t: bad_page(t, -2, (0, 0, 0))), I,
         r"block_tables: got -2; supported: token slots from -1"),
    Case("slot too high", "sparse", edit("block_tables", lambda t: bad_page(t, 9999, (0, 0, 0))), I,
         r"block_tables: got 9999"),
    Case("lengths type", "dense", put(seq_lens=[100, 7, 64]), T, r"seq_lens: got list"),
    Case("lengths dtype", "dense", edit("seq_lens", lambda s: s.long()), T, r"seq_lens: got"),
    Case("lengths shape", "dense", edit("seq_lens", lambda s: s[:2]), I, r"seq_lens: got shape"),
    Case("lengths layout", "dense", edit("seq_lens", strided), I, r"seq_lens: got strides \[2\]"),
    Case("lengths device", "dense", edit("seq_lens", meta), I, r"seq_lens: got device"),
    Case("length negative", "dense", put(seq_lens=ints([1, -1, 0])), I, r"seq_lens: got -1"),
    Case("max_seq_len type", "dense", put(max_seq_len=None), T, r"max_seq_len: got NoneType"),
    Case("max_seq_len range", "dense", put(max_seq_len=-1), I, r"max_seq_len: got -1"),
    Case("out dtype", "dense", put(out=torch.zeros(3, 2, 4, 512)), T, r"out: got torch.float32"),
    Case("out e4m3 of bf16", "dense", put(
        out=torch.zeros(3, 2, 4, 512).to(torch.float8_e4m3fn)), T, r"out: got torch.float8"),
    Case("out shape", "dense", put(out=torch.zeros(6, 4, 512, dtype=torch.bfloat16)), I,
         r"out: got shape \[6, 4, 512\]; supported: \[3, 2, 4, 512\]"),
    Case("out layout", "dense", put(out=strided(torch.zeros(3, 2, 4, 512).half())), I, r"contig"),
    Case("out device", "dense", put(out=torch.zeros(3, 2, 4, 512, device="meta").half()), I, r"e"),
    Case("bmm1 type", "dense", put(bmm1_scale="1"), T, r"bmm1_scale: got str"),
    Case("bmm1 bool", "dense", put(bmm1_scale=True), T, r"bmm1_scale: got bool"),
    Case("bmm1 nan", "dense", put(bmm1_scale=float("nan")), I, r"bmm1_scale: got nan"),
    Case("bmm1 dtype", "dense", put(bmm1_scale=torch.ones(1).double()), T, r"bmm1_scale: got"),
    Case("bmm1 shape", "dense", put(bmm1_scale=torch.ones(2)), I, r"bmm1_scale: got shape \[2\]"),
    Case("bmm1 device", "dense", put(bmm1_scale=torch.ones(1, device="meta")), I, r"bmm1_scale"),
    Case("bmm2 type", "dense", put(bmm2_scale=None), T, r"bmm2_scale: got NoneType"),
    Case("bmm2 inf", "dense", put(bmm2_scale=float("inf")), I, r"bmm2_scale: got inf"),
    Case("bmm2 shape", "dense", put(bmm2_scale=torch.ones(2)), I, r"bmm2_scale: got shape \[2\]"),
    Case("bmm2 dtype", "dense", put(bmm2_scale=torch.ones(1).half()), T, r"bmm2_scale: got"),
    Case("bmm2 device", "dense", put(bmm2_scale=torch.ones(1, device="meta")), I, r"bmm2_scale"),
    Case("sinks type", "dense", put(sinks=1.0), T, r"sinks: got float"),
    Case("sinks dtype", "dense", put(sinks=torch.zeros(4).half()), T, r"sinks: got torch.float16"),
    Case("sinks shape", "dense", put(sinks=torch.zeros(5)), I, r"sinks: got shape \[5\]"),
    Case("sinks list", "dense", put(sinks=[torch.zeros(4)] * 2), I, r"sinks: got a list of 2"),
    Case("sinks list of None", "dense", put(sinks=[None]), T, r"sinks: got"),
    Case("sinks layout", "dense", put(sinks=strided(torch.zeros(4))), I, r"sinks: got strides"),
    Case("sinks device", "dense", put(sinks=torch.zeros(4, device="meta")), I, r"got device"),
    Case("skip negative", "dense", put(skip_softmax_threshold_scale_factor=-1.0), I, r"-1.0"),
    Case("skip type", "dense", put(skip_softmax_threshold_scale_factor="1"), T, r"got str"),
    Case("skip sparse", "sparse", put(skip_softmax_threshold_scale_factor=1.0), U, r"sparse call"),
    Case("skip nan", "dense", put(skip_softmax_threshold_scale_factor=math.nan), I, r"got nan"),
    Case("pdl type", "dense", put(enable_pdl=1), T, r"enable_pdl: got int"),
    Case("pdl on a CPU", "dense", put(enable_pdl=True), U, r"enable_pdl=True"),
    Case("pdl, torch asked for", "dense", put(enable_pdl=True, backend="torch"), U, r"enable_pdl"),
    Case("backend unknown", "dense", put(backend="triton"), I, r"got 'triton'.*'cute-dsl'"),
    Case("backend type", "dense", put(backend=None), T, r"backend: got NoneType"),
    Case("is_var_seq type", "dense", put(is_var_seq=None), T, r"is_var_seq: got NoneType"),
    Case("shared type", "dense", put(uses_shared_paged_kv_idx=1), T, r"uses_shared_paged_kv_idx"),
    Case("separate sparse", "sparse", put(uses_shared_paged_kv_idx=False), U, r"sparse call"),
    Case("lse type", "dense", put(lse=True), T, r"lse: got bool"),
    Case("lse dtype", "dense", put(lse=torch.zeros(6, 4).double()), T, r"lse: got torch.float64"),
    Case("lse shape", "dense", put(lse=torch.zeros(4, 6)), I, r"\[6, 4\] or \[3, 2, 4\]"),
    Case("lse shape, ragged", "ragged", put(lse=torch.zeros(3, 2, 4)), I, r"supported: \[6, 4\]$"),
    Case("lse layout", "dense", put(lse=strided(torch.zeros(6, 4))), I, r"lse: got strides"),
    Case("lse device", "dense", put(lse=torch.zeros(6, 4, device="meta")), I, r"lse: got device"),
    Case("return_lse type", "dense", put(return_lse=1), T, r"return_lse: got int"),
    Case("lse base", "dense", put(return_lse_base="base10"), I, r"return_lse_base: got 'base10'"),
    Case("cute_dsl_impl", "dense", put(cute_dsl_impl="modular"), U,
         r"impl: got 'modular'; .* its rows are not causal"),
    Case("lse base type", "dense", put(return_lse_base=torch.zeros(2, 2)), T, r"base: got Tensor"),
    Case("cute_dsl_impl type", "dense", put(cute_dsl_impl=torch.zeros(2, 2)), U, r"got Tensor;"),
    Case("cute_dsl_impl unknown", "packed", put(cute_dsl_impl="other"), U, r"impl: got 'other'"),
    Case("kv_scale_format", "packed", put(kv_scale_format="pow2_fp32"), U, r"kv_scale_format"),
    Case("counters", "dense", put(multi_ctas_kv_counter_buffer=ints([0])), U, r"workspace"),
    Case("top_k lens", "sparse", put(sparse_mla_top_k_lens=ints([8] * 3)), I, r"k_lens: got shape"),
    Case("top_k lens above", "sparse", put(sparse_mla_top_k_lens=ints([8, 9])), I, r"got 9"),
    Case("top_k lens below", "sparse", put(sparse_mla_top_k_lens=ints([8, -1])), I, r"got -1"),
    Case("top_k lens dense", "dense", put(sparse_mla_top_k_lens=ints([8] * 3)), I, r"dense calls"),
    Case("top_k lens type", "sparse", put(sparse_mla_top_k_lens=[8, 8]), T, r"got list"),
    Case("fp16 softmax", "dense", put(use_fp16_softmax=True), U, r"use_fp16_softmax: got True"),
    Case("sums type", "ragged", put(cum_seq_lens_q=[0, 2, 3, 6]), T, r"cum_seq_lens_q: got list"),
    Case("sums dtype", "ragged", edit("cum_seq_lens_q", lambda c: c.long()), T, r"torch.int64"),
    Case("sums rank", "ragged", edit("cum_seq_lens_q", lambda c: c[None]), I, r"cum_seq_lens_q"),
    Case("sums layout", "ragged", edit("cum_seq_lens_q", strided), I, r"cum_seq_lens_q: got str"),
    Case("sums device", "ragged", edit("cum_seq_lens_q", meta), I, r"cum_seq_lens_q: got device"),
    Case("sums too few", "ragged", put(cum_seq_lens_q=ints([0])), I, r"at least two"),
    Case("sums start", "ragged", put(cum_seq_lens_q=ints([1, 2, 3, 6])), I, r"first entry 1"),
    Case("sums end", "ragged", put(cum_seq_lens_q=ints([0, 2, 3, 5])), I, r"last entry 5.*6 tok"),
    Case("sums fall", "ragged", put(cum_seq_lens_q=ints([0, 4, 3, 6])), I, r"never decrease"),
    Case("max_q_len dense", "dense", put(max_q_len=2), I, r"None without cum_seq_lens_q"),
    Case("bound type, dense", "dense", put(max_q_len=torch.ones(2, 2)), T, r"q_len: got Tensor"),
    Case("sums type, dense", "dense", put(cum_seq_lens_q=[0, 2]), T, r"^cum_seq_lens_q: got list"),
    Case("latent huge", "dense", put(kv_lora_rank=HUGE), U, r"got \(an int of more than"),
    Case("top_k huge", "sparse", put(sparse_mla_top_k=HUGE), I, r"more than 4,000 digits\]"),
    Case("max_q_len zero", "ragged", put(max_q_len=0), I, r"max_q_len: got 0"),
    Case("max_q_len type", "ragged", put(max_q_len=3.0), T, r"max_q_len: got float"),
    Case("max_q_len below a masked draft", "ragged", put(max_q_len=1), I, r"max_q_len: got 1"),
    Case("mask type", "dense", put(mask=[1]), T, r"mask: got list"),
    Case("mask dtype", "masked", edit("mask", lambda m: m.view(torch.int16)), T, r"torch.int16"),
    Case("mask shape", "masked", edit("mask", lambda m: m[..., :1].contiguous()), I, r"\[3, 2, 2"),
    Case("mask shape, ragged", "ragged", edit("mask", lambda m: m[:, :1].contiguous()), I, r"mask"),
    Case("mask narrow, ragged", "ragged", put(
        query=torch.zeros(40, 4, 576).bfloat16(), cum_seq_lens_q=ints([0, 38, 39, 40]),
        mask=torch.zeros(40, 2).to(torch.uint16)), I, r"mask: got shape \[40, 2\].*4 words a row"),
    Case("mask wide, ragged", "ragged", put(max_q_len=40), I, r"shape \[6, 2\].*\[6, 4\]"),
    Case("mask padding", "masked", edit("mask", set_padding), I, r"padding bits of zero"),
    Case("mask layout", "masked", edit("mask", strided), I, r"mask: got strides"),
    Case("mask device", "masked", edit("mask", meta), I, r"mask: got device"),
    Case("mask sparse", "sparse", put(mask=torch.ones(2, 2, 2).to(torch.uint16)), U, r"sparse"),
    Case("ranks without dcp", "dense", put(cp_world=2), I, r"cp_world: got 2.*enable_dcp"),
    Case("rank without dcp", "dense", put(cp_rank=1), I, r"cp_rank: got 1.*enable_dcp"),
    Case("global without dcp", "dense", put(causal_seqlens_kv_global=ints([1])), I, r"enable_dcp"),
    Case("dcp type", "dense", put(enable_dcp=1), T, r"enable_dcp: got int"),
    Case("dcp world type", "dense", put(cp_world=1.0), T, r"cp_world: got float"),
    Case("dcp rank type", "dense", put(cp_rank=None), T, r"cp_rank: got NoneType"),
    Case("dcp rank negative", "dense", put(cp_rank=-1), I, r"cp_rank: got -1"),
    Case("dcp world", "dense", put(cp_world=0), I, r"cp_world: got 0"),
    Case("dcp rank", "dense", put(enable_dcp=True, cp_world=2, cp_rank=2), I, r"cp_rank: got 2"),
    Case("dcp lse", "dense", put(enable_dcp=True, cp_world=2), I, r"return_lse: got False"),
    Case("dcp global", "dense", put(enable_dcp=True, return_lse=True), I, r"causal_seqlens_kv"),
    Case("dcp of one", "dense", put(
        enable_dcp=True, return_lse=True, causal_seqlens_kv_global=ints([100, 8, 64])),
        I, r"causal_seqlens_kv_global: got \[100, 8, 64\].*seq_lens with cp_world 1"),
    Case("dcp negative", "dense", put(
        enable_dcp=True, return_lse=True, cp_world=2, causal_seqlens_kv_global=ints([-5, 7, 64])),
        I, r"causal_seqlens_kv_global: got -5; supported: 0 or more"),
    Case("dcp a rank without its tokens", "dense", put(
        enable_dcp=True, return_lse=True, cp_world=2, causal_seqlens_kv_global=ints([201, 7, 9])),
        I, r"_global: got \[201, 7, 9\], \[101, 4, 5\] of .*rank 0 of 2 holds no more than seq_l"),
    Case("dcp tokens behind the end, one query token", "packed", put(
        enable_dcp=True, return_lse=True, cp_world=2, causal_seqlens_kv_global=ints([199, 5])),
        I, r"global: got \[199, 5\], \[100, 3\] .*holds seq_lens, \[100, 7\]"),
    Case("dcp global shape", "dense", put(
        enable_dcp=True, return_lse=True, causal_seqlens_kv_global=ints([1, 2])), I, r"shape \[2"),
    Case("dcp global type", "dense", put(
        enable_dcp=True, return_lse=True, causal_seqlens_kv_global=[100, 7, 64]), T, r"got list"),
    Case("dcp global dtype", "dense", put(
        enable_dcp=True, return_lse=True,
        causal_seqlens_kv_global=torch.tensor([100, 7, 64])), T, r"torch.int64"),
    Case("dcp global device", "dense", put(
        enable_dcp=True, return_lse=True,
        causal_seqlens_kv_global=meta(ints([100, 7, 64]))), I, r"got device meta"),
    Case("dcp sinks", "dense", put(
        enable_dcp=True, return_lse=True, causal_seqlens_kv_global=ints([100, 7, 64]),
        sinks=torch.zeros(4)), U, r"context_parallel.merge"),
    Case("dcp sparse", "sparse", put(
        enable_dcp=True, return_lse=True, causal_seqlens_kv_global=ints([100, 7])), U, r"sparse"),
    Case("invariant type", "dense", put(batch_invariant="yes"), T, r"batch_invariant: got str"),
    Case("plan type", "dense", put(plan="greedy"), T, r"plan: got str"),
    Case("plan q_lens", "dense", put(plan=other_plan(q_lens=(2, 2, 1))), I, r"q_lens\[2\] of 1"),
    Case("plan batch", "dense", put(plan=other_plan(q_lens=(2,), kv_lens=(9,))), I, r"batch 1"),
    Case("plan heads", "dense", put(plan=other_plan(heads=8)), I, r"heads 8"),
    Case("plan that varies", "dense", put(plan=other_plan(), batch_invariant=True), I, r"fixed"),
]  # fmt: skip

#: values that could lead a read outside a tensor; a CPU call always looks at them
PAGES = [
    Case("page too high", "dense", edit("block_tables", lambda t: bad_page(t, 10_000)), I,
         r"block_tables: got 10000; supported: page ids from 0 to"),
    Case("page negative", "dense", edit("block_tables", lambda t: bad_page(t, -1)), I, r"got -1"),
    Case("value page", "separate", edit("block_tables", lambda t: bad_page(t, -5, (1, 1, 0))), I,
         r"got -5"),
    Case("length beyond the table", "dense", lambda a: a.update(
        seq_lens=ints([100, 7, a["block_tables"].shape[1] * 32 + 1])), I, r"pages of 32 in block"),
]  # fmt: skip


def run(case: Case) -> None:
    """Raises AssertionError unless the case raises what it should."""
    given = arguments(case.kind)
    case.change(given)
    try:
        trtllm_batch_decode_with_kv_cache_mla(**given)
    except case.error as error:
        if not re.search(case.says, str(error)):
            raise AssertionError(f"{case.name}: {error}") from error
        return
    raise AssertionError(f"{case.name}: nothing was raised")


def main() -> None:
    """Every eighth case, in a long run all: ruff finds assertions in the package (S101), and this
    shows that none of the checks is one."""
    if __debug__:
        raise SystemExit("run me with python -O")
    step = 1 if LONG in os.environ else 8
    for case in (*CASES, *PAGES)[::step]:
        run(case)


if __name__ == "__main__":
    main()
