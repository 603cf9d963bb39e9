"""The mask that stands for context parallel, against the positions that define it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from mla_lab.api.context_parallel import shard
from mla_lab.backends import rank_mask
from mla_lab.backends.rank_mask import RankMask, masked, repeated, with_mask
from mla_lab.call.bind import Call, bind
from mla_lab.call.checks import form_of
from mla_lab.call.decode_args import DecodeArgs, native_args
from mla_lab.call.form import Features
from mla_lab.core import masks
from mla_lab.core.errors import InvalidInput
from mla_lab.core.problem import Problem
from mla_lab.reference.inputs import DecodeInputs, make_inputs
from mla_lab.reference.mla import decode_reference


def without_rank(rank: DecodeInputs, args: DecodeArgs) -> DecodeInputs:
    """The call of `rank` with the lengths and the mask of `args` in place of its rank."""
    return replace(
        rank,
        seq_lens=args.seq_lens,
        mask=args.mask,
        enable_dcp=False,
        cp_world=1,
        cp_rank=0,
        causal_seqlens_kv_global=None,
    )


def bound_of(inputs: DecodeInputs) -> Call:
    args = native_args(**inputs.contract_args())
    return bind(args, form_of(args), reads_lengths=True, debug=False)


def expected(inputs: DecodeInputs) -> list[torch.Tensor]:
    """Of each request: bool [q_len, q_len], what a row sees of its last local tokens."""
    found, first = [], 0
    problem, of_all = inputs.problem, inputs.causal_seqlens_kv_global.tolist()
    for q_len, held, length in zip(problem.q_lens, problem.kv_lens, of_all, strict=True):
        seen = torch.zeros(q_len, q_len, dtype=torch.bool)
        mask = None if inputs.mask is None else inputs.mask.view(-1, inputs.mask.shape[-1])
        for row in range(q_len):
            drafts = None if mask is None else masks.unpack(mask[first + row], q_len)
            for column in range(q_len):
                position = (held - q_len + column) * inputs.cp_world + inputs.cp_rank
                draft = position - (length - q_len)
                seen[row, column] = draft <= row if draft < 0 or drafts is None else drafts[draft]
        found.append(seen)
        first += q_len
    return found


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 40), st.integers(0, 90)), min_size=1, max_size=5),
    st.integers(2, 4),
    st.sampled_from([[], ["tree_mask"], ["max_q_len"], ["tree_mask", "max_q_len"]]),
)
def test_it_says_what_positions_say(pairs, world, features):
    q_lens = tuple(q for q, _ in pairs)
    if not any(q_lens):
        return
    kv_lens = tuple(q + n for q, n in pairs)
    whole = make_inputs(Problem(q_lens, kv_lens, 2), 1, features, workspace_bytes=0)
    for rank in shard(whole, world):
        call = bound_of(rank)
        if not call.features.context_parallel:
            assert max(q_lens) == 1 and rank.mask is None
            continue
        made = RankMask.of(call)(call.args)
        assert torch.equal(made.seq_lens, call.args.seq_lens)
        words = made.mask
        rows = words.view(-1, words.shape[-1]).split(q_lens)
        for own, seen in zip(rows, expected(rank), strict=True):
            columns = masks.unpack(own, words.shape[-1] * 16)
            assert torch.equal(columns[:, : seen.shape[1]], seen)
            assert not columns[:, seen.shape[1] :].any(), "padding bits"


class OnDevice(TorchDispatchMode):
    """Refuses what would copy a value to the host."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert "_local_scalar_dense" not in str(func), func
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("features", [[], ["tree_mask"], ["max_q_len", "tree_mask"]])
def test_it_is_made_without_reading_a_value(features: list[str]) -> None:
    whole = make_inputs(Problem((3, 3), (70, 9), 2), 1, features, workspace_bytes=0)
    call = bound_of(shard(whole, 2)[1])
    with OnDevice():
        made = RankMask.of(call)(call.args)
    assert made.mask.dtype is torch.uint16 and made.seq_lens.dtype is torch.int32


@pytest.mark.parametrize("of_all", [(1, 40), (0, 9), (69, 2)])
def test_tokens_behind_the_end_of_a_request_are_seen_by_no_row(of_all: tuple[int, int]) -> None:
    """A rank may hold more than the request has: the masked call is that of the positions."""
    whole = make_inputs(Problem((3, 3), (70, 41), 2), 1, workspace_bytes=0)
    shorter = torch.tensor(of_all, dtype=torch.int32)
    for rank in shard(whole, 2):
        rank = replace(rank, causal_seqlens_kv_global=shorter)
        right, lse = decode_reference(rank)
        got = without_rank(rank, with_mask(bound_of(rank)).args)
        found, found_lse = decode_reference(got)
        assert torch.equal(found, right) and torch.equal(found_lse, lse)


def test_a_length_near_2_31_hides_no_key() -> None:
    """All tokens that a rank says it holds lie before the end, whichever rank it is: the kernel
    gets that length, and gives NaN where it is beyond the block table."""
    whole = make_inputs(Problem((1, 1, 1), (70, 41, 9), 2), 1, workspace_bytes=0)
    for rank in shard(whole, 2):
        held = torch.tensor([35, 2**30 - 1, 2**31 - 1], dtype=torch.int32)
        args = replace(
            native_args(**rank.contract_args()),
            seq_lens=held,
            causal_seqlens_kv_global=torch.tensor([2**31 - 1] * 3, dtype=torch.int32),
        )
        found = RankMask(1, 3, 1).by_torch(args).seq_lens.tolist()
        assert found == [35, 2**30 - 1, 2**30 - rank.cp_rank]


@pytest.mark.parametrize("bound", [1, 2])
@pytest.mark.parametrize("lengths", [(1, 3), (3, 40)])
def test_a_bound_of_query_tokens_that_is_too_small_hides_no_key(
    lengths: tuple[int, int], bound: int
) -> None:
    whole = make_inputs(Problem(lengths, (90, 141), 2), 1, ["ragged"], workspace_bytes=0)
    for rank in shard(whole, 2):
        right, lse = decode_reference(rank)
        call = bound_of(replace(rank, max_q_len=bound))
        assert call.features.context_parallel
        found, found_lse = decode_reference(without_rank(rank, with_mask(call).args))
        assert torch.equal(found, right) and torch.equal(found_lse, lse)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("tree", [True, False])
def test_rows_of_requests_longer_than_a_mask_is_wide_are_nan(
    tree: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a mask of the caller's, and of one that would have too many columns with a column for each
    query token of the call."""
    monkeypatch.setattr(rank_mask, "MOST_TOKENS", 8)
    features = ["tree_mask" if tree else "ragged"]
    whole = make_inputs(Problem((2, 0, 5, 3), (9,) * 4, 2), 1, features, workspace_bytes=0)
    rank = replace(shard(whole, 2)[1], max_q_len=4)
    call = bind(rank, replace(form_of(rank), on_host=False), reads_lengths=False, debug=False)
    out, lse = torch.zeros(10, 2, 512).to(dtype), torch.zeros(10, 2)
    with OnDevice():
        repeated(call, lambda *given: None)(rank, out, lse)
    hidden = torch.tensor([token in range(2, 7) for token in range(10)])
    assert torch.equal(out.float().isnan(), hidden.view(-1, 1, 1).expand(out.shape))
    assert torch.equal(lse.isnan(), hidden.view(-1, 1).expand(lse.shape))


def test_one_query_token_has_no_mask_and_lengths_that_agree() -> None:
    """No kernel reads lengths of all then: tokens behind the end, which positions would hide, are
    refused wherever lengths are read.
    """
    whole = make_inputs(Problem((1, 1), (70, 9), 2), 1, workspace_bytes=0)
    for rank in shard(whole, 2):
        assert not bound_of(rank).features.context_parallel
        for of_all in ((5, 5), (72, 9), (-1, 9)):
            wrong = replace(rank, causal_seqlens_kv_global=torch.tensor(of_all, dtype=torch.int32))
            with pytest.raises(InvalidInput, match="causal_seqlens_kv_global: got"):
                bound_of(wrong)
            on_gpu = replace(form_of(wrong), on_host=False)
            bind(wrong, on_gpu, reads_lengths=False, debug=False)
            with pytest.raises(InvalidInput, match="causal_seqlens_kv_global: got"):
                bind(wrong, on_gpu, reads_lengths=False, debug=True)


def test_a_call_with_its_mask_has_no_rank() -> None:
    call = bound_of(shard(make_inputs(Problem((3, 3), (70, 9), 2), 1, workspace_bytes=0), 2)[1])
    assert call.features.context_parallel and call.features.causal
    plain = with_mask(call)
    assert (
        plain.features
        == masked(call.features)
        == replace(call.features, context_parallel=False, causal=False, mask=True)
    )
    assert plain.args.cp_world == 1 and plain.args.causal_seqlens_kv_global is None
    assert masked(Features(sinks=True)) == Features(sinks=True)
