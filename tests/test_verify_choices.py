"""Choices of the pairwise proof that came after its first seventeen: their inputs, what excludes
them, that they pass on a CPU, and that a call which ignores one is found.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from mla_lab import cli
from mla_lab.api import contract
from mla_lab.core.revision import Revision
from mla_lab.reference.inputs import WILD_PAGE_IDS, zero_bytes
from mla_lab.verify import cases, check, tables
from mla_lab.verify.record import read, write

from .test_verify import CASES, CHEAP, PLAIN, pairwise_rows, work

#: choices that came after the first seventeen
NEWER = ("slots", "query", "bytes", "bound", "sign", "ranks")


def cheapest_newer() -> list[int]:
    """Of each level of the newer choices but the first, the cheapest cases beyond `CHEAP`."""
    order = sorted(set(range(len(CASES))) - set(CHEAP), key=lambda index: work(CASES[index]))
    found = []
    for name in NEWER:
        for level in cases.FACTORS[name][1:]:
            found += [index for index in order if CASES[index][name] == level][:3]
    return sorted(set(found))


@pytest.fixture(scope="module")
def workspace():
    """One buffer, zeroed once, for all cases."""
    return zero_bytes(64 << 20)


# --- what there is ------------------------------------------------------------------------------


def test_every_level_of_the_newer_choices_occurs_in_both_lists():
    """But for queries with gaps, which no CuTe kernel takes."""
    by_kernels = [case for case in CASES if cases.has_kernel(case)]
    for name in NEWER:
        assert {case[name] for case in CASES} == set(cases.FACTORS[name])
        found = {case[name] for case in by_kernels}
        assert found == ({"whole"} if name == "query" else set(cases.FACTORS[name]))
    negative = {case["scales"] for case in by_kernels if case["sign"] == "negative"}
    assert negative == {"device"}, "a number of 0 or less is no call for these kernels"


@pytest.mark.parametrize(
    ("levels", "has"),
    [
        ({"slots": "of tokens"}, False),
        ({"slots": "of tokens", "sparse": "top 5"}, True),
        ({"bytes": "int8"}, False),
        ({"bytes": "int8", "format": "bf16 on 656"}, True),
        ({"ranks": "2"}, False),
        ({"ranks": "2", "lse": "natural"}, True),
        ({"ranks": "2", "lse": "natural", "sinks": "sinks"}, False),
        ({"ranks": "2", "lse": "natural", "sparse": "top 5"}, False),
        ({"ranks": "2", "lse": "natural", "mask": "tree", "q_len": "3"}, True),
        ({"query": "apart", "sparse": "top 5", "plan": "own"}, True),
    ],
)
def test_the_contract_has_just_these(levels, has, workspace):
    """`allowed` excludes what a call refuses or what no call says, and nothing else."""
    case = {**cases.whole({}), "lengths": "early", "heads": "7", **levels}
    assert cases.allowed(case) == has
    if has:
        assert check.run_case(case, 0, workspace).status == "ok"
    elif case["ranks"] != "1":
        assert check.run_case(case, 0, workspace).status == "refused"


def test_an_open_level_is_what_the_others_require():
    """An incomplete case is excluded where no case completes it."""
    assert not cases.allowed({"slots": "of tokens", "mask": "tree"})
    assert not cases.allowed({"slots": "of requests", "plan": "given"})
    assert not cases.has_kernel({"bytes": "int8", "page_size": "2", "mask": "tree"})
    assert cases.allowed({"slots": "of tokens"}) and cases.has_kernel({"sign": "negative"})
    assert not cases.has_kernel({"sign": "negative", "scales": "floats"})


def test_lists_of_slots_have_missing_ones_and_some_twice():
    """-1 slots, duplicates, rows without a slot; and lengths of 0, of all, and between."""
    case = {**PLAIN, "sparse": "top 70"}
    slots = cases.inputs_of(case, 1).block_tables.flatten(0, -2)
    given = [row[row >= 0] for row in slots]
    assert any(0 < len(row) < 70 for row in given) and any(not len(row) for row in given)
    assert any(len(row.unique()) < len(row) for row in given)
    for level, count in (("of tokens", 10), ("of requests", 5)):
        inputs = cases.inputs_of({**case, "slots": level}, 1)
        lens = inputs.sparse_mla_top_k_lens
        assert lens is not None and lens.shape == (count,) and len(set(lens.tolist())) > 3
    assert {0, 1, 70} <= set(lens.tolist())
    assert {-1, WILD_PAGE_IDS[0]} <= set(inputs.block_tables.flatten().tolist())


@pytest.mark.parametrize("layout", ["dense", "ragged"])
@pytest.mark.parametrize("level", ["apart", "heads first"])
@pytest.mark.parametrize("form", ["bf16", "e4m3"])
def test_a_query_with_gaps_has_the_same_rows_and_nan_between(form, level, layout):
    case = {**PLAIN, "format": form, "layout": layout}
    plain, laid = cases.inputs_of(case, 1).query, cases.inputs_of({**case, "query": level}, 1).query
    assert torch.equal(plain.float(), laid.float()) and not laid.is_contiguous()
    storage = torch.empty(0, dtype=laid.dtype).set_(laid.untyped_storage())
    others = storage.numel() - plain.numel()
    assert int(storage.float().isnan().sum()) == others > 0


def test_a_loose_bound_comes_with_wider_tables():
    plain = cases.inputs_of(PLAIN, 1)
    loose = cases.inputs_of({**PLAIN, "bound": "loose"}, 1)
    assert loose.max_seq_len == cases.LOOSE_BOUND > 100 * plain.max_seq_len
    columns = plain.block_tables.shape[1]
    assert loose.block_tables.shape[1] == cases.LOOSE_TABLES * columns
    assert torch.equal(loose.block_tables[:, :columns], plain.block_tables)


@pytest.mark.parametrize("seed", [0, 1])
def test_a_rank_holds_every_other_token(seed):
    inputs = cases.inputs_of({**PLAIN, "ranks": "2"}, seed)
    assert (inputs.cp_world, inputs.cp_rank) == (2, seed)
    assert inputs.causal_seqlens_kv_global is not None
    of_all, held = inputs.causal_seqlens_kv_global.tolist(), inputs.seq_lens.tolist()
    assert [len(range(seed, n, 2)) for n in of_all] == held
    assert {n % 2 for n in of_all} == {0, 1}


@pytest.mark.parametrize("index", cheapest_newer())
def test_the_torch_backend_passes(index, workspace):
    outcome = check.run_case(CASES[index], index, workspace)
    assert (outcome.status, outcome.reason, outcome.backend) == ("ok", "", "torch")


# --- mistakes are caught ------------------------------------------------------------------------


def without_counts(given):
    """All slots count: those behind a row's number are slots of the cache."""
    slots = given["block_tables"]
    return {
        **given,
        "block_tables": slots.where((slots >= -1) & (slots < 1 << 29), 0),
        "sparse_mla_top_k_lens": None,
    }


def counts_of_others(given):
    """Numbers of requests as if tokens of one request did not lie side by side."""
    changed = without_counts(given)
    total_q, lens = given["query"].flatten(0, -3).shape[0], given["sparse_mla_top_k_lens"]
    return {**changed, "sparse_mla_top_k_lens": lens.repeat(-(-total_q // len(lens)))[:total_q]}


def gaps_as_rows(given):
    """Elements of the query side by side, from its first one on."""
    query = given["query"]
    packed = torch.empty(query.shape, device="meta").stride()
    return {**given, "query": query.as_strided(query.shape, packed)}


def without_sign(given):
    return {**given, "bmm1_scale": abs(given["bmm1_scale"])}


def without_ranks(given):
    others = ("enable_dcp", "cp_world", "cp_rank", "causal_seqlens_kv_global")
    return {name: value for name, value in given.items() if name not in others}


def keys_to_the_bound(given):
    """Each request as long as its table's valid pages."""
    pages = (given["block_tables"] < 1 << 29) & (given["block_tables"] >= 0)
    return {**given, "seq_lens": (pages.sum(1) * 16).int()}


@pytest.mark.parametrize(
    ("change", "levels"),
    [
        (without_counts, {"sparse": "top 70", "slots": "of tokens"}),
        (without_counts, {"sparse": "top 70", "slots": "of requests"}),
        (counts_of_others, {"sparse": "top 70", "slots": "of requests"}),
        (gaps_as_rows, {"query": "apart"}),
        (gaps_as_rows, {"query": "heads first"}),
        (gaps_as_rows, {"query": "heads first", "layout": "ragged", "format": "e4m3"}),
        (without_sign, {"sign": "negative"}),
        (without_sign, {"sign": "negative", "scales": "device"}),
        (without_ranks, {"ranks": "2"}),
        (keys_to_the_bound, {"bound": "loose"}),
    ],
)
def test_a_choice_that_is_ignored_is_found(change, levels, monkeypatch, workspace):
    """The call itself is right: what it is told of the choice is changed."""
    case = {**PLAIN, **levels}
    assert check.run_case(case, 1, workspace).status == "ok"
    right = contract.trtllm_batch_decode_with_kv_cache_mla

    def call(**given: Any):
        return right(**change(given))

    monkeypatch.setattr(check, "trtllm_batch_decode_with_kv_cache_mla", call)
    outcome = check.run_case(case, 1, workspace)
    assert outcome.status == "wrong", outcome
    assert re.search("not finite|relative error|error of a row", outcome.reason)


# --- tables -------------------------------------------------------------------------------------


def test_a_record_older_than_a_choice_is_read():
    """Its cases have that choice's first level, and its tables say nothing of the others."""
    rows = pairwise_rows()
    for row in rows[1:]:
        row["case"] = {name: v for name, v in row["case"].items() if name not in NEWER}
    newer = ("numbers of slots", "query apart", "loose bound", "negative scale", "ranks")
    assert cases.whole(rows[1]["case"])["slots"] == "all"
    assert f"levels of {len(cases.FACTORS) - len(NEWER)} choices in" in tables.shapes_note(rows)
    for table in (tables.formats_table(rows), tables.pairs_table(rows)):
        assert "pages below 16" in table and not any(name in table for name in newer)
    rows = pairwise_rows()
    assert f"levels of {len(cases.FACTORS)} choices in 3 or more" in tables.shapes_note(rows)
    for table in (tables.formats_table(rows), tables.pairs_table(rows)):
        assert all(name in table for name in newer)


def test_what_is_not_ok_is_run_again_and_names_its_commit(tmp_path: Path) -> None:
    path = tmp_path / "pairs.jsonl"
    arguments = ["verify", "pairwise", "--device", "cpu", str(path)]
    assert cli.main([*arguments, "--first", "2"]) == 0
    head, first, second = read(path)
    write(path, [head, first, {**second, "status": "refused", "rel_error": 1.0}])
    assert cli.main([*arguments, "--again"]) == 0
    after = read(path)
    assert after[:2] == [head, first]
    assert after[2].pop("commit") == Revision.here().commit
    assert after[2] == second
    write(path, [head, first, {**second, "case": first["case"]}])
    assert cli.main([*arguments, "--again"]) == 2
