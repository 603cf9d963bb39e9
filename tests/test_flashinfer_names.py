"""Code written for FlashInfer's MLA names runs on ours by changing the import."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

import mla_lab.flashinfer_names as flashinfer
from mla_lab.api import contract
from mla_lab.core import masks
from mla_lab.core.errors import InvalidInput, InvalidType, Unsupported
from mla_lab.core.problem import Problem
from mla_lab.interop.flashinfer import first_use
from mla_lab.interop.flashinfer.first_use import ZEROED_BYTES
from mla_lab.plan import WorkspaceLayout
from mla_lab.reference.inputs import DecodeInputs, make_inputs
from mla_lab.reference.mla import decode_reference
from mla_lab.reference.tolerance import lse_error, rel_error

SMALL = Problem((1, 1), (70, 9), 4)


def cute_dsl_names(inputs: DecodeInputs) -> dict[str, Any]:
    """A call of the CuTe DSL entry, whose scales have names of their own."""
    named = inputs.contract_args()
    del named["qk_nope_head_dim"]
    named["softmax_scale"] = named.pop("bmm1_scale")
    return named


@pytest.mark.parametrize("module", [flashinfer, flashinfer.mla, flashinfer.decode])
@pytest.mark.parametrize("name", ["trtllm_batch_decode_with_kv_cache_mla"])
def test_the_same_call_by_any_module(module: Any, name: str) -> None:
    inputs = make_inputs(SMALL, 1, ["lse", "sinks"])
    out, lse = getattr(module, name)(**inputs.contract_args())
    expected = contract.trtllm_batch_decode_with_kv_cache_mla(**inputs.contract_args())
    assert torch.equal(out, expected[0]) and torch.equal(lse, expected[1])


def test_xqa_by_position() -> None:
    inputs = make_inputs(SMALL, 1)
    out = flashinfer.xqa_batch_decode_with_kv_cache_mla(
        inputs.query,
        inputs.kv_cache,
        inputs.workspace_buffer,
        128,
        512,
        64,
        inputs.block_tables,
        inputs.seq_lens,
        inputs.max_seq_len,
        bmm1_scale=inputs.bmm1_scale,
    )
    assert rel_error(out, decode_reference(inputs).out) < 4e-3


@pytest.mark.parametrize(
    "name", ["trtllm_batch_decode_with_kv_cache_mla", "xqa_batch_decode_with_kv_cache_mla"]
)
def test_signatures_are_the_contract_s(name: str) -> None:
    ours = inspect.signature(getattr(flashinfer, name))
    assert ours == inspect.signature(getattr(contract, name))
    assert "selects_grouped_mla" not in ours.parameters


@pytest.mark.parametrize("by_position", [True, False])
def test_a_workspace_of_any_bytes_is_cleared_once(by_position: bool) -> None:
    named = make_inputs(SMALL, 1).contract_args()
    buffer = torch.full((16 << 20,), 7, dtype=torch.int8)
    del named["workspace_buffer"]

    def call() -> None:
        if by_position:
            first = [named.pop("query"), named.pop("kv_cache")]
            flashinfer.mla.trtllm_batch_decode_with_kv_cache_mla(*first, buffer, **named)
            named.update(query=first[0], kv_cache=first[1])
        else:
            flashinfer.trtllm_batch_decode_with_kv_cache_mla(workspace_buffer=buffer, **named)

    call()
    layout = WorkspaceLayout.of(1, 1, 64, 512)
    assert layout["schedule"].offset == ZEROED_BYTES  # which may hold anything
    assert not buffer[:ZEROED_BYTES].any() and (buffer[-65536:] == 7).all()
    buffer[0] = 3
    call()
    assert buffer[0] == 3, "a second call leaves it alone"


def test_what_a_capture_records_does_not_count_as_cleared(monkeypatch: pytest.MonkeyPatch) -> None:
    # the graph may never be replayed, or behind another one that was captured with the buffer
    named = make_inputs(SMALL, 1).contract_args()
    buffer = torch.full((16 << 20,), 7, dtype=torch.uint8)
    named["workspace_buffer"] = buffer
    for captured, cleared in ((True, True), (True, True), (False, True), (True, False)):
        buffer[0] = 3
        with monkeypatch.context() as patch:
            patch.setattr(first_use, "is_captured", lambda device, now=captured: now)
            flashinfer.trtllm_batch_decode_with_kv_cache_mla(**named)
        assert buffer[0] == (0 if cleared else 3)


def test_a_new_buffer_at_an_old_address_is_cleared() -> None:
    named = make_inputs(SMALL, 1).contract_args()
    whole = torch.full((8 << 20,), 7, dtype=torch.uint8)
    for _ in range(2):
        view = whole[:]
        flashinfer.trtllm_batch_decode_with_kv_cache_mla(**{**named, "workspace_buffer": view})
        assert not whole[:65536].any()
        whole[:65536] = 7
        del view


def test_a_counter_buffer_is_left_as_it_is() -> None:
    named = make_inputs(SMALL, 1).contract_args()
    counters = torch.full((64,), 7, dtype=torch.uint8)
    out = flashinfer.trtllm_batch_decode_with_kv_cache_mla(
        **named, multi_ctas_kv_counter_buffer=counters
    )
    assert torch.equal(out, contract.trtllm_batch_decode_with_kv_cache_mla(**named))
    assert (counters == 7).all()


@pytest.mark.parametrize(
    ("buffer", "says"),
    [
        (torch.zeros(64, dtype=torch.uint8)[::2], "counter_buffer: got strides.*be contiguous"),
        (torch.zeros(64, dtype=torch.uint8)[1:], "counter_buffer: got address.*16-byte aligned"),
        ([0], "counter_buffer: got list"),
    ],
)
def test_a_wrong_counter_buffer_is_refused(buffer: Any, says: str) -> None:
    named = make_inputs(SMALL, 1).contract_args()
    with pytest.raises(InvalidInput, match=says):
        flashinfer.trtllm_batch_decode_with_kv_cache_mla(
            **named, multi_ctas_kv_counter_buffer=buffer
        )


def test_a_wrong_workspace_is_left_to_the_checks() -> None:
    named = make_inputs(SMALL, 1).contract_args()
    wrong = torch.full((4, 4), 7.0)
    with pytest.raises(InvalidInput, match="workspace_buffer"):
        flashinfer.trtllm_batch_decode_with_kv_cache_mla(**{**named, "workspace_buffer": wrong})
    assert (wrong == 7).all()


@pytest.mark.parametrize(
    ("backend", "by_position"),
    [(None, True), (None, False), ("eager", False), ("aot_eager", True)],
)
def test_bytes_of_the_cache_are_no_workspace_and_stay(
    backend: str | None, by_position: bool
) -> None:
    torch.compiler.reset()
    named = make_inputs(SMALL, 1).contract_args()
    del named["workspace_buffer"]
    query, cache = named.pop("query"), named.pop("kv_cache")
    before = cache.view(torch.uint8).clone()  # slots behind a request hold nan

    def step(query: torch.Tensor, cache: torch.Tensor) -> Any:
        buffer = cache.view(torch.uint8).view(-1)
        call: Any = flashinfer.trtllm_batch_decode_with_kv_cache_mla
        if by_position:
            return call(query, cache, buffer, **named)
        return call(query=query, kv_cache=cache, workspace_buffer=buffer, **named)

    run = step if backend is None else torch.compile(step, backend=backend, fullgraph=True)
    with pytest.raises(InvalidInput, match="workspace_buffer: got bytes"):
        run(query, cache)
    assert torch.equal(cache.view(torch.uint8), before)


@pytest.mark.parametrize(
    "wrong", [{"backend": "none"}, {"max_seq_len": "long"}, {"max_seq_len": None}, {"sinks": [0]}]
)
def test_a_call_is_checked_before_its_workspace_is_cleared(wrong: dict[str, Any]) -> None:
    named = make_inputs(SMALL, 1).contract_args()
    named["workspace_buffer"] = torch.full((16 << 20,), 7, dtype=torch.uint8)
    with pytest.raises(InvalidInput, match=next(iter(wrong))):
        flashinfer.trtllm_batch_decode_with_kv_cache_mla(**{**named, **wrong})
    assert (named["workspace_buffer"] == 7).all()


@pytest.mark.parametrize(
    "name", ["trtllm_batch_decode_with_kv_cache", "xqa_batch_decode_with_kv_cache"]
)
def test_bytes_of_a_gqa_cache_are_no_workspace_and_stay(name: str) -> None:
    call = getattr(flashinfer, name)
    cache = torch.ones(2, 2, 1, 16, 64, dtype=torch.bfloat16)
    query = torch.zeros(2, 8, 64, dtype=torch.bfloat16)
    lens, table = torch.ones(2, dtype=torch.int32), torch.zeros(2, 1, dtype=torch.int32)
    buffer = cache.view(torch.uint8).view(-1)
    with pytest.raises(InvalidInput, match="workspace_buffer: got bytes"):
        call(query, cache, buffer, table, lens, 16, kv_layout="HND")
    assert (cache == 1).all()


def test_a_workspace_that_inference_mode_made_is_cleared_outside_of_it() -> None:
    named = make_inputs(SMALL, 1).contract_args()
    expected = contract.trtllm_batch_decode_with_kv_cache_mla(**named)
    with torch.inference_mode():
        buffer = torch.full((16 << 20,), 7, dtype=torch.uint8)
    out = flashinfer.trtllm_batch_decode_with_kv_cache_mla(**{**named, "workspace_buffer": buffer})
    assert torch.equal(out, expected) and not buffer[:ZEROED_BYTES].any()


def test_python_says_what_is_wrong_with_a_list() -> None:
    named = make_inputs(SMALL, 1).contract_args()
    call: Any = flashinfer.trtllm_batch_decode_with_kv_cache_mla
    for args, more in (((named["query"],), {}), ((), {"bogus": 3}), ((0,) * 60, {})):
        with pytest.raises(TypeError, match="argument"):
            call(*args, **(named if not args[1:] else {}), **more)


@pytest.mark.parametrize("shape", [(), (4,)])
@pytest.mark.parametrize("more", ["sinks", "counters"])
def test_a_query_of_too_few_dimensions_is_told(shape: tuple[int, ...], more: str) -> None:
    named = make_inputs(SMALL, 1).contract_args() | {"query": torch.zeros(shape).bfloat16()}
    if more == "sinks":
        named["sinks"] = torch.zeros(4)
    else:
        named["multi_ctas_kv_counter_buffer"] = torch.zeros(64, dtype=torch.uint8)
    with pytest.raises(InvalidInput, match="query: got shape"):
        flashinfer.trtllm_batch_decode_with_kv_cache_mla(**named)


@pytest.mark.parametrize(
    ("dtype", "out_dtype", "expected"),
    [
        ("bf16", None, torch.bfloat16),
        ("fp16", None, torch.float16),
        ("fp16", torch.bfloat16, torch.bfloat16),
        ("e4m3", None, torch.bfloat16),
        ("e4m3", torch.float8_e4m3fn, torch.float8_e4m3fn),
    ],
)
def test_the_cute_dsl_entry_s_out(dtype: str, out_dtype: Any, expected: torch.dtype) -> None:
    problem = Problem((2, 2), (70, 9), 4, q_dtype=dtype, kv_format=dtype)
    inputs = make_inputs(problem, 1, ["lse"])
    named = {**cute_dsl_names(inputs), "out_dtype": out_dtype, "output_scale": 0.5}
    out, lse = flashinfer.cute_dsl_mla_decode(**named)
    reference = decode_reference(inputs)
    assert out.dtype is expected
    assert lse.shape == (2, 2, 4)
    assert lse_error(lse, reference.lse) < 1e-5
    limit = 5e-2 if expected is torch.float8_e4m3fn else 4e-3
    assert rel_error(out.float(), 0.5 * reference.out) < limit


def test_the_cute_dsl_entry_with_ragged_requests() -> None:
    inputs = make_inputs(Problem((2, 0, 1), (70, 9, 3), 4), 1, ["lse", "max_q_len"])
    out, lse = flashinfer.cute_dsl_mla_decode(**cute_dsl_names(inputs), cute_dsl_impl="monolithic")
    reference = decode_reference(inputs)
    assert rel_error(out, reference.out) < 4e-3
    assert lse.shape == (3, 4) and lse_error(lse, reference.lse) < 1e-5


def test_modular_is_taken_where_it_says_the_same() -> None:
    one = cute_dsl_names(make_inputs(SMALL, 1))
    assert torch.equal(
        flashinfer.cute_dsl_mla_decode(**one, cute_dsl_impl="modular"),
        flashinfer.cute_dsl_mla_decode(**one),
    )
    inputs = make_inputs(Problem((2, 2), (70, 9), 4), 1, ["lse"])
    out, lse = flashinfer.cute_dsl_mla_decode(**cute_dsl_names(inputs), cute_dsl_impl="modular")
    seen = masks.pack(torch.ones(2, 2, 2, dtype=torch.bool))
    expected = decode_reference(replace(inputs, mask=seen))
    assert rel_error(out, expected.out) < 4e-3 and lse_error(lse, expected.lse) < 1e-5
    with pytest.raises(Unsupported, match="its rows are not causal"):
        contract.trtllm_batch_decode_with_kv_cache_mla(
            **inputs.contract_args(), cute_dsl_impl="modular"
        )


def test_modular_in_a_sparse_call_is_refused_by_its_name() -> None:
    problem = Problem((2, 2), (300, 70), 4, kv_format="fp8_656", top_k=40)
    named = make_inputs(problem, 1).contract_args()
    flashinfer.trtllm_batch_decode_with_kv_cache_mla(**named)
    with pytest.raises(Unsupported, match="cute_dsl_impl: got 'modular'"):
        flashinfer.trtllm_batch_decode_with_kv_cache_mla(**named, cute_dsl_impl="modular")


def test_sinks_of_16_bits_in_a_list_are_copied() -> None:
    inputs = make_inputs(SMALL, 1, ["sinks"])
    assert isinstance(inputs.sinks, torch.Tensor)
    sinks, named = inputs.sinks.bfloat16(), inputs.contract_args()
    call = flashinfer.trtllm_batch_decode_with_kv_cache_mla
    expected = call(**{**named, "sinks": sinks})
    assert torch.equal(call(**{**named, "sinks": [sinks]}), expected)
    assert torch.equal(call(**{**named, "sinks": [sinks.float()]}), expected)
    with pytest.raises(InvalidInput, match=r"sinks: .* shape \(num_qo_heads,\) = \(4,\)"):
        call(**{**named, "sinks": [sinks[:3]]})


@pytest.mark.parametrize(
    ("wish", "says"),
    [("enable_pdl", "no programmatic dependent launch"), ("use_fp16_softmax", "softmax is fp32")],
)
def test_a_wish_excludes_no_backend(wish: str, says: str) -> None:
    named = make_inputs(SMALL, 1).contract_args()
    out = flashinfer.trtllm_batch_decode_with_kv_cache_mla(**named, **{wish: True})
    assert torch.equal(out, contract.trtllm_batch_decode_with_kv_cache_mla(**named))
    with pytest.raises(Unsupported, match=says):
        contract.trtllm_batch_decode_with_kv_cache_mla(**named, **{wish: True})


@pytest.mark.parametrize("layer", flashinfer.supported_mla_layer_dimensions, ids=str)
def test_the_layers_run(layer: Any) -> None:
    dims = layer.head_dimensions
    problem = Problem(
        (1,), (9,), layer.num_heads, latent_dim=dims.kv_lora_rank, rope_dim=dims.qk_rope_head_dim
    )
    out = flashinfer.trtllm_batch_decode_with_kv_cache_mla(**make_inputs(problem).contract_args())
    assert out.shape == (1, 1, layer.num_heads, dims.kv_lora_rank)


@pytest.mark.parametrize("by_position", [True, False])
def test_what_flashinfer_copies_is_copied(by_position: bool) -> None:
    inputs = make_inputs(SMALL, 1, ["sinks"])
    assert isinstance(inputs.sinks, torch.Tensor)
    named = inputs.contract_args() | {"sinks": inputs.sinks.bfloat16().float()}
    expected = contract.trtllm_batch_decode_with_kv_cache_mla(**named)
    apart = torch.empty(2, 2, *inputs.query.shape[2:], dtype=torch.bfloat16)[:, ::2]
    apart.copy_(named.pop("query"))
    assert not apart.is_contiguous()
    named["sinks"] = inputs.sinks.bfloat16()
    first = [apart] if by_position else []
    if not by_position:
        named["query"] = apart
    out = flashinfer.trtllm_batch_decode_with_kv_cache_mla(*first, **named)
    assert torch.equal(out, expected)
    with pytest.raises(InvalidInput, match=r"sinks: got torch\.bfloat16"):
        contract.trtllm_batch_decode_with_kv_cache_mla(**{**named, "query": apart})


def test_refusals_in_flashinfer_s_words() -> None:
    named = make_inputs(SMALL, 1).contract_args()
    with pytest.raises(InvalidInput, match=r"sinks: .* shape \(num_qo_heads,\) = \(4,\)"):
        flashinfer.trtllm_batch_decode_with_kv_cache_mla(**{**named, "sinks": torch.zeros(5)})
    counters = torch.zeros(16, dtype=torch.uint8)
    with pytest.raises(InvalidInput, match="counter_buffer is too small: 32 bytes"):
        flashinfer.trtllm_batch_decode_with_kv_cache_mla(
            **named, multi_ctas_kv_counter_buffer=counters
        )
    entry = cute_dsl_names(make_inputs(SMALL, 1))
    for name, width in (("out", 512), ("lse", 1)):
        gaps = torch.empty(2, 2, 4, width)[:, ::2]
        with pytest.raises(InvalidInput, match=f"{name} must be contiguous"):
            flashinfer.cute_dsl_mla_decode(**{**entry, name: gaps})


@pytest.mark.parametrize("return_lse", [True, False])
def test_no_query_token_is_nothing_to_do_for_the_cute_dsl_entry(return_lse: bool) -> None:
    named = cute_dsl_names(make_inputs(Problem((1, 0), (70, 9), 4), 1, ["max_q_len"]))
    named |= {"query": named["query"][:0], "cum_seq_lens_q": torch.zeros(3, dtype=torch.int32)}
    result = flashinfer.cute_dsl_mla_decode(**named, return_lse=return_lse)
    out, lse = result if return_lse else (result, torch.empty(0, 4))
    assert out.shape == (0, 4, 512) and lse.shape == (0, 4)


@pytest.mark.parametrize("lse", [None, torch.zeros(0, 4)])
def test_no_query_token_has_an_lse_in_any_case(lse: torch.Tensor | None) -> None:
    named = cute_dsl_names(make_inputs(Problem((1, 0), (70, 9), 4), 1, ["max_q_len"]))
    named |= {"query": named["query"][:0], "cum_seq_lens_q": torch.zeros(3, dtype=torch.int32)}
    found = flashinfer.cute_dsl_mla_decode(**named, lse=lse, return_lse=True)[1]
    assert found.shape == (0, 4) and (lse is None or found is lse)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"kv_cache": None}, "kv_cache: got NoneType"),
        ({"cum_seq_lens_q": "x"}, "cum_seq_lens_q|query"),
        ({"cum_seq_lens_q": torch.tensor([0, 1, 0], dtype=torch.int32)}, "a step of -1"),
        ({"max_seq_len": "x"}, "max_seq_len: got str"),
        ({"seq_lens": torch.zeros(5, dtype=torch.int32)}, "seq_lens: got shape"),
        ({"out": torch.zeros(0, 4, 256)}, "out: got"),
        ({"out": torch.zeros(1, 4, 512).bfloat16()}, "out: got shape .*no row"),
        ({"lse": torch.zeros(1, 4)}, "lse: got shape .*no row"),
        ({"bogus": 3}, "bogus"),
    ],
    ids=str,
)
def test_a_call_without_query_tokens_is_checked(wrong: dict[str, Any], says: str) -> None:
    named = cute_dsl_names(make_inputs(Problem((1, 0), (70, 9), 4), 1, ["max_q_len"]))
    named |= {"query": named["query"][:0], "cum_seq_lens_q": torch.zeros(3, dtype=torch.int32)}
    with pytest.raises((InvalidInput, TypeError), match=says):
        flashinfer.cute_dsl_mla_decode(**{**named, **wrong})


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"query": None, "out": torch.zeros(1)}, "query: got NoneType"),
        ({"query": [0], "return_lse": True}, "query: got list"),
        ({"query": torch.zeros(4)}, "query: got shape"),
        ({"out_dtype": "fp16"}, "out_dtype: got 'fp16'"),
        ({"out_dtype": torch.float64}, r"out_dtype: got torch\.float64"),
        ({"kv_lora_rank": -1}, "kv_lora_rank: got -1"),
        ({"kv_lora_rank": "512"}, "kv_lora_rank: got str"),
        ({"kv_lora_rank": 10**13}, "kv_lora_rank: got 10000000000000; supported: 1 to 576"),
        (
            {"out": torch.zeros(2, 1, 4, 512).bfloat16(), "out_dtype": torch.float16},
            r"out_dtype: got torch\.float16; supported: .*torch\.bfloat16",
        ),
    ],
    ids=str,
)
def test_wrong_arguments_of_the_cute_dsl_entry(wrong: dict[str, Any], says: str) -> None:
    named = cute_dsl_names(make_inputs(SMALL, 1))
    with pytest.raises(InvalidInput, match=says):
        flashinfer.cute_dsl_mla_decode(**{**named, **wrong})


@pytest.mark.parametrize("name", ["qk_nope_head_dim", "bmm1_scale", "bmm2_scale"])
def test_the_contract_s_own_parameters_are_none_of_the_cute_dsl_entry(name: str) -> None:
    with pytest.raises(InvalidType, match=f"{name}: got a value; supported: no such argument"):
        flashinfer.cute_dsl_mla_decode(**cute_dsl_names(make_inputs(SMALL, 1)), **{name: 0.5})


@pytest.fixture
def no_copies(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """From its call on, a tensor that would be copied to be contiguous is an error."""

    def copied(tensor: torch.Tensor) -> torch.Tensor:
        raise AssertionError(f"a copy of {list(tensor.shape)}")

    return lambda: monkeypatch.setattr(torch.Tensor, "contiguous", copied)


@pytest.mark.parametrize("wrong", ["block_tables", "max_seq_len"])
def test_a_query_is_checked_before_it_is_copied(wrong: str, no_copies: Callable[[], None]) -> None:
    named = make_inputs(SMALL, 1).contract_args()
    rows = 1 << 20  # a copy would take 4.8 GB
    wide = named["query"][:1].expand(rows, -1, -1, -1)
    values = {"block_tables": named["block_tables"], "max_seq_len": "long"}
    batch = {
        "seq_lens": named["seq_lens"][:1].expand(rows).contiguous(),
        "block_tables": named["block_tables"][:1].expand(rows, -1).contiguous(),
    }
    call = {**named, **batch, "query": wide, wrong: values[wrong]}
    if wrong == "max_seq_len":
        call["sinks"] = torch.zeros(4, dtype=torch.float64)
    entry = {k: v for k, v in call.items() if k not in ("qk_nope_head_dim", "bmm1_scale", "sinks")}
    no_copies()
    with pytest.raises(InvalidInput, match="sinks" if wrong == "max_seq_len" else "block_tables"):
        flashinfer.trtllm_batch_decode_with_kv_cache_mla(**call)
    if wrong == "block_tables":
        with pytest.raises(InvalidInput, match="block_tables"):
            flashinfer.cute_dsl_mla_decode(**entry, softmax_scale=1.0)


def test_a_gqa_query_is_checked_before_it_is_copied(no_copies: Callable[[], None]) -> None:
    rows = 1 << 20
    query = torch.zeros(1, 8, 64, dtype=torch.bfloat16).expand(rows, -1, -1)
    cache = torch.zeros(2, 2, 1, 16, 64, dtype=torch.bfloat16)
    lens, table = torch.ones(2, dtype=torch.int32), torch.zeros(2, 1, dtype=torch.int32)
    no_copies()
    for name in ("trtllm_batch_decode_with_kv_cache", "xqa_batch_decode_with_kv_cache"):
        with pytest.raises(InvalidInput, match="query"):
            getattr(flashinfer, name)(
                query, cache, torch.zeros(0, dtype=torch.uint8), table, lens, 16, kv_layout="HND"
            )


def test_a_compiled_program_clears_a_workspace_once() -> None:
    torch.compiler.reset()
    named = make_inputs(SMALL, 1).contract_args()
    buffer = torch.full((16 << 20,), 7, dtype=torch.uint8)
    named["workspace_buffer"] = buffer

    def step(query: torch.Tensor) -> torch.Tensor:
        call = {**named, "query": query}
        result: Any = flashinfer.trtllm_batch_decode_with_kv_cache_mla(**call)
        return result

    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    out = compiled(named["query"])
    assert torch.equal(out, contract.trtllm_batch_decode_with_kv_cache_mla(**named))
    assert not buffer[:ZEROED_BYTES].any() and (buffer[-65536:] == 7).all()
    buffer[0] = 3
    compiled(named["query"])
    assert buffer[0] == 3, "a second run leaves it alone"
