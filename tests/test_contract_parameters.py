"""What each parameter of the contract's calls does; what it refuses is in test_contract_errors."""

from __future__ import annotations

import inspect
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from mla_lab.api import contract
from mla_lab.api.contract import (
    trtllm_batch_decode_with_kv_cache_mla,
    xqa_batch_decode_with_kv_cache_mla,
)
from mla_lab.core.problem import Problem
from mla_lab.plan import make_plan
from mla_lab.reference.inputs import DecodeInputs, make_inputs
from mla_lab.reference.mla import decode_reference
from mla_lab.reference.tolerance import error, lse_error

#: position, name and default, as FlashInfer 0.7.4 and its pull requests list them
LIST = [
    ("query", inspect.Parameter.empty),
    ("kv_cache", inspect.Parameter.empty),
    ("workspace_buffer", inspect.Parameter.empty),
    ("qk_nope_head_dim", inspect.Parameter.empty),
    ("kv_lora_rank", inspect.Parameter.empty),
    ("qk_rope_head_dim", inspect.Parameter.empty),
    ("block_tables", inspect.Parameter.empty),
    ("seq_lens", inspect.Parameter.empty),
    ("max_seq_len", inspect.Parameter.empty),
    ("sparse_mla_top_k", 0),
    ("out", None),
    ("bmm1_scale", 1.0),
    ("bmm2_scale", 1.0),
    ("sinks", None),
    ("skip_softmax_threshold_scale_factor", None),
    ("enable_pdl", None),
    ("backend", "auto"),
    ("is_var_seq", True),
    ("uses_shared_paged_kv_idx", True),
    ("lse", None),
    ("return_lse", False),
    ("cute_dsl_impl", "auto"),
    ("kv_scale_format", "auto"),
    ("cum_seq_lens_q", None),
    ("max_q_len", None),
    ("multi_ctas_kv_counter_buffer", None),
    ("sparse_mla_top_k_lens", None),
    ("enable_dcp", False),
    ("cp_world", 1),
    ("cp_rank", 0),
    ("causal_seqlens_kv_global", None),
    ("use_fp16_softmax", None),
    ("return_lse_base", None),
]
OURS = [("mask", None), ("batch_invariant", False), ("plan", None)]
XQA = [*LIST[:9], *LIST[10:14], LIST[15]]


def parameters(function, kind) -> list[tuple[str, object]]:
    listed = inspect.signature(function).parameters.values()
    return [(p.name, p.default) for p in listed if p.kind is kind]


def test_order_and_defaults():
    positional = inspect.Parameter.POSITIONAL_OR_KEYWORD
    assert parameters(trtllm_batch_decode_with_kv_cache_mla, positional) == LIST
    assert parameters(xqa_batch_decode_with_kv_cache_mla, positional) == XQA
    keyword = inspect.Parameter.KEYWORD_ONLY
    assert parameters(trtllm_batch_decode_with_kv_cache_mla, keyword) == OURS
    assert parameters(xqa_batch_decode_with_kv_cache_mla, keyword) == []


def test_every_parameter_is_documented():
    text = trtllm_batch_decode_with_kv_cache_mla.__doc__ or ""
    assert [name for name, _ in [*LIST, *OURS] if name not in text] == []
    assert not inspect.isclass(contract)


def inputs_of(q_lens=(2, 2), kv_lens=(100, 7), heads=4, features=(), **fields) -> DecodeInputs:
    formats = {"q_dtype": "fp32", "kv_format": "fp32"} | fields
    return make_inputs(Problem(q_lens, kv_lens, heads, **formats), 1, features)


def run(inputs: DecodeInputs, **more):
    return trtllm_batch_decode_with_kv_cache_mla(**inputs.contract_args() | more)


def right(inputs: DecodeInputs, result: torch.Tensor) -> bool:
    return error(result, decode_reference(inputs).out).greatest < 2e-6


@pytest.mark.parametrize(
    ("q_dtype", "kv_format", "out_dtype"),
    [
        ("bf16", "bf16", torch.bfloat16),
        ("fp16", "fp16", torch.bfloat16),
        ("e4m3", "e4m3", torch.bfloat16),
        ("bf16", "e4m3", torch.bfloat16),
        ("bf16", "fp8_656", torch.bfloat16),
        ("fp32", "fp32", torch.float32),
        ("fp64", "fp64", torch.float64),
    ],
)
def test_query_and_cache_formats(q_dtype, kv_format, out_dtype):
    inputs = inputs_of(q_dtype=q_dtype, kv_format=kv_format)
    result = run(inputs)
    assert result.dtype is out_dtype
    assert result.shape == (2, 2, 4, 512)
    assert error(result, decode_reference(inputs).out).relative < 4e-3


def test_ragged_queries():
    inputs = inputs_of(q_lens=(3, 0, 1), kv_lens=(100, 9, 2))
    result = run(inputs)
    assert result.shape == (4, 4, 512)
    assert right(inputs, result)


def test_cache_of_four_dimensions_and_apart():
    plain, other = (
        run(inputs_of(), return_lse=True),
        run(inputs_of(features=["cache_4d", "page_gap"]), return_lse=True),
    )
    assert all(map(torch.equal, plain, other))


def test_workspace_serves_any_sequence_of_shapes():
    workspace = torch.zeros(16 << 20, dtype=torch.uint8)
    for q_lens, kv_lens, heads in (((1,), (900,), 8), ((2, 2), (500, 30), 3), ((1,), (900,), 8)):
        inputs = inputs_of(q_lens, kv_lens, heads)
        plan = make_plan(inputs.problem, policy="fixed", num_splits=3)
        assert plan.num_slots > 0
        assert right(inputs, run(inputs, workspace_buffer=workspace, plan=plan))
    # merge counters are left as they were found
    assert not workspace[: 4 * 16384].any()


def test_signed_bytes_are_a_workspace_too():
    inputs = inputs_of()
    assert right(inputs, run(inputs, workspace_buffer=inputs.workspace_buffer.view(torch.int8)))


@pytest.mark.parametrize("nope", [0, 64, 128, 192])
def test_qk_nope_head_dim_may_be_any(nope):
    assert torch.equal(run(inputs_of(), qk_nope_head_dim=nope), run(inputs_of()))


def test_the_small_latent():
    inputs = inputs_of(latent_dim=256)
    result = run(inputs)
    assert result.shape == (2, 2, 4, 256)
    assert right(inputs, result)


def test_block_tables_may_be_a_slice_of_wider_ones():
    inputs = inputs_of()
    wide = torch.full((2, 50), -9, dtype=torch.int32)
    wide[:, : inputs.block_tables.shape[1]] = inputs.block_tables
    table = wide[:, : inputs.block_tables.shape[1]]
    assert not table.is_contiguous()
    assert torch.equal(run(inputs, block_tables=table), run(inputs))


def test_values_in_pages_of_their_own():
    inputs = inputs_of(features=["separate_tables"])
    assert right(inputs, run(inputs))
    swapped = inputs.block_tables.flip(1)
    poison = run(replace(inputs, block_tables=swapped))
    assert poison.isnan().any()  # keys read from value pages, whose rope columns hold NaN


def test_sparse_slots_skip_minus_one_and_count_duplicates():
    inputs = inputs_of(top_k=12)
    assert right(inputs, run(inputs))
    slots = inputs.block_tables.clone()
    slots[0, 0] = slots[0, 0, slots[0, 0] >= 0][0]
    same = run(replace(inputs, block_tables=slots), return_lse=True)
    slots[0, 0, 1:] = -1
    once = run(replace(inputs, block_tables=slots), return_lse=True)
    assert torch.allclose(same[0][0, 0], once[0][0, 0], atol=1e-6)
    assert torch.allclose(same[1][0], once[1][0] + math.log(12), atol=1e-5)


def test_seq_lens_may_be_zero_or_less_than_the_query():
    inputs = inputs_of(q_lens=(3, 3, 3), kv_lens=(0, 1, 40))
    out, lse = run(inputs, return_lse=True)
    assert right(inputs, out)
    lse = lse.view(3, 3, 4)
    assert not out[0].any()
    assert lse[0].isneginf().all()
    assert not out[1, :2].any()
    assert lse[1, :2].isneginf().all()
    assert lse[1, 2].isfinite().all()


@pytest.mark.parametrize("max_seq_len", [100, 5000, 3, np.int64(100)])
def test_max_seq_len_is_a_bound_for_scheduling(max_seq_len):
    assert torch.equal(run(inputs_of(), max_seq_len=max_seq_len), run(inputs_of()))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn])
def test_out_is_written_in_place_and_nowhere_else(dtype):
    inputs = inputs_of(q_dtype="e4m3", kv_format="e4m3")
    guarded = torch.full((4, 2, 4, 512), 3.0).to(dtype)
    result = run(inputs, out=guarded[1:3])
    assert result.data_ptr() == guarded[1].data_ptr()
    assert (guarded[[0, 3]].float() == 3).all()
    assert error(result, decode_reference(inputs).out).relative < 0.05


def test_scales():
    inputs = replace(inputs_of(), bmm1_scale=0.3, bmm2_scale=-2.5)
    result = run(inputs)
    assert error(result, decode_reference(inputs).out).relative < 1e-5
    assert torch.allclose(result, -2.5 * run(inputs, bmm2_scale=1), atol=1e-5)
    for shape in ((), (1,)):
        scales = (torch.full(shape, 0.3), torch.full(shape, -2.5))
        assert torch.allclose(run(inputs, bmm1_scale=scales[0], bmm2_scale=scales[1]), result)


def test_sinks_as_a_tensor_or_a_list_of_one():
    inputs = inputs_of(features=["sinks"])
    out, lse = run(inputs, return_lse=True)
    assert right(inputs, out)
    assert torch.equal(run(inputs, sinks=[inputs.sinks]), out)
    without, lse_without = run(inputs, sinks=None, return_lse=True)
    assert torch.equal(lse, lse_without)
    assert not torch.equal(out, without)
    assert torch.equal(run(inputs, sinks=torch.full((4,), -math.inf)), without)


def test_skip_softmax_changes_what_it_may():
    inputs = make_inputs(Problem((1,), (3000,), 4), 1, distribution="heavy_tailed")
    plan = make_plan(inputs.problem, policy="none")
    exact, skipped = (
        run(inputs, plan=plan, return_lse=True, skip_softmax_threshold_scale_factor=factor)[1]
        for factor in (None, 1000.0)
    )
    assert (skipped <= exact + 1e-5).all()
    assert not torch.equal(skipped, exact)


@pytest.mark.parametrize("enable_pdl", [None, False])
def test_pdl_may_be_left_to_the_device(enable_pdl):
    assert torch.equal(run(inputs_of(), enable_pdl=enable_pdl), run(inputs_of()))


@pytest.mark.parametrize("backend", ["auto", "torch", "trtllm-gen"])
def test_backends_of_a_cpu(backend):
    assert torch.equal(run(inputs_of(), backend=backend), run(inputs_of()))


@pytest.mark.parametrize("kv_lens", [(100, 100), (100, 7)])
def test_is_var_seq_is_a_hint(kv_lens):
    inputs = inputs_of(kv_lens=kv_lens)
    assert torch.equal(run(inputs, is_var_seq=False), run(inputs))


def test_lse_shapes_bases_and_buffers():
    inputs = inputs_of(features=["sinks"])
    reference = decode_reference(inputs).lse
    out, lse = run(inputs, return_lse=True)
    assert lse.shape == (4, 4)
    assert lse.dtype is torch.float32
    assert lse_error(lse, reference) < 1e-5
    for shape in ((4, 4), (2, 2, 4)):
        given = torch.empty(shape)
        assert run(inputs, return_lse=True, lse=given)[1] is given
        assert torch.equal(given.view(4, 4), lse)
        unreturned = torch.empty(shape)
        assert torch.equal(run(inputs, lse=unreturned), out)
        assert torch.equal(unreturned, given)
    assert torch.equal(run(inputs, return_lse=True, return_lse_base="basee")[1], lse)
    base2 = run(inputs, return_lse=True, return_lse_base="base2")[1]
    assert torch.allclose(base2, lse / math.log(2))


@pytest.mark.parametrize("max_q_len", [3, 50, 1])
def test_max_q_len_is_a_bound_for_scheduling(max_q_len):
    """An under-estimate writes nothing out of bounds; on a CPU it does not even matter."""
    inputs = inputs_of(q_lens=(3, 1), kv_lens=(40, 7))
    guarded = torch.full((6, 4, 512), 3.0)
    result = run(inputs, max_q_len=max_q_len, out=guarded[1:5])
    assert right(inputs, result)
    assert (guarded[[0, 5]] == 3).all()


def test_mask_is_the_causal_rule_or_a_tree():
    causal = run(inputs_of(q_lens=(5, 5), kv_lens=(90, 5)))
    chain = inputs_of(q_lens=(5, 5), kv_lens=(90, 5), features=["chain_mask"])
    assert torch.equal(run(chain), causal)
    tree = inputs_of(q_lens=(5, 5), kv_lens=(90, 5), features=["tree_mask"])
    assert right(tree, run(tree))
    wide = inputs_of(q_lens=(40, 3), kv_lens=(90, 5), features=["tree_mask", "max_q_len"])
    assert right(wide, run(wide))


def test_plan_is_followed():
    inputs = inputs_of(q_lens=(1,), kv_lens=(900,), heads=8)
    whole = make_plan(inputs.problem, policy="none")
    parts = make_plan(inputs.problem, policy="fixed", num_splits=7)
    first, second = run(inputs, plan=whole), run(inputs, plan=parts)
    assert right(inputs, first)
    assert right(inputs, second)
    assert not torch.equal(first, second)


def test_batch_invariant_takes_an_invariant_plan():
    inputs = inputs_of(q_lens=(1,), kv_lens=(3000,))
    plan = make_plan(inputs.problem, policy="fixed_size")
    assert right(inputs, run(inputs, plan=plan, batch_invariant=True))


@pytest.mark.parametrize("use_fp16_softmax", [None, False])
def test_the_softmax_is_fp32(use_fp16_softmax):
    assert torch.equal(run(inputs_of(), use_fp16_softmax=use_fp16_softmax), run(inputs_of()))


@pytest.mark.parametrize(
    ("q_lens", "heads", "features"),
    [((1, 1), 128, []), ((3, 3), 5, ["sinks", "device_scales"])],
)
def test_xqa_takes_more_than_xqa_did(q_lens, heads, features):
    inputs = inputs_of(q_lens, heads=heads, features=features, q_dtype="bf16", kv_format="bf16")
    arguments = inputs.contract_args()
    out = torch.empty(*inputs.query.shape[:-1], 512, dtype=torch.float16)
    result = xqa_batch_decode_with_kv_cache_mla(**arguments, out=out, enable_pdl=False)
    assert result is out
    assert torch.equal(result, run(inputs, out=torch.empty_like(out)))


class TestSideEffects:
    KINDS = pytest.mark.parametrize(
        ("fields", "features"),
        [
            ({}, ["sinks", "tree_mask", "device_scales", "page_gap"]),
            ({"q_lens": (3, 1)}, ["separate_tables", "max_q_len"]),
            ({"top_k": 9}, ["sinks"]),
            ({"q_dtype": "bf16", "kv_format": "fp8_656"}, []),
            ({"q_dtype": "e4m3", "kv_format": "e4m3"}, ["ragged"]),
        ],
    )

    @KINDS
    def test_nothing_is_written_but_out_lse_and_workspace(self, fields, features):
        inputs = inputs_of(features=features, **fields)
        arguments = inputs.contract_args()
        kept = {n: v for n, v in arguments.items() if isinstance(v, torch.Tensor)}
        del kept["workspace_buffer"]
        before = {name: raw_bytes(value) for name, value in kept.items()}
        versions = {name: value._version for name, value in kept.items()}
        run(inputs, return_lse=True)
        assert {name: raw_bytes(value) for name, value in kept.items()} == before
        assert {name: value._version for name, value in kept.items()} == versions

    def test_the_cache_is_never_copied(self):
        """A cache of 200 MB, of which one page is used, costs no more than that page."""
        from .torch_backend_cost import profiled_peak

        inputs = inputs_of(q_lens=(1,), kv_lens=(20,))
        cache = torch.zeros(1400, 64, 576)
        table = torch.tensor([[1399]], dtype=torch.int32)
        peak = profiled_peak(lambda: run(inputs, kv_cache=cache, block_tables=table))
        assert peak < 16 << 20


def raw_bytes(value: torch.Tensor) -> bytes:
    """All the storage, gaps between pages included."""
    everything = torch.empty(0, dtype=torch.uint8).set_(value.untyped_storage())
    return everything.numpy().tobytes()
