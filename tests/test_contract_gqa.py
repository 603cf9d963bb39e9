"""GQA decode by the contract's names: torch on a CPU, the CUDA route through a stand-in."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

import mla_lab
from mla_lab.api.contract_gqa import trtllm_batch_decode_with_kv_cache as decode
from mla_lab.api.contract_gqa import xqa_batch_decode_with_kv_cache
from mla_lab.api.gqa import choose
from mla_lab.backends import self_check
from mla_lab.backends.cuda import gqa as cuda
from mla_lab.backends.cuda import xqa
from mla_lab.call import gqa_checks
from mla_lab.call.gqa_args import GqaArgs
from mla_lab.core import kv_cache, masks
from mla_lab.core.errors import BuildError, InvalidInput, InvalidType, Unsupported
from mla_lab.core.gpu import B200, H200, Gpu
from mla_lab.interop import flashinfer
from mla_lab.plan import KernelConfig
from mla_lab.plan.xqa import config_for
from mla_lab.reference.gqa import decode_gqa_reference
from mla_lab.reference.inputs_gqa import GqaInputs, GqaShape, make_gqa_inputs
from mla_lab.reference.tolerance import lse_error, rel_error

from .xqa_abi import AbiKernel, with_current_card

PLAIN = GqaShape((1, 1, 1), (70, 1, 130), 8, 2)
DRAFTS = GqaShape((4, 4), (100, 6), 8, 1, head_dim=64, kv_layout="NHD", page_size=16)
RAGGED = GqaShape((3, 0, 5), (65, 10, 4), 6, 3, window_left=20)
EIGHT = GqaShape((1, 1), (300, 64), 16, 2, q_dtype="e4m3", kv_format="e4m3")
MIXED = replace(EIGHT, q_dtype="bf16")

CALLS: list[tuple[GqaShape, list[str]]] = [
    (PLAIN, []),
    (PLAIN, ["lse", "sinks", "one_tensor"]),
    (PLAIN, ["separate_tables", "device_scales"]),
    (DRAFTS, ["lse"]),
    (DRAFTS, ["tree_mask", "sinks"]),
    (RAGGED, ["lse"]),
    (RAGGED, ["tree_mask"]),
    (EIGHT, ["lse"]),
    (MIXED, []),
    (replace(PLAIN, q_dtype="fp16", kv_format="fp16", window_left=0), ["lse"]),
    (GqaShape((1,), (5000,), 32, 1), ["lse"]),
    (GqaShape((33, 33), (40, 33), 4, 2, head_dim=64), ["chain_mask", "lse"]),
]

Made = dict[KernelConfig, AbiKernel]


@pytest.fixture(autouse=True)
def forgetful() -> Iterator[None]:
    yield
    xqa.at_once.cache_clear()
    self_check.clear()


def with_card(monkeypatch: pytest.MonkeyPatch, gpu: Gpu, wrong_by: float = 0.0) -> Made:
    made: Made = {}

    def kernel(config: KernelConfig, device: torch.device) -> AbiKernel:
        return made.setdefault(config, AbiKernel(config, wrong_by))

    monkeypatch.setattr(xqa, "kernel", kernel)
    monkeypatch.setattr(cuda, "gpu_of", lambda device: gpu)
    monkeypatch.setattr("mla_lab.api.gqa.gpu_of", lambda device: gpu)
    return made


def check(inputs: GqaInputs, result: Any) -> None:
    want = decode_gqa_reference(inputs)
    out, lse = result if inputs.return_lse else (result, None)
    assert out.dtype is inputs.query.dtype
    limit = 0.05 if out.dtype is torch.float8_e4m3fn else 4e-3
    assert rel_error(out.double(), want.out) < limit
    if lse is not None:
        assert lse_error(lse, want.lse) < 1e-5


def inputs_of(shape: GqaShape, *features: str) -> GqaInputs:
    return make_gqa_inputs(shape, 1, features)


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize(("shape", "features"), CALLS)
def test_by_torch(shape: GqaShape, features: list[str], batch_invariant: bool) -> None:
    inputs = inputs_of(shape, *features)
    check(inputs, decode(**inputs.contract_args(), batch_invariant=batch_invariant))


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize(("shape", "features"), CALLS)
def test_by_the_kernel(
    monkeypatch: pytest.MonkeyPatch, shape: GqaShape, features: list[str], batch_invariant: bool
) -> None:
    made = with_card(monkeypatch, H200)
    inputs = inputs_of(shape, *features)
    check(inputs, decode(**inputs.contract_args(), batch_invariant=batch_invariant))
    (kernel,) = made.values()
    dims = (shape.head_dim, shape.head_dim)
    formats = (shape.q_dtype, shape.kv_format)
    rows = shape.heads // shape.kv_heads * (1 if batch_invariant else max(shape.q_lens))
    pairs = len(shape.q_lens) * shape.kv_heads * -(-rows // 32)
    wide = rows > 16 and formats[0] == formats[1] and (batch_invariant or pairs >= 12)
    assert kernel.config == config_for(dims, formats, "sm_90a", row_tiles=1 + wide)
    (launch,) = kernel.launches
    assert launch["nhd"] is (shape.kv_layout == "NHD")
    assert launch["window_left"] == shape.window_left
    assert not inputs.workspace_buffer[:65536].any()


def test_xqa_s_own_name_and_layout() -> None:
    inputs = inputs_of(DRAFTS, "tree_mask", "sinks")
    arguments = inputs.contract_args()
    for name in ("return_lse", "max_q_len", "cum_seq_lens_q", "uses_shared_paged_kv_idx"):
        arguments.pop(name, None)
    arguments.pop("kv_layout")  # NHD is its default
    check(inputs, xqa_batch_decode_with_kv_cache(**arguments))
    with pytest.raises(InvalidInput, match="mask: got None with q_len_per_req 4"):
        xqa_batch_decode_with_kv_cache(**{**arguments, "mask": None})


def test_a_window_that_hides_no_key_is_none_to_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Positions of its first key do not overflow int32, where a request has fewer keys than query
    tokens."""
    made = with_card(monkeypatch, H200)
    inputs = inputs_of(RAGGED, "lse")
    named = inputs.block_tables.shape[-1] * RAGGED.page_size
    for window, expected in ((named - 1, named - 1), (named, -1), (2**31 - 1, -1)):
        given = replace(inputs, window_left=window)
        check(given, decode(**given.contract_args()))
        (kernel,) = made.values()
        assert kernel.launches[-1]["window_left"] == expected


@pytest.mark.parametrize("q_len", [None, "1", 0])
def test_xqa_s_query_length_is_told_where_it_is_none(q_len: Any) -> None:
    arguments = make_gqa_inputs(GqaShape((1, 1), (70, 9), 4, 2)).contract_args()
    taken = inspect.signature(xqa_batch_decode_with_kv_cache).parameters
    arguments = {k: v for k, v in arguments.items() if k in taken}
    with pytest.raises(InvalidInput, match=r"^q_len_per_req: got"):
        xqa_batch_decode_with_kv_cache(**arguments | {"q_len_per_req": q_len, "kv_layout": "HND"})


def test_xqa_s_ragged_queries() -> None:
    inputs = inputs_of(replace(RAGGED, window_left=-1), "tree_mask")
    arguments = inputs.contract_args()
    sums, most = arguments.pop("cum_seq_lens_q"), arguments.pop("max_q_len")
    for name in ("return_lse", "uses_shared_paged_kv_idx"):
        arguments.pop(name, None)
    arguments["q_len_per_req"] = most
    check(inputs, xqa_batch_decode_with_kv_cache(**arguments, q_cu_seq_lens=sums))
    with pytest.raises(
        InvalidInput, match=r"^q_len_per_req: got 1; supported: at least the longest"
    ):
        xqa_batch_decode_with_kv_cache(**arguments | {"q_len_per_req": 1}, q_cu_seq_lens=sums)
    with pytest.raises(InvalidType, match=r"^q_cu_seq_lens: got torch\.int64"):
        xqa_batch_decode_with_kv_cache(**arguments, q_cu_seq_lens=sums.long())


def test_parameters_stand_in_flashinfer_s_order() -> None:
    positional = [
        name
        for name, p in inspect.signature(decode).parameters.items()
        if p.kind is p.POSITIONAL_OR_KEYWORD
    ]
    assert positional[:10] == [
        "query", "kv_cache", "workspace_buffer", "block_tables", "seq_lens", "max_seq_len",
        "bmm1_scale", "bmm2_scale", "window_left", "out",
    ]  # fmt: skip
    assert positional[10:22] == [
        "out_dtype", "o_sf_scale", "o_sf_vec_size", "sinks", "kv_layout", "enable_pdl", "backend",
        "q_len_per_req", "o_scale", "mask", "max_q_len", "cum_seq_lens_q",
    ]  # fmt: skip
    assert list(inspect.signature(xqa_batch_decode_with_kv_cache).parameters)[10:] == [
        "sinks", "kv_layout", "enable_pdl", "q_len_per_req", "o_scale", "mask", "kv_cache_sf",
        "q_cu_seq_lens",
    ]  # fmt: skip


def test_results_are_the_callers() -> None:
    inputs = inputs_of(PLAIN, "lse")
    out = torch.full(inputs.query.shape, torch.nan, dtype=torch.float16)
    lse = torch.full((3, 8), torch.nan)
    given = decode(**inputs.contract_args(), out=out, lse=lse)
    assert given[0] is out and given[1] is lse
    want = decode_gqa_reference(inputs)
    assert rel_error(out.double(), want.out) < 1e-3
    other = decode(**{**inputs.contract_args(), "return_lse": False}, out_dtype=torch.float16)
    assert torch.equal(other, out)


def test_a_sequence_may_be_batch_invariant_bit_for_bit() -> None:
    inputs = inputs_of(PLAIN)
    whole = decode(**inputs.contract_args(), batch_invariant=True)
    alone = replace(
        inputs,
        query=inputs.query[2:],
        block_tables=inputs.block_tables[2:],
        seq_lens=inputs.seq_lens[2:],
    )
    assert torch.equal(decode(**alone.contract_args(), batch_invariant=True), whole[2:])


def test_skip_softmax_is_for_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = inputs_of(PLAIN)
    arguments = {**inputs.contract_args(), "skip_softmax_threshold_scale_factor": 1e-9}
    check(inputs, decode(**arguments))
    with_card(monkeypatch, H200)
    check(inputs, decode(**arguments))
    with pytest.raises(Unsupported, match=r"no skip_softmax.*; torch can run it"):
        decode(**arguments, backend="cuda")
    none = {**arguments, "skip_softmax_threshold_scale_factor": 0.0}
    check(inputs, decode(**none, backend="cuda"))


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        (replace(PLAIN, head_dim=96), "head_dim 96"),
        (replace(PLAIN, page_size=8), "pages of 8"),
        (replace(PLAIN, q_dtype="fp32", kv_format="fp32"), "query fp32 over cache fp32"),
    ],
)
def test_what_the_kernel_does_not_take_goes_to_torch(
    monkeypatch: pytest.MonkeyPatch, shape: GqaShape, words: str
) -> None:
    with_card(monkeypatch, H200)
    inputs = inputs_of(shape)
    with pytest.raises(Unsupported, match=f"backend: got 'xqa'; supported: {words}"):
        decode(**inputs.contract_args(), backend="xqa")
    check(inputs, decode(**inputs.contract_args()))


def test_an_unproved_card_checks_itself(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with_card(monkeypatch, B200)
    inputs = inputs_of(PLAIN, "lse")
    with caplog.at_level(logging.WARNING, "mla_lab"):
        for _ in range(2):
            check(inputs, decode(**inputs.contract_args()))
    (record,) = caplog.records
    assert "cuda_xqa_qk_dim128 on B200: compiled for this card" in record.getMessage()
    self_check.clear()
    with_card(monkeypatch, B200, wrong_by=0.1)
    xqa.at_once.cache_clear()
    with pytest.raises(BuildError, match="cuda_xqa_qk_dim128 on B200: got results that differ"):
        decode(**inputs.contract_args())


@pytest.mark.parametrize(("index", "expected"), [(0, []), (1, [1, 1])])
def test_a_kernel_runs_on_the_card_of_its_tensors(
    monkeypatch: pytest.MonkeyPatch, index: int, expected: list[int]
) -> None:
    """Its occupancy is asked there too; where that is the current card nothing is switched."""
    entered = with_current_card(monkeypatch, index)
    made = with_card(monkeypatch, H200)
    inputs = inputs_of(PLAIN)
    check(inputs, decode(**inputs.contract_args(), backend="cuda"))
    (kernel,) = made.values()
    assert len(kernel.launches) == 1 and entered == expected


# --- errors ------------------------------------------------------------------------------------


def fp4(arguments: dict[str, Any]) -> dict[str, Any]:
    keys, values = arguments["kv_cache"]
    return {"kv_cache": (keys.view(torch.uint8), values.view(torch.uint8))}


def negated(arguments: dict[str, Any], name: str) -> dict[str, Any]:
    return {name: torch._neg_view(arguments[name])}


def fewer_values(arguments: dict[str, Any]) -> dict[str, Any]:
    """Values of one page, which a table of keys and values does not stay within."""
    keys, values = arguments["kv_cache"]
    return {"kv_cache": (keys, values[:1])}


FACTOR = "skip_softmax_threshold_scale_factor"
WRONG: list[tuple[str, type[Exception], Any]] = [
    ("o_sf_scale: got a value", Unsupported, {"o_sf_scale": 1.0}),
    ("o_sf_vec_size: got a value", Unsupported, {"o_sf_vec_size": 16}),
    ("kv_cache_sf: got a value", Unsupported, {"kv_cache_sf": torch.ones(1)}),
    ("out_dtype: got 'nvfp4'", Unsupported, {"out_dtype": "nvfp4"}),
    ("kv_cache: got uint8", Unsupported, fp4),
    ("bmm1_scale_log2: got a value", Unsupported, {"bmm1_scale_log2": torch.ones(1)}),
    ("multi_ctas_kv_counter_buffer", Unsupported, {"multi_ctas_kv_counter_buffer": 1}),
    ("enable_block_sparse_attention", Unsupported, {"enable_block_sparse_attention": True}),
    ("bf16q_fp8kv_transform_mode", Unsupported, {"bf16q_fp8kv_transform_mode": "k_only"}),
    ("cp_world: got 2; supported: 1", Unsupported, {"cp_world": 2}),
    ("cp_rank: got 1; supported: 0", Unsupported, {"cp_rank": 1}),
    ("causal_seqlens_kv_global", Unsupported, {"causal_seqlens_kv_global": torch.ones(1)}),
    ("request_order: got a value", Unsupported, {"request_order": torch.ones(1)}),
    ("request_order_plan: got a value", Unsupported, {"request_order_plan": object()}),
    ("sparse_top_k: got 64; supported: 0", Unsupported, {"sparse_top_k": 64}),
    ("length_aware_schedule", Unsupported, {"length_aware_schedule": True}),
    ("enable_pdl=True", Unsupported, {"enable_pdl": True}),
    ("backend: got 'fa2'", InvalidInput, {"backend": "fa2"}),
    ("kv_layout: got 'NDH'", InvalidInput, {"kv_layout": "NDH"}),
    ("window_left: got -2", InvalidInput, {"window_left": -2}),
    ("window_left: got 2147483648; supported: -1 to", InvalidInput, {"window_left": 2**31}),
    ("skip_softmax_threshold_scale_factor: got -1", InvalidInput, {FACTOR: -1.0}),
    ("skip_softmax_threshold_scale_factor: got nan", InvalidInput, {FACTOR: float("nan")}),
    ("skip_softmax_threshold_scale_factor: got str", InvalidType, {FACTOR: "0"}),
    ("bmm1_scale: got 1", InvalidInput, {"bmm1_scale": 10**400}),
    ("query: got a view that is negated", Unsupported, lambda a: negated(a, "query")),
    ("block_tables: got .*; supported: page ids from 0 to 0", InvalidInput, fewer_values),
    ("q_len_per_req: got None", InvalidInput, {"q_len_per_req": None}),
    ("query: got 3 tokens; supported: 3 requests x", InvalidInput, {"q_len_per_req": 2}),
    ("max_q_len: got 2", InvalidInput, {"max_q_len": 2}),
    ("o_scale: got 0", InvalidInput, {"o_scale": 0.0}),
    ("query: got list", InvalidType, {"query": [1]}),
    ("query: got torch.int8", InvalidType, lambda a: {"query": a["query"].view(torch.int8)}),
    ("query: got shape", InvalidInput, lambda a: {"query": a["query"][0]}),
    ("query: got strides", InvalidInput, lambda a: {"query": a["query"].transpose(0, 1)}),
    ("query: got 7 heads", InvalidInput, lambda a: {"query": a["query"][:, :7].contiguous()}),
    ("kv_cache: got int", InvalidType, {"kv_cache": 3}),
    ("kv_cache: got one tensor", InvalidInput, lambda a: {"kv_cache": a["kv_cache"][0]}),
    (
        "kv_cache: got values",
        InvalidInput,
        lambda a: {"kv_cache": (a["kv_cache"][0], a["kv_cache"][1][:, :1])},
    ),
    (
        "kv_cache: got torch.float16",
        InvalidType,
        lambda a: {"kv_cache": [part.half() for part in a["kv_cache"]]},
    ),
    (
        "block_tables: got torch.int64",
        InvalidType,
        lambda a: {"block_tables": a["block_tables"].long()},
    ),
    ("block_tables: got shape", InvalidInput, lambda a: {"block_tables": a["block_tables"][:2]}),
    ("block_tables: got", InvalidInput, lambda a: {"block_tables": a["block_tables"] * 0 + 999}),
    ("seq_lens: got shape", InvalidInput, lambda a: {"seq_lens": a["seq_lens"].view(-1, 1)}),
    ("seq_lens: got -1", InvalidInput, lambda a: {"seq_lens": a["seq_lens"] * 0 - 1}),
    ("seq_lens: got 9999", InvalidInput, lambda a: {"seq_lens": a["seq_lens"] * 0 + 9999}),
    ("max_seq_len: got float", InvalidType, {"max_seq_len": 1.5}),
    ("sinks: got shape", InvalidInput, {"sinks": torch.ones(3)}),
    ("sinks: got a list of 2", InvalidInput, {"sinks": [torch.ones(8)] * 2}),
    ("bmm1_scale: got torch.float64", InvalidType, {"bmm1_scale": torch.ones(1).double()}),
    ("bmm2_scale: got inf", InvalidInput, {"bmm2_scale": float("inf")}),
    ("mask: got torch.int32", InvalidType, {"mask": torch.ones(3, 2, dtype=torch.int32)}),
    ("mask: got shape", InvalidInput, {"mask": torch.ones(3, 4, dtype=torch.uint16)}),
    ("out: got shape", InvalidInput, {"out": torch.ones(2, 8, 128, dtype=torch.bfloat16)}),
    ("out: got torch.float32", InvalidType, {"out": torch.ones(3, 8, 128)}),
    ("out: got str", Unsupported, {"out": "fp4"}),
    ("lse: got shape", InvalidInput, {"lse": torch.ones(3, 7)}),
    ("workspace_buffer: got torch.float32", InvalidType, {"workspace_buffer": torch.ones(8)}),
    ("return_lse: got int", InvalidType, {"return_lse": 1}),
]


@pytest.mark.parametrize(("words", "kind", "change"), WRONG, ids=[w[0] for w in WRONG])
def test_errors(words: str, kind: type[Exception], change: Any) -> None:
    arguments = inputs_of(PLAIN).contract_args()
    changed = change(arguments) if callable(change) else change
    with pytest.raises(kind, match=words):
        decode(**{**arguments, **changed})


@pytest.mark.parametrize(
    "sums", [[0, 3, 2, 8], [1, 3, 3, 8], [0, 3, 3, 7]], ids=["decrease", "first", "last"]
)
def test_wrong_prefix_sums(sums: list[int]) -> None:
    arguments = inputs_of(RAGGED).contract_args()
    arguments["cum_seq_lens_q"] = torch.tensor(sums, dtype=torch.int32)
    with pytest.raises(InvalidInput, match="cum_seq_lens_q: got"):
        decode(**arguments)


@pytest.mark.parametrize(
    ("value", "error", "says"),
    [
        ("abc", InvalidType, "q_len_per_req: got str"),
        (0, InvalidInput, "q_len_per_req: got 0; supported: 1 or more"),
        (7, InvalidInput, "q_len_per_req: got 7; .* with cum_seq_lens_q, or the longest, 5"),
        (4, InvalidInput, "q_len_per_req: got 4"),
    ],
)
@pytest.mark.parametrize("bound", [None, 5, 6])
def test_a_length_that_prefix_sums_contradict(
    value: Any, error: type[Exception], says: str, bound: int | None
) -> None:
    inputs = inputs_of(RAGGED)
    arguments = inputs.contract_args() | {"max_q_len": bound}
    for good in {None, 1, 5, bound}:
        check(replace(inputs), decode(**{**arguments, "q_len_per_req": good}))
    with pytest.raises(error, match=says):
        decode(**{**arguments, "q_len_per_req": value})


def test_a_length_beside_sums_that_are_not_read() -> None:
    inputs = inputs_of(RAGGED)
    args = GqaArgs(**inputs.contract_args())
    form = gqa_checks.check_form(args)[0]
    on_gpu = replace(form, device=torch.device("meta"), batch=2)
    for good in (None, 1, 5, 4):  # two requests of 4 are the 8 tokens
        gqa_checks._read_values(replace(args, q_len_per_req=good), on_gpu, 99, (9, 9))
    with pytest.raises(InvalidInput, match=r"q_len_per_req: got 7; .* or max_q_len, 5"):
        gqa_checks._read_values(replace(args, q_len_per_req=7), on_gpu, 99, (9, 9))


@pytest.mark.parametrize("backend", ["torch", "cuda"])
def test_a_mask_is_as_wide_as_the_bound(monkeypatch: pytest.MonkeyPatch, backend: str) -> None:
    """Also of a bound that the query's tokens do not reach, as in MLA calls."""
    with_card(monkeypatch, H200)
    inputs = inputs_of(replace(RAGGED, q_lens=(2, 0, 0), window_left=-1), "tree_mask")
    assert inputs.mask is not None and inputs.mask.shape == (2, 2)
    narrow = inputs.contract_args() | {"max_q_len": 64, "backend": backend}
    with pytest.raises(InvalidInput, match=r"mask: got shape \[2, 2\]; supported: \[2, 4\]"):
        decode(**narrow)
    wide = torch.cat([inputs.mask, torch.zeros_like(inputs.mask)], -1)
    check(inputs, decode(**{**narrow, "mask": wide}))


def test_a_bound_below_the_longest_draft() -> None:
    arguments = inputs_of(RAGGED).contract_args()
    with pytest.raises(InvalidInput, match="max_q_len: got 4; supported: at least the longest, 5"):
        decode(**{**arguments, "max_q_len": 4})


@pytest.mark.parametrize("bound", [None, 5])
def test_a_mask_of_the_wrong_width_or_with_padding_bits(bound: int | None) -> None:
    arguments = inputs_of(RAGGED, "tree_mask").contract_args() | {"max_q_len": bound}
    decode(**arguments)
    wide = torch.cat([arguments["mask"]] * 2, -1)
    with pytest.raises(InvalidInput, match="mask: got shape"):
        decode(**{**arguments, "mask": wide})
    padded = arguments["mask"].clone()
    padded[:, 0] = 0x7FFF
    with pytest.raises(InvalidInput, match="mask: got bit 3 of row 0 set"):
        decode(**{**arguments, "mask": padded})


def test_a_workspace_that_is_too_small(monkeypatch: pytest.MonkeyPatch) -> None:
    with_card(monkeypatch, H200)
    inputs = inputs_of(GqaShape((1,), (5000,), 32, 1))
    arguments = {**inputs.contract_args(), "workspace_buffer": torch.zeros(64, dtype=torch.uint8)}
    with pytest.raises(InvalidInput, match="workspace_buffer: got 64 bytes; supported:"):
        decode(**arguments)
    decode(**{**arguments, "workspace_buffer": None})


def test_auto_takes_torch_where_row_tiles_are_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    with_card(monkeypatch, H200)
    form = gqa_checks.check_form(GqaArgs(**inputs_of(PLAIN).contract_args()))[0]
    wide = replace(form, max_q_len=1 << 20, total_q=1 << 20)
    features = form.features | {"batch_invariant"}
    many = replace(form, batch=17_000, longest=8192, features=features)
    for too_many, says in ((wide, "up to 65535 of either"), (many, "batch_invariant: got True")):
        assert choose(form, "auto") == "cuda" and choose(too_many, "auto") == "torch"
        with pytest.raises(Unsupported, match=f"backend: got 'cuda'.*{says}.*; torch can run it"):
            choose(too_many, "cuda")


@pytest.mark.parametrize("name", ["kv_cache", "out"])
def test_auto_takes_torch_beyond_vector_loads(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Tokens of a cache 264 bytes apart, or an out 8 bytes behind a multiple of 16."""
    made, inputs = with_card(monkeypatch, H200), inputs_of(PLAIN)
    cache = tuple(torch.nn.functional.pad(part, (0, 4))[..., :-4] for part in inputs.kv_cache)
    out = torch.empty(inputs.query.numel() + 4, dtype=torch.bfloat16)[4:].view_as(inputs.query)
    arguments = inputs.contract_args() | {name: {"kv_cache": cache, "out": out}[name]}
    check(inputs, decode(**arguments))
    form = gqa_checks.check_form(GqaArgs(**arguments))[0]
    assert not made and choose(form, "cuda") == "cuda"


def test_the_mask_layout_is_masks() -> None:
    """A chain, packed, is the causal rule."""
    inputs = inputs_of(DRAFTS)
    chain = masks.pack(masks.chain(4).expand(2, 4, 4))
    causal = decode(**inputs.contract_args())
    assert torch.equal(decode(**inputs.contract_args(), mask=chain), causal)
    assert kv_cache.DTYPE_NAMES[causal.dtype] == "bf16"


@pytest.mark.parametrize("module", [mla_lab, flashinfer, flashinfer.decode])
def test_the_names_are_where_programs_look_for_them(module: Any) -> None:
    inputs = inputs_of(PLAIN)
    arguments = {**inputs.contract_args(), "workspace_buffer": torch.full((70_000,), 7).byte()}
    check(inputs, module.trtllm_batch_decode_with_kv_cache(**arguments))
    named = {**inputs.contract_args(), "kv_layout": "HND"}
    for name in ("return_lse", "uses_shared_paged_kv_idx", "max_q_len", "cum_seq_lens_q"):
        named.pop(name, None)
    check(inputs, module.xqa_batch_decode_with_kv_cache(**named))
