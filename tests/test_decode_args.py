"""One parameter list: what follows from it, and that a new argument is in all of it."""

from __future__ import annotations

import inspect
import pickle
from dataclasses import KW_ONLY, dataclass, fields
from typing import Annotated, Any

import pytest
import torch

from mla_lab.api import contract, decode, replay, torch_op
from mla_lab.call import decode_args
from mla_lab.call.checks import form_cache
from mla_lab.call.decode_args import PARAMETERS, Arg, DecodeArgs, Rule, parameters_of
from mla_lab.call.signature import Target, function, native_parameters, public_parameters
from mla_lab.core.problem import Problem
from mla_lab.interop.capture import definition
from mla_lab.reference.inputs import make_inputs

#: FlashInfer 0.7.2's list as the contract gives it, and ours behind it
CONTRACT = """query, kv_cache, workspace_buffer, qk_nope_head_dim, kv_lora_rank, qk_rope_head_dim,
block_tables, seq_lens, max_seq_len, sparse_mla_top_k=0, out=None, bmm1_scale=1.0, bmm2_scale=1.0,
sinks=None, skip_softmax_threshold_scale_factor=None, enable_pdl=None, backend='auto',
is_var_seq=True, uses_shared_paged_kv_idx=True, lse=None, return_lse=False, cute_dsl_impl='auto',
kv_scale_format='auto', cum_seq_lens_q=None, max_q_len=None, multi_ctas_kv_counter_buffer=None,
sparse_mla_top_k_lens=None, enable_dcp=False, cp_world=1, cp_rank=0, causal_seqlens_kv_global=None,
use_fp16_softmax=None, return_lse_base=None, *, mask=None, batch_invariant=False, plan=None"""


@dataclass(slots=True, eq=False)
class WithTemperature(DecodeArgs):
    """A copy of the list with two arguments more, as one edit would add them."""

    _: KW_ONLY
    temperature: Annotated[float, Arg(recorded=True, note="A divisor.")] = 1.0
    head_bias: Annotated[torch.Tensor | None, Arg(Rule.TENSOR, axes="num_heads")] = None


LONGER = parameters_of(WithTemperature)


def arguments(**more: Any) -> WithTemperature:
    named = make_inputs(Problem((2, 2), (70, 9), 4), 1, workspace_bytes=64).contract_args()
    return WithTemperature(**named, **more)


def test_the_public_signature_is_flashinfer_s() -> None:
    signature = inspect.signature(contract.trtllm_batch_decode_with_kv_cache_mla)
    listed = [str(p.replace(annotation=p.empty)) for p in signature.parameters.values()]
    keyword = [p.kind is p.KEYWORD_ONLY for p in signature.parameters.values()].index(True)
    assert [*listed[:keyword], "*", *listed[keyword:]] == CONTRACT.replace("\n", " ").split(", ")


def test_a_public_function_belongs_to_its_module() -> None:
    for made in (contract.trtllm_batch_decode_with_kv_cache_mla, decode.decode, decode.explain):
        assert pickle.loads(pickle.dumps(made)) is made


def test_the_native_call_has_the_same_parameters() -> None:
    public = inspect.signature(contract.trtllm_batch_decode_with_kv_cache_mla).parameters
    native = inspect.signature(decode.decode).parameters
    assert set(native) == {*public, "debug"}
    by_position = [p.name for p in native.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert by_position == ["query", "kv_cache", "block_tables", "seq_lens"]
    assert [f.name for f in fields(DecodeArgs) if not f.init] == ["debug", "native"]


@pytest.mark.parametrize("change", [{"temperature": 2.0}, {"head_bias": torch.zeros(4)}])
def test_a_new_argument_is_part_of_the_key(
    change: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(form_cache, "PARAMETERS", LONGER)
    assert form_cache.key_of(arguments()) == form_cache.key_of(arguments())
    assert form_cache.key_of(arguments()) != form_cache.key_of(arguments(**change))


def player(args: WithTemperature) -> Any:
    """A recorded call's player by the longer list; it launches nothing."""
    kinds = tuple(replay._kind(p, getattr(args, p.name), False) for p in LONGER)
    expected: dict[str, Any] = {"launch": lambda *_: None, "form": form_cache.form_of(args)}
    for p in LONGER:
        expected |= replay._expected(p, getattr(args, p.name), exact=False)
    return replay.player_factory(LONGER, kinds, tuple(expected))(**expected)


@pytest.mark.parametrize("change", [{"temperature": 2.0}, {"head_bias": torch.zeros(4)}])
def test_a_new_argument_is_compared_by_a_replay(change: dict[str, Any]) -> None:
    for one, other in (({}, change), (change, {})):
        replay.clear()
        made = player(arguments(**one))
        assert made(arguments(**one)) is not None
        replay._last = made
        assert replay.replay(arguments(**one)) is not None
        assert replay.replay(arguments(**other)) is None
    replay.clear()


def test_every_argument_is_compared() -> None:
    """No field can be left out: each has its condition."""
    args = arguments()
    kinds = tuple(replay._kind(p, getattr(args, p.name), True) for p in LONGER)
    text = replay.comparison(LONGER, kinds)
    assert len(text) == len(LONGER)
    assert all(any(f"a.{p.name} " in t or f"a.{p.name}." in t for t in text) for p in LONGER)


def test_a_new_argument_is_in_the_operation_s_schema() -> None:
    before = torch_op.schema(torch_op.operation_parameters(PARAMETERS))
    after = torch_op.schema(torch_op.operation_parameters(LONGER))
    assert "temperature" not in before
    assert "float temperature, Tensor? head_bias, Tensor? bmm1_scale_tensor" in after
    assert after.replace("float temperature, Tensor? head_bias, ", "") == before
    assert "Tensor(a!)? workspace_buffer" in before and "plan" not in before


def test_a_new_argument_is_in_the_signatures_and_forwarded() -> None:
    target = Target(WithTemperature, lambda args: args)
    made = function("made", target, public_parameters(LONGER), "doc", fixed={"native": "False"})
    assert list(inspect.signature(made).parameters)[-2:] == ["temperature", "head_bias"]
    named = make_inputs(Problem((1,), (70,), 4), workspace_bytes=64).contract_args()
    args = made(**named, temperature=3.0)
    assert (args.temperature, args.head_bias, args.native, args.cp_world) == (3.0, None, False, 1)
    native = function("made", target, native_parameters(LONGER), "doc")
    args = native(named["query"], named["kv_cache"], named["block_tables"], named["seq_lens"])
    assert (args.temperature, args.native, args.max_seq_len, args.kv_lora_rank) == (
        1,
        True,
        None,
        512,
    )


def test_a_new_argument_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(definition, "PARAMETERS", LONGER)
    args = arguments(head_bias=torch.zeros(4), temperature=2.0)
    inputs = definition.definition_of(args, form_cache.form_of(args))["inputs"]
    assert inputs["temperature"] == {"shape": None, "dtype": "float32", "description": "A divisor."}
    assert inputs["head_bias"] == {"shape": ["num_heads"], "dtype": "float32"}


def test_the_oracle_takes_the_same_object() -> None:
    inputs = make_inputs(Problem((1,), (70,), 4), workspace_bytes=64)
    assert isinstance(inputs, DecodeArgs)
    assert decode_args.native_args(**inputs.contract_args()).query is inputs.query
