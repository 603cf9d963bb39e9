"""Our call behind an engine's attention backend, on a CPU; vLLM's classes where it is installed."""

from __future__ import annotations

import tomllib
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mla_lab.api.context_parallel import merge, shard
from mla_lab.core.errors import InvalidInput
from mla_lab.core.problem import Problem
from mla_lab.interop.engines import step as engine
from mla_lab.reference.inputs import DecodeInputs, make_inputs
from mla_lab.reference.mla import decode_reference
from mla_lab.reference.tolerance import lse_error, rel_error

from .absent import stand_in
from .house import ROOT

ONE = Problem((1, 1, 1), (70, 9, 33), 4)
DRAFTS = Problem((2, 1, 3), (70, 9, 33), 4)


@pytest.fixture(autouse=True)
def small_workspace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "WORKSPACE_BYTES", 16 << 20)
    monkeypatch.setattr(engine, "_WORKSPACES", {})


def step_of(inputs: DecodeInputs, **changed: Any) -> engine.Step:
    sums = torch.tensor([0, *inputs.problem.q_lens]).cumsum(0).int()
    made = engine.Step(inputs.block_tables, inputs.seq_lens, sums, 128, max(inputs.problem.q_lens))
    return replace(made, **changed)


def run(inputs: DecodeInputs, step: engine.Step, return_lse: bool = True) -> Any:
    return engine.decode(
        step,
        inputs.query.view(-1, inputs.problem.heads, 576),
        inputs.kv_cache,
        scale=float(inputs.bmm1_scale),
        value_scale=1.0,
        out_dtype=torch.bfloat16,
        return_lse=return_lse,
    )


def test_a_workspace_is_not_made_in_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    # its zeros would be recorded, and not be there for what is captured or called next
    monkeypatch.setattr("torch.cuda.is_current_stream_capturing", lambda: True)
    with pytest.raises(InvalidInput, match="during the capture of a CUDA graph"):
        engine.workspace(torch.device("cuda"))
    assert not engine._WORKSPACES


@pytest.mark.parametrize("problem", [ONE, DRAFTS, replace(ONE, kv_format="e4m3")])
def test_a_step_s_results_are_the_oracle_s(problem: Problem) -> None:
    inputs = make_inputs(problem, 1, ["lse"])
    out, lse = run(inputs, step_of(inputs))
    expected = decode_reference(inputs)
    assert rel_error(out, expected.out.view(out.shape)) < 4e-3
    assert lse_error(lse, expected.lse.view(lse.shape)) < 1e-5
    assert run(inputs, step_of(inputs), return_lse=False)[1] is None


@pytest.mark.parametrize("problem", [ONE, DRAFTS])
def test_ranks_of_a_step_merge_into_the_whole(problem: Problem) -> None:
    inputs = make_inputs(problem, 1, ["lse"])
    results = []
    for rank, part in enumerate(shard(inputs, 2)):
        ranks = engine.Ranks(2, rank, inputs.seq_lens)
        results.append(run(replace(part, query=inputs.query), step_of(part, ranks=ranks)))
    out, lse = merge(*zip(*results, strict=True))
    expected = decode_reference(inputs)
    assert rel_error(out, expected.out.view(out.shape)) < 4e-3
    assert lse_error(lse, expected.lse.view(lse.shape)) < 1e-5


def test_a_dense_step_has_one_token_a_request() -> None:
    inputs = make_inputs(DRAFTS, 1)
    with pytest.raises(InvalidInput, match="6 tokens of 3 requests with max_query_len 1"):
        run(inputs, step_of(inputs, max_query_len=1))


def test_the_workspace_of_a_device_is_one() -> None:
    first = engine.workspace(torch.device("cpu"))
    assert engine.workspace(torch.device("cpu")) is first and not first.any()


def test_the_entry_point_is_declared() -> None:
    from mla_lab.interop.engines import vllm_plugin

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = project["entry-points"]["vllm.general_plugins"]
    assert declared == {"mla_lab": "mla_lab.interop.engines.vllm_plugin:register"}
    assert callable(vllm_plugin.register)


@pytest.fixture
def vllm_backend() -> Any:
    """Our class out of vLLM's registry."""
    stand_in("torchvision")  # of its image models alone
    pytest.importorskip("vllm")
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    from mla_lab.interop.engines import vllm_plugin

    vllm_plugin.register()
    vllm_plugin.register()
    return AttentionBackendEnum["MLA_LAB"].get_class()


@pytest.mark.filterwarnings("ignore")
def test_vllm_s_registry_has_it(vllm_backend: Any) -> None:
    from vllm.platforms.interface import DeviceCapability

    assert vllm_backend.get_name() == "MLA_LAB" and vllm_backend.is_mla()
    assert vllm_backend.supports_compute_capability(DeviceCapability(9, 0))
    assert not vllm_backend.supports_compute_capability(DeviceCapability(10, 0))


@pytest.mark.filterwarnings("ignore")
def test_vllm_is_told_which_caches_a_model_has(vllm_backend: Any) -> None:
    from vllm.platforms.interface import DeviceCapability

    def reasons(dtype: torch.dtype, cache: str) -> list[str]:
        found: list[str] = vllm_backend.validate_configuration(
            *(576, dtype, cache, 64, True, False, False, False, False),
            *(DeviceCapability(9, 0), "decoder"),
        )
        return found

    assert reasons(torch.bfloat16, "fp8") == reasons(torch.float16, "auto") == []
    assert reasons(torch.float16, "fp8") == ["an e4m3 cache of a model in fp16"]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("problem", [ONE, DRAFTS])
def test_vllm_s_layer(vllm_backend: Any, problem: Problem) -> None:
    inputs = make_inputs(problem, 1)
    query = inputs.query.view(-1, problem.heads, 576)
    for given in (query, (query[..., :512], query[..., 512:])):
        out, lse = _vllm_layer(vllm_backend, inputs, given)
        assert lse is None
        assert rel_error(out, decode_reference(inputs).out.view(out.shape)) < 4e-3


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("q_dtype", ["bf16", "e4m3"])
def test_vllm_s_layer_over_eight_bits(vllm_backend: Any, q_dtype: str) -> None:
    """vLLM's cache is of bytes, and its scales are the layer's."""
    inputs = make_inputs(replace(ONE, q_dtype=q_dtype, kv_format="e4m3"), 1)
    scales = SimpleNamespace(_k_scale_float=0.5, _q_scale_float=0.25)
    raw = replace(inputs, kv_cache=inputs.kv_cache.view(torch.uint8))
    query = inputs.query.view(-1, ONE.heads, 576)
    out, _ = _vllm_layer(vllm_backend, raw, query, layer=scales, kv_cache_dtype="fp8")
    of_query = 0.25 if q_dtype == "e4m3" else 1.0
    scaled = replace(inputs, bmm1_scale=0.5 * of_query * float(inputs.bmm1_scale))
    assert out.dtype is torch.bfloat16
    limit = 6e-2 if q_dtype == "e4m3" else 4e-3  # weights of 8 bits in the first
    assert rel_error(out, 0.5 * decode_reference(scaled).out.view(out.shape)) < limit


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("problem", [ONE, DRAFTS])
def test_vllm_s_layer_on_two_ranks(vllm_backend: Any, problem: Problem) -> None:
    inputs = make_inputs(problem, 1, ["lse"])
    query = inputs.query.view(-1, problem.heads, 576)
    results = [
        _vllm_layer(vllm_backend, part, query, rank=rank, seq_lens_of_all=inputs.seq_lens)
        for rank, part in enumerate(shard(inputs, 2))
    ]
    out, lse = merge(*zip(*results, strict=True))
    expected = decode_reference(inputs)
    assert rel_error(out, expected.out.view(out.shape)) < 4e-3
    assert lse_error(lse, expected.lse.view(lse.shape)) < 1e-5


def _vllm_layer(
    backend: Any,
    inputs: DecodeInputs,
    query: Any,
    *,
    layer: Any = None,
    kv_cache_dtype: str = "auto",
    rank: int | None = None,
    seq_lens_of_all: torch.Tensor | None = None,
) -> Any:
    """The builder's decode part, then the layer's decode."""
    impl, builder = (object.__new__(c()) for c in (backend.get_impl_cls, backend.get_builder_cls))
    impl.scale, impl.kv_cache_dtype = float(inputs.bmm1_scale), kv_cache_dtype
    impl.dcp_world_size, impl.dcp_rank = (1, 0) if rank is None else (2, rank)
    impl.need_to_return_lse_for_decode = rank is not None
    step = step_of(inputs)
    made = builder._build_decode(
        block_table_tensor=step.block_table,
        seq_lens_device=step.seq_lens,
        max_seq_len=step.max_seq_len,
        query_start_loc_cpu=step.query_start_loc,
        query_start_loc_device=step.query_start_loc,
        num_decode_tokens=sum(inputs.problem.q_lens),
        max_query_len=step.max_query_len,
        dcp_tot_seq_lens_device=seq_lens_of_all,
    )
    metadata = SimpleNamespace(decode=made, max_seq_len=step.max_seq_len)
    return impl.forward_mqa(query, inputs.kv_cache, metadata, layer)
