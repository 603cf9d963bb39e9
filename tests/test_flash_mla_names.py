"""Code written for FlashMLA's decode names runs on ours by changing the import."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mla_lab.core.errors import InvalidInput, InvalidType, Unsupported
from mla_lab.core.problem import Problem
from mla_lab.flash_mla_names import flash_mla_with_kvcache, get_mla_metadata
from mla_lab.interop import flash_mla
from mla_lab.interop.flashinfer import first_use
from mla_lab.reference.inputs import DecodeInputs, make_inputs
from mla_lab.reference.mla import decode_reference
from mla_lab.reference.tolerance import error, lse_error

DENSE = Problem((2, 2), (70, 9), 4)
SPARSE = Problem((2, 2), (300, 70), 4, kv_format="fp8_656", top_k=40)


def arguments(inputs: DecodeInputs) -> dict[str, Any]:
    """The call of FlashMLA that means the same."""
    problem = inputs.problem
    named = {
        "q": inputs.query,
        "k_cache": inputs.kv_cache.unsqueeze(2),
        "block_table": None,
        "cache_seqlens": None,
        "head_dim_v": 512,
        "tile_scheduler_metadata": get_mla_metadata()[0],
        "softmax_scale": inputs.bmm1_scale,
    }
    if problem.top_k:
        eight = {"is_fp8_kvcache": True, "attn_sink": inputs.sinks}
        return {**named, **eight, "indices": inputs.block_tables}
    tables = {"block_table": inputs.block_tables, "cache_seqlens": inputs.seq_lens}
    return {**named, **tables, "causal": inputs.mask is None}


def compare(inputs: DecodeInputs, out: torch.Tensor, lse: torch.Tensor) -> None:
    expected = decode_reference(inputs)
    assert out.dtype == inputs.query.dtype
    assert error(out, expected.out.reshape(out.shape)).relative < 0.008
    rows = expected.lse.view(inputs.query.shape[:-1]).transpose(1, 2)
    empty = rows == -torch.inf
    assert torch.equal(lse == torch.inf, empty)
    assert lse_error(lse[~empty], rows[~empty]) < 1e-3


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_dense_calls(dtype: str) -> None:
    problem = Problem((2, 2), (70, 9), 4, q_dtype=dtype, kv_format=dtype, out_dtype=dtype)
    inputs = make_inputs(problem, 1, ["lse"])
    compare(inputs, *flash_mla_with_kvcache(**arguments(inputs)))


def test_a_workspace_that_a_capture_made_is_zeroed_outside_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # what the capture recorded has not run
    named = arguments(make_inputs(Problem((1,), (70,), 4), 1, ["lse"]))
    with monkeypatch.context() as patch:
        patch.setattr(first_use, "is_captured", lambda device: True)
        flash_mla_with_kvcache(**named)
    buffer = named["tile_scheduler_metadata"].workspace
    for value in (0, 7):  # zeroed once
        buffer.fill_(7)
        flash_mla_with_kvcache(**named)
        assert bool((buffer[: first_use.ZEROED_BYTES] == value).all())


@pytest.mark.parametrize("problem", [SPARSE, DENSE])
def test_what_all_calls_share_is_made_once_and_not_in_a_capture(
    problem: Problem, monkeypatch: pytest.MonkeyPatch
) -> None:
    named = arguments(make_inputs(problem, 1, ["lse"]))
    if not problem.top_k:
        named["causal"] = False
    metadata = named["tile_scheduler_metadata"]
    with monkeypatch.context() as patch:
        patch.setattr(flash_mla, "is_captured", lambda device: True)
        first = flash_mla_with_kvcache(**named)
    assert not metadata.kept
    for _ in range(2):
        for got, expected in zip(flash_mla_with_kvcache(**named), first, strict=True):
            assert torch.equal(got, expected)
    (kept,) = metadata.kept.values()
    assert not kept.is_inference()
    flash_mla_with_kvcache(**named)
    assert [id(value) for value in metadata.kept.values()] == [id(kept)]


def test_a_nan_stays_in_lse() -> None:
    inputs = make_inputs(Problem((1, 1), (70, 9), 4), 1, ["lse"])
    inputs.kv_cache[int(inputs.block_tables[0, 0]), 3, 5] = torch.nan
    _, lse = flash_mla_with_kvcache(**arguments(inputs))
    assert bool(lse[0].isnan().all()) and bool(lse[1].isfinite().all())


def test_without_keys_lse_is_plus_infinity() -> None:
    inputs = make_inputs(Problem((1, 1), (70, 0), 4), 1, ["lse"])
    out, lse = flash_mla_with_kvcache(**arguments(inputs))
    assert lse.shape == (2, 4, 1)
    assert bool((lse[1] == torch.inf).all()) and not out[1].any()
    compare(inputs, out, lse)


def test_not_causal_means_that_drafts_see_each_other() -> None:
    inputs = make_inputs(DENSE, 1, ["lse"])
    named = arguments(inputs)
    one, _ = flash_mla_with_kvcache(**named | {"causal": False})
    rows = [
        flash_mla_with_kvcache(
            **named
            | {"q": inputs.query[:, i : i + 1], "tile_scheduler_metadata": get_mla_metadata()[0]}
        )[0]
        for i in range(2)
    ]
    assert torch.allclose(one.float(), torch.cat(rows, 1).float(), atol=4e-3)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.float8_e4m3fn])
def test_sparse_calls_of_any_byte_type(dtype: torch.dtype) -> None:
    inputs = make_inputs(SPARSE, 1, ["lse", "sinks"])
    named = arguments(inputs)
    named["k_cache"] = named["k_cache"].view(dtype)
    compare(inputs, *flash_mla_with_kvcache(**named))


def test_topk_length_ends_the_slots_of_a_request() -> None:
    inputs = make_inputs(SPARSE, 1, ["lse"])
    named = arguments(inputs)
    lengths = torch.tensor([7, 0], dtype=torch.int32)
    out, lse = flash_mla_with_kvcache(**named, topk_length=lengths)
    slots = named["indices"].clone()
    slots[0, :, 7:], slots[1] = -1, -1
    again, of_slots = flash_mla_with_kvcache(**named | {"indices": slots})
    assert torch.equal(out, again) and torch.equal(lse, of_slots)
    assert bool((lse[1] == torch.inf).all())
    assert not torch.equal(out, flash_mla_with_kvcache(**named)[0])


def test_a_query_whose_rows_lie_apart() -> None:
    inputs = make_inputs(SPARSE, 1)
    named = arguments(inputs)
    apart = torch.cat([inputs.query, inputs.query], -1)[..., :576]
    assert not apart.is_contiguous()
    out, _ = flash_mla_with_kvcache(**named | {"q": apart})
    assert torch.equal(out, flash_mla_with_kvcache(**named)[0])


def test_metadata_belongs_to_one_shape() -> None:
    named = arguments(make_inputs(DENSE, 1))
    flash_mla_with_kvcache(**named)
    flash_mla_with_kvcache(**named)
    other = {"q": named["q"][:, :1].contiguous()}
    words = (
        r"tile_scheduler_metadata: got a call with batch \d+, .*; supported: calls with batch \d+, "
    )
    with pytest.raises(InvalidInput, match=words):
        flash_mla_with_kvcache(**named | other)
    with pytest.raises(InvalidInput, match="what get_mla_metadata returns"):
        flash_mla_with_kvcache(**named | {"tile_scheduler_metadata": None})


def test_metadata_keeps_nothing_of_a_refused_call() -> None:
    inputs = make_inputs(DENSE, 1, ["lse"])
    named = arguments(inputs)
    with pytest.raises(InvalidType, match=r"seq_?lens"):
        flash_mla_with_kvcache(**named | {"q": inputs.query[:, :1], "cache_seqlens": 3})
    compare(inputs, *flash_mla_with_kvcache(**named))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"extra_k_cache": torch.empty(0)}, "extra_k_cache"),
        ({"extra_indices_in_kvcache": torch.empty(0)}, "extra_indices_in_kvcache"),
        ({"extra_topk_length": torch.empty(0)}, "extra_topk_length"),
        ({"num_splits": torch.empty(0)}, "num_splits"),
        ({"head_dim_v": 256}, "head_dim_v"),
        ({"causal": True}, "exactly its slots"),
        ({"is_fp8_kvcache": False}, "is_fp8_kvcache"),
        ({"k_cache": torch.empty(2, 64, 1, 584, dtype=torch.uint8)}, "584 x torch.uint8"),
        ({"k_cache": torch.empty(2, 64, 2, 656, dtype=torch.uint8)}, "2 KV heads"),
    ],
)
def test_what_is_lacking_is_refused_by_name(changes: dict[str, Any], words: str) -> None:
    named = arguments(make_inputs(SPARSE, 1))
    with pytest.raises(Unsupported, match=words):
        flash_mla_with_kvcache(**named | changes)


def test_a_dense_call_has_no_sink() -> None:
    named = arguments(make_inputs(DENSE, 1))
    with pytest.raises(Unsupported, match="attn_sink"):
        flash_mla_with_kvcache(**named, attn_sink=torch.zeros(4))
    with pytest.raises(InvalidInput, match="block_table"):
        flash_mla_with_kvcache(**named | {"block_table": None})


def test_wrong_shapes_are_told() -> None:
    named = arguments(make_inputs(SPARSE, 1))
    with pytest.raises(InvalidInput, match="indices"):
        flash_mla_with_kvcache(**named | {"indices": named["indices"][:1]})
    with pytest.raises(InvalidInput, match="topk_length"):
        flash_mla_with_kvcache(**named, topk_length=torch.zeros(3, dtype=torch.int32))
    with pytest.raises(InvalidInput, match="4"):
        flash_mla_with_kvcache(**named | {"q": named["q"][0]})
    dense = arguments(make_inputs(DENSE, 1))
    for cache in (dense["k_cache"][..., :512], dense["k_cache"][:0]):
        with pytest.raises(InvalidInput) as caught:
            flash_mla_with_kvcache(**dense | {"k_cache": cache})
        shapes = f"shape {list(cache.shape)}; supported: [pages, page_size, 1, 576]"
        assert f"k_cache: got {shapes}" in str(caught.value)
    for wrong in ({"indices": named["indices"].tolist()}, {"topk_length": [7, 0]}):
        with pytest.raises(InvalidType, match=f"{next(iter(wrong))}: got list"):
            flash_mla_with_kvcache(**named | wrong)


@pytest.mark.parametrize(
    ("problem", "changes", "error", "says"),
    [
        (DENSE, {"causal": "False"}, InvalidType, "causal: got str"),
        (DENSE, {"causal": None}, InvalidType, "causal: got NoneType"),
        (SPARSE, {"is_fp8_kvcache": 1}, InvalidType, "is_fp8_kvcache: got int"),
        (DENSE, {"head_dim_v": 512.0}, InvalidType, "head_dim_v: got float"),
        (DENSE, {"q": torch.zeros(2, 2, 4, 576).to_sparse()}, Unsupported, "q: got .*sparse_coo"),
        (SPARSE, {"indices": torch.zeros(2, 2, 0).int()}, InvalidInput, "indices: got .* one slot"),
    ],
)
def test_values_of_other_kinds_are_told(
    problem: Problem, changes: dict[str, Any], error: Any, says: str
) -> None:
    named = arguments(make_inputs(problem, 1))
    with pytest.raises(error, match=says):
        flash_mla_with_kvcache(**named | changes)


def test_a_wrong_call_is_refused_before_its_query_is_copied() -> None:
    """The copy would take 158 TB, so that a call that made it could not refuse."""
    named = arguments(make_inputs(DENSE, 1)) | {"causal": True}
    query = named["q"][:, :1, :1].expand(-1, 1 << 20, 1 << 16, -1)
    with pytest.raises(InvalidType, match="block_table: got"):
        flash_mla_with_kvcache(**named | {"q": query, "block_table": named["block_table"].long()})


def test_metadata_made_in_inference_mode_serves_outside_of_it() -> None:
    named = arguments(make_inputs(DENSE, 1, ["lse"]))
    with torch.inference_mode():
        buffer = torch.full((64 << 20,), 7, dtype=torch.uint8)
        expected = flash_mla_with_kvcache(**named)[0].clone()
    named["tile_scheduler_metadata"].workspace = buffer
    assert torch.equal(flash_mla_with_kvcache(**named)[0], expected)
    assert not buffer[: first_use.ZEROED_BYTES].any()
