"""Hostile calls by FlashInfer's and FlashMLA's names: errors name the parameters of the caller."""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from mla_lab import flash_mla_names as flash_mla
from mla_lab import flashinfer_names as flashinfer
from mla_lab.api.contract import trtllm_batch_decode_with_kv_cache_mla as contract
from mla_lab.api.contract_gqa import trtllm_batch_decode_with_kv_cache as gqa
from mla_lab.backends.torch.backend import TorchBackend
from mla_lab.call import gqa_checks
from mla_lab.core.errors import InvalidInput, InvalidType, MlaLabError, Unsupported
from mla_lab.core.problem import Problem
from mla_lab.emulate.findings import Fault, Finding
from mla_lab.emulate.ptx import Place
from mla_lab.reference.gqa import decode_gqa_reference
from mla_lab.reference.inputs import make_inputs
from mla_lab.reference.inputs_gqa import GqaShape, make_gqa_inputs
from mla_lab.reference.tolerance import lse_error, rel_error

mla = flashinfer.trtllm_batch_decode_with_kv_cache_mla
Call = Callable[..., Any]


def call_of(*features: str, q_len: int = 1, **changes: Any) -> dict[str, Any]:
    problem = Problem((q_len, q_len), (70, 9), 4, page_size=16)
    inputs = make_inputs(problem, 1, features, workspace_bytes=1 << 20)
    return inputs.contract_args() | changes


def dense_arguments() -> dict[str, Any]:
    named = call_of()
    return {
        "q": named["query"],
        "k_cache": named["kv_cache"].unsqueeze(2),
        "block_table": named["block_tables"],
        "cache_seqlens": named["seq_lens"],
        "head_dim_v": 512,
    }


def dense(**changes: Any) -> tuple[Tensor, Tensor]:
    metadata, _ = flash_mla.get_mla_metadata()
    given = dense_arguments() | {"tile_scheduler_metadata": metadata}
    return flash_mla.flash_mla_with_kvcache(**(given | changes))


def sparse(**changes: Any) -> tuple[Tensor, Tensor]:
    given = {
        "k_cache": torch.zeros(16, 16, 1, 656, dtype=torch.uint8),
        "is_fp8_kvcache": True,
        "block_table": None,
        "cache_seqlens": None,
        "indices": torch.zeros(2, 1, 4, dtype=torch.int32),
    }
    return dense(**(given | changes))


def cute_dsl(**changes: Any) -> Any:
    named = call_of()
    named["softmax_scale"] = named.pop("bmm1_scale")
    for name in ("qk_nope_head_dim", "bmm2_scale"):
        named.pop(name, None)
    return flashinfer.cute_dsl_mla_decode(**(named | changes))


ZEROS = torch.zeros(2, dtype=torch.int64)


@pytest.mark.parametrize(
    ("call", "changes", "says"),
    [
        (sparse, {"indices": torch.zeros(2, 1, 4, dtype=torch.int64)}, "indices: got torch.int64"),
        (sparse, {"indices": torch.full((2, 1, 4), 9999, dtype=torch.int32)}, "indices: got 9999"),
        (sparse, {"topk_length": torch.tensor([9, 1], dtype=torch.int32)}, "topk_length: got 9"),
        (sparse, {"attn_sink": torch.zeros(5)}, r"attn_sink: got shape \[5\]"),
        (dense, {"softmax_scale": "x"}, "softmax_scale: got str"),
        (dense, {"cache_seqlens": ZEROS}, "cache_seqlens: got torch.int64"),
        (dense, {"block_table": ZEROS.view(2, 1)}, "block_table: got torch.int64"),
        (
            dense,
            {"cache_seqlens": torch.tensor([999, 1], dtype=torch.int32)},
            "cache_seqlens: got 999; .* in block_table$",
        ),
        (dense, {"q": torch.zeros(2, 1, 4, 500).bfloat16()}, r"q: got shape \[2, 1, 4, 500\]"),
        (cute_dsl, {"softmax_scale": float("nan")}, "softmax_scale: got nan"),
        (cute_dsl, {"output_scale": "x"}, "output_scale: got str"),
    ],
)
def test_an_error_names_the_parameter_that_was_given(
    call: Call, changes: dict[str, Any], says: str
) -> None:
    with pytest.raises(MlaLabError, match=f"^{says}"):
        call(**changes)


def test_the_wrapper_checks_its_workspace_and_names_its_lists() -> None:
    wrapper = flashinfer.BatchMLAPagedAttentionWrapper
    with pytest.raises(InvalidType, match=r"^float_workspace_buffer: got torch\.float32"):
        wrapper(torch.zeros(1 << 20))
    planned = wrapper(torch.zeros(1 << 20, dtype=torch.uint8))
    qo_indptr, kv_indptr = torch.tensor([0, 1]), torch.tensor([0, 2])
    pages, lengths = torch.tensor([0, 99]), torch.tensor([20])
    dtype = torch.bfloat16
    planned.plan(qo_indptr, kv_indptr, pages, lengths, 4, 512, 64, 16, True, 0.07, dtype, dtype)
    query, cache = torch.zeros(1, 4, 576).bfloat16(), torch.zeros(16, 16, 576).bfloat16()
    with pytest.raises(InvalidInput, match=r"^kv_indices: got 99"):
        planned.run(query[..., :512], query[..., 512:], cache[..., :512], cache[..., 512:])


def test_the_wrapper_names_its_scales_and_caches() -> None:
    planned = flashinfer.BatchMLAPagedAttentionWrapper(torch.zeros(1 << 20, dtype=torch.uint8))
    lists = torch.tensor([0, 1]), torch.tensor([0, 2]), torch.tensor([0, 1]), torch.tensor([20])
    query = torch.zeros(1, 4, 576).bfloat16()
    cache = torch.zeros(16, 16, 576).bfloat16()

    def run(cache: torch.Tensor, **named: Any) -> None:
        dtypes = torch.bfloat16, cache.dtype
        planned.plan(*lists, 4, 512, 64, 16, True, 0.07, *dtypes)
        planned.run(query[..., :512], query[..., 512:], cache[..., :512], cache[..., 512:], **named)

    with pytest.raises(InvalidInput, match=r"^ckv_scale: got 1e\+39"):
        run(cache.to(torch.float8_e4m3fn), ckv_scale=1e39, kpe_scale=1e39)
    with pytest.raises(InvalidInput, match=r"^out: got bytes that are ckv_cache and"):
        run(cache, out=cache.view(-1)[:2048].view(1, 4, 512))


@pytest.mark.parametrize("cache", ["kv_cache_mla", "kv_cache"])
@pytest.mark.parametrize("kernel", ["trtllm", "xqa"])
def test_names_are_pickled(kernel: str, cache: str) -> None:
    made = getattr(flashinfer, f"{kernel}_batch_decode_with_{cache}")
    assert pickle.loads(pickle.dumps(made)) is made


# --- kinds of values that are no numbers in memory ----------------------------------------------


def nested(*shapes: tuple[int, ...]) -> Tensor:
    with pytest.warns(UserWarning, match="nested tensors"):
        return torch.nested.nested_tensor([torch.zeros(shape) for shape in shapes])


@pytest.fixture(scope="module")
def uneven() -> Tensor:
    return nested((2, 4), (1, 4))


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda x: mla(**call_of("sinks", query=x)), "query"),
        (lambda x: mla(**call_of(sinks=x)), "sinks"),
        (lambda x: mla(**call_of(multi_ctas_kv_counter_buffer=x)), "multi_ctas_kv_counter_buffer"),
        (lambda x: cute_dsl(query=x), "query"),
        (lambda x: cute_dsl(lse=x), "lse"),
        (lambda x: gqa(**gqa_call(kv_cache=x)), "kv_cache"),
        (lambda x: sparse(indices=x), "indices"),
        (lambda x: sparse(topk_length=x), "topk_length"),
    ],
)
def test_a_nested_tensor_is_told_by_name(
    uneven: Tensor, call: Callable[[Tensor], Any], name: str
) -> None:
    with pytest.raises(Unsupported, match=f"^{name}: got a tensor whose layout is nested"):
        call(uneven)


class Cache(NamedTuple):
    keys: torch.Tensor
    values: torch.Tensor


def gqa_call(**changes: Any) -> dict[str, Any]:
    shape = GqaShape((1, 1), (70, 9), 8, 2, page_size=16)
    return make_gqa_inputs(shape, 1, workspace_bytes=1 << 20).contract_args() | changes


def test_xqa_s_own_layout_holds_in_the_checks_ahead_of_a_copy() -> None:
    """Its default is NHD: with a workspace, and with a query whose rows lie apart."""
    named = gqa_call()
    named["kv_cache"] = tuple(part.transpose(1, 2).contiguous() for part in named["kv_cache"])
    places = ("query", "kv_cache", "block_tables", "seq_lens", "max_seq_len")
    query, cache, *given = (named[name] for name in places)
    apart = torch.cat((query, query), -1)[..., : query.shape[-1]]
    xqa = flashinfer.xqa_batch_decode_with_kv_cache
    wanted = xqa(query, cache, None, *given, kv_layout="NHD")
    for rows in (query, apart):
        for workspace in (None, torch.zeros(1 << 20, dtype=torch.uint8)):
            torch.testing.assert_close(xqa(rows, cache, workspace, *given), wanted)


def test_a_cache_may_be_a_named_tuple() -> None:
    named = gqa_call()
    cache = Cache(*named["kv_cache"])
    apart = torch.cat((named["query"],) * 2, -1)[..., : named["query"].shape[-1]]
    out = flashinfer.trtllm_batch_decode_with_kv_cache(
        **named | {"query": apart, "kv_cache": cache}
    )
    torch.testing.assert_close(out, gqa(**named))


def test_gqa_tensors_without_values_are_refused() -> None:
    def on_meta(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(on_meta(part) for part in value)
        return value.to("meta") if isinstance(value, torch.Tensor) else value

    with pytest.raises(Unsupported, match="query: got tensors on meta, which have no values"):
        gqa(**{name: on_meta(value) for name, value in gqa_call().items()})


def test_a_gqa_cache_of_one_tensor_that_is_negated_is_refused() -> None:
    keys, values = gqa_call()["kv_cache"]
    cache = torch.stack((keys, values), 1)
    complex_ = torch.complex(torch.zeros(cache.shape), cache.float()).conj()
    with pytest.raises(Unsupported, match=r"^kv_cache: got a view that is negated"):
        gqa(**gqa_call(kv_cache=complex_.imag))


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("causal_seqlens_kv_global", InvalidInput),
        ("return_lse_base", InvalidInput),
        ("cute_dsl_impl", Unsupported),
    ],
)
def test_a_numpy_array_is_told_by_name(name: str, error: type[MlaLabError]) -> None:
    with pytest.raises(error, match=f"^{name}: got"):
        contract(**call_of(**{name: np.array([1, 2])}))


@pytest.mark.parametrize("first", [False, True])
def test_sinks_are_a_tensor_or_a_list(first: bool) -> None:
    """A right call of the same form changes nothing."""
    sink = torch.zeros(4)
    if first:
        contract(**call_of(sinks=[sink]))
    with pytest.raises(InvalidType, match=r"^sinks: got deque"):
        contract(**call_of(sinks=deque([sink])))


def test_auto_is_no_counter_buffer() -> None:
    for value in ("auto", "other"):
        with pytest.raises(Unsupported, match=f"^multi_ctas_kv_counter_buffer: got '{value}'"):
            contract(**call_of(multi_ctas_kv_counter_buffer=value))
    contract(**call_of(kv_scale_format="auto"))


@pytest.mark.parametrize("call", [contract, mla])
def test_transforms_of_torch_func_are_refused_by_name(call: Call) -> None:
    named = call_of()
    with pytest.raises(Unsupported, match=r"^query: got a tensor without memory"):
        torch.vmap(lambda q: call(**named | {"query": q}))(torch.stack([named["query"]] * 2))
    with pytest.raises(Unsupported, match=r"^bmm1_scale: got a tensor without memory"):
        torch.vmap(lambda s: call(**named | {"bmm1_scale": s}))(torch.ones(2))
    with pytest.raises(InvalidInput, match=r"^query: got address 0"):
        torch.func.functionalize(lambda q: call(**named | {"query": q}))(named["query"])


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        ("kv_layout", torch.zeros(2, 2), InvalidType),
        ("out_dtype", torch.zeros(2, 2), Unsupported),
        ("max_q_len", torch.zeros(2, 2), InvalidType),
        ("cp_world", 10**5000, Unsupported),
        ("q_len_per_req", 10**5000, InvalidInput),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_gqa_call_s_error_is_one_short_line(
    name: str, value: Any, error: type[MlaLabError]
) -> None:
    with pytest.raises(error, match=name) as raised:
        gqa(**make_gqa_inputs(GqaShape((1,), (9,), 4, 2), 0).contract_args() | {name: value})
    assert len(str(raised.value)) < 200 and "\n" not in str(raised.value)


# --- memory that no row sees --------------------------------------------------------------------


@pytest.mark.parametrize("value", [7.0, float("nan")])
def test_tokens_behind_the_end_of_a_rank_may_hold_anything(value: float) -> None:
    named = call_of(
        q_len=2,
        seq_lens=torch.tensor([40, 9], dtype=torch.int32),
        causal_seqlens_kv_global=torch.tensor([61, 18], dtype=torch.int32),  # 31 and 9 are ours
        enable_dcp=True,
        cp_world=2,
        return_lse=True,
    )
    expected = contract(**named)
    page, slot = named["block_tables"][0, 35 // 16], 35 % 16
    named["kv_cache"] = named["kv_cache"].clone()
    named["kv_cache"][page, slot] = value
    for one, other in zip(expected, contract(**named), strict=True):
        assert torch.equal(one, other)


def test_tokens_outside_of_a_window_may_hold_anything() -> None:
    named = gqa_call(window_left=5)
    expected = gqa(**named)
    keys, values = (part.clone() for part in named["kv_cache"])
    first = named["block_tables"][0, 0]
    keys[first], values[first] = float("nan"), float("nan")
    assert torch.equal(gqa(**named | {"kv_cache": (keys, values)}), expected)


# --- torch.compile ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        {"query": torch.randn(2, 1, 5, 640).bfloat16()[:, :, :4, :576]},
        {"query": torch.randn(2, 3, 4, 576).bfloat16(), "cute_dsl_impl": "modular"},
        {"multi_ctas_kv_counter_buffer": torch.zeros(100, dtype=torch.uint8)},
    ],
    ids=["gaps", "modular", "counters"],
)
def test_what_flashinfer_s_names_take_is_traced_whole(changes: dict[str, Any]) -> None:
    named = call_of() | changes
    query = named.pop("query")
    run = torch.compile(lambda q: mla(**named, query=q), backend="eager", fullgraph=True)
    assert torch.equal(run(query), mla(**named, query=query))


def test_flash_mla_s_call_is_traced_whole() -> None:
    named = dense_arguments()

    def step(query: Tensor) -> Tensor:
        metadata, _ = flash_mla.get_mla_metadata()
        given = named | {"q": query, "tile_scheduler_metadata": metadata}
        return flash_mla.flash_mla_with_kvcache(**given)[0]

    query = torch.randn(2, 1, 4, 576).bfloat16()
    run = torch.compile(step, backend="eager", fullgraph=True)
    assert torch.equal(run(query), step(query))


@pytest.mark.parametrize("call", [dense, cute_dsl])
def test_only_refusals_are_renamed(monkeypatch: pytest.MonkeyPatch, call: Call) -> None:
    """What went wrong in a launch passes as it is, with what it carries."""
    fault = Fault(Finding("race", Place("block_tables", 1), "threads", "what"))

    def launch(*_: object) -> None:
        raise fault

    monkeypatch.setattr(TorchBackend, "run", launch)
    with pytest.raises(Fault) as caught:
        call()
    assert caught.value is fault


@pytest.mark.parametrize("features", [(), ("tree_mask",)])
@pytest.mark.parametrize(
    ("lengths", "sums", "nan"),
    [
        ((65, 999, 4), (0, 2, 4, 6), (2, 4)),
        ((2**31 - 1, 10, 4), (0, 2, 4, 6), (0, 2)),
        ((65, 10, 2**31 - 64), (0, 2, 4, 6), (4, 6)),
        ((65, 10, 4), (0, 2, 4, 9), (4, 6)),
        ((65, 10, 4), (-3, 2, 4, 6), (0, 2)),
        ((65, 10, 4), (0, 2, 7, -6), (2, 6)),
        ((-5, 10, 4), (0, 2, 4, 6), None),
    ],
)
def test_what_torch_reads_unchecked_on_a_device_may_lie_outside(
    monkeypatch: pytest.MonkeyPatch,
    features: tuple[str, ...],
    lengths: tuple[int, ...],
    sums: tuple[int, ...],
    nan: tuple[int, int] | None,
) -> None:
    """As in the kernel: rows of such a request are NaN, others right, none outside is written."""
    inputs = make_gqa_inputs(GqaShape((2, 2, 2), (65, 10, 4), 6, 3), 1, (*features, "lse"))
    want = decode_gqa_reference(inputs)
    room, room_of_lse = torch.full((18, 6, 128), 7.0).bfloat16(), torch.full((18, 6), 7.0)
    out, lse = room[6:12], room_of_lse[6:12]
    arguments = inputs.contract_args() | {"out": out, "lse": lse, "max_q_len": 2}
    arguments |= {"q_len_per_req": None, "backend": "torch"}
    arguments["seq_lens"] = torch.tensor(lengths, dtype=torch.int32)
    arguments["cum_seq_lens_q"] = torch.tensor(sums, dtype=torch.int32)
    if inputs.mask is not None:
        arguments["mask"] = inputs.mask.flatten(0, 1)
    monkeypatch.setattr(gqa_checks, "_read_values", lambda *_: None)
    gqa(**arguments)
    begin, end = nan or (0, 2)
    if nan:
        assert out[begin:end].isnan().all() and lse[begin:end].isnan().all()
    else:
        assert not out[:2].any() and lse[:2].isneginf().all()
    honest = torch.tensor([not begin <= token < end for token in range(6)])
    assert rel_error(out[honest].double(), want.out[honest]) < 4e-3
    assert lse_error(lse[honest], want.lse[honest]) < 1e-5
    for whole in (room, room_of_lse):
        assert whole[:6].eq(7).all() and whole[12:].eq(7).all()
