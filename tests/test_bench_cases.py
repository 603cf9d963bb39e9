"""Case lists, rotations over KV copies, and the check of every element."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from mla_lab.bench import rotation as rotations
from mla_lab.bench.cases import (
    Case,
    anchor_cases,
    blackwell_twins,
    get_list,
    sweep_cases,
    trace_cases,
    uniform_case,
)
from mla_lab.bench.checks import Accuracy, compare
from mla_lab.bench.rotation import (
    CACHE_SHARE,
    LEAST_BYTES,
    MANY,
    ROTATION_BYTES,
    copies_for,
    kv_bytes,
    make_rotation,
    page_lists,
    rotation_bytes_on,
    rotation_words,
)
from mla_lab.cli.commands._bench_cases import add_flags, chosen
from mla_lab.core.errors import InvalidInput
from mla_lab.core.problem import Problem
from mla_lab.core.resources import data_dir
from mla_lab.reference.mla import decode_reference

SMALL = 60_000  # bytes of a rotation in tests


def test_the_anchor_list():
    cases = anchor_cases()
    assert len(cases) == 54
    assert len({case.name for case in cases}) == 54
    assert {c.problem.page_size for c in cases} == {64}
    assert {c.problem.heads for c in cases} == {16, 64, 128}
    ragged = [c.problem for c in cases if c.lengths != "uniform"]
    assert [sum(p.kv_lens) for p in ragged] == [508945, 508945, 61387]
    assert min(min(p.kv_lens) for p in ragged) >= 1


def test_the_twins_are_the_published_cases():
    rows = (
        (data_dir() / "published/published_blackwell.jsonl")
        .read_text(encoding="utf-8")
        .splitlines()
    )
    published = [json.loads(row) for row in rows]
    twins = {case.name: case.problem for case in blackwell_twins()}
    assert len(twins) == 40
    assert set(twins) == {row["case"] for row in published}
    assert {row["peer"] for row in published} == {"trtllm-gen", "cute-dsl"}
    assert all(row["us"] > 0 and row["source"].startswith("https://") for row in published)
    variable = twins["b32_q4_h128_kv8192_var_bf16_p32".replace("_bf16", "")]
    assert variable.kv_lens[-1] == 8192
    assert len(set(variable.kv_lens)) > 20
    assert min(variable.kv_lens) >= 4


def test_sweeps_and_traces():
    assert [c.name for c in sweep_cases([1, 2], [1], [16], [64], page_size=32)] == [
        "b1_q1_h16_kv64_p32",
        "b2_q1_h16_kv64_p32",
    ]
    problem = Problem((1, 1), (5, 9), 16)
    assert trace_cases([("azure_s0", problem)])[0].name == "trace_azure_s0"
    with pytest.raises(InvalidInput, match="anchor"):
        get_list("no such list")


def test_a_rotation_leaves_little_of_itself_in_l2():
    assert ROTATION_BYTES >= 75 * 60e6 and LEAST_BYTES >= 4 * 60e6
    assert rotation_bytes_on("cuda:1") == ROTATION_BYTES
    assert rotation_bytes_on("cpu") == LEAST_BYTES
    for case in [*anchor_cases(), *blackwell_twins()]:
        copies, one = copies_for(case.problem, ROTATION_BYTES), kv_bytes(case.problem)
        assert copies * one >= (LEAST_BYTES if copies >= MANY else ROTATION_BYTES), case.name
        assert (copies - 1) * one < ROTATION_BYTES, case.name
        assert copies <= MANY or (copies - 1) * one < LEAST_BYTES, case.name


def test_a_record_tells_of_its_rotation():
    assert rotation_words(LEAST_BYTES) == "KV copies of 240 MB in rotation"
    words = "KV copies of 4800 MB in rotation (small ones: 32, and 240 MB at least)"
    assert rotation_words(ROTATION_BYTES) == words


def test_a_rotation_of_nothing_has_one_copy():
    assert copies_for(Problem((1,), (0,), 16), ROTATION_BYTES) == 1


def test_caches_of_a_rotation_leave_room_on_a_gpu(monkeypatch):
    monkeypatch.setattr(rotations, "_most_copies", lambda kv_cache: 2)
    case = uniform_case(2, 1, 4, 70)
    assert len(make_rotation(case, rotation_bytes=SMALL * 9, workspace_bytes=1).copies) == 2
    monkeypatch.undo()
    assert len(make_rotation(case, rotation_bytes=SMALL * 9, workspace_bytes=1).copies) > 2
    card = SimpleNamespace(total_memory=4 * CACHE_SHARE * 10**9 - 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)
    on_card = partial(SimpleNamespace, device=torch.device("cuda"))
    assert rotations._most_copies(on_card(nbytes=10**9)) == 3
    assert rotations._most_copies(on_card(nbytes=10**12)) == 1, "the first one in any case"


FORMATS = [
    {},
    {"kv_format": "fp8_656"},
    {"kv_format": "e4m3"},
    {"q_dtype": "fp16", "kv_format": "fp16"},
]


def nans(cache):
    """Where the cache is poisoned; in 656-byte tokens their scales tell."""
    if cache.dtype is torch.uint8:
        return cache[..., 512:528].contiguous().view(torch.float32).isnan()
    return cache.float().isnan()


@pytest.mark.parametrize("fields", FORMATS, ids=str)
@pytest.mark.parametrize("distribution", ["gauss", "heavy_tailed"])
def test_copies_share_all_but_their_cache(fields, distribution):
    case = replace(uniform_case(2, 1, 4, 20, **fields), distribution=distribution)
    rotation = make_rotation(case, rotation_bytes=SMALL, workspace_bytes=1 << 16)
    first, second = rotation.copies[:2]
    assert len(rotation.copies) == copies_for(case.problem, SMALL) > 1
    assert rotation.kv_bytes >= SMALL
    assert first.query is second.query
    assert first.block_tables is second.block_tables
    assert first.kv_cache.data_ptr() != second.kv_cache.data_ptr()
    assert first.kv_cache.stride() == second.kv_cache.stride()
    assert torch.equal(nans(first.kv_cache), nans(second.kv_cache)), "poison stays where it was"
    assert nans(first.kv_cache).any()
    difference = (rotation.expected[0] - rotation.expected[1]).norm() / rotation.expected[0].norm()
    assert 0.1 < float(difference) < 1.5, "another cache gives another result"
    assert rotation.expected[1].isfinite().all()


def test_a_strided_cache_stays_strided():
    case = replace(uniform_case(2, 1, 4, 20), features=("page_gap",))
    first, second = make_rotation(case, rotation_bytes=SMALL, workspace_bytes=1 << 16).copies[:2]
    assert (
        second.kv_cache.stride() == first.kv_cache.stride() != first.kv_cache.contiguous().stride()
    )


def test_the_expected_result_is_the_reference_of_each_copy():
    rotation = make_rotation(
        uniform_case(2, 2, 4, 70), rotation_bytes=2 * SMALL, workspace_bytes=1 << 16
    )
    for copy, expected in zip(rotation.copies, rotation.expected, strict=True):
        reference = decode_reference(copy).out.reshape(expected.shape)
        assert torch.equal(reference.float(), expected)


def test_without_poison_only_unread_things_change():
    rotation = make_rotation(
        uniform_case(2, 1, 4, 70), rotation_bytes=SMALL, workspace_bytes=1 << 16
    )
    for copy, healed, expected in zip(
        rotation.copies, rotation.without_poison, rotation.expected, strict=True
    ):
        assert healed.kv_cache.isfinite().all()
        assert int(healed.block_tables.min()) >= 0
        assert int(healed.block_tables.max()) < len(copy.kv_cache)
        assert torch.equal(decode_reference(healed).out.reshape(expected.shape).float(), expected)


def test_launch_order_takes_whole_rounds():
    rotation = make_rotation(uniform_case(2, 1, 4, 20), rotation_bytes=3 * 2 * 20 * 1152)
    assert rotation.order(min_launches=8) == [0, 1, 2] * 3
    assert rotation.order(min_launches=1) == [0, 1, 2]


def test_page_lists_hold_what_the_call_reads():
    problem = Problem((1, 1, 1), (65, 0, 64), 4)
    copy = make_rotation(Case("ragged", "test", problem), rotation_bytes=1).copies[0]
    sums, pages = page_lists(copy)
    assert sums.tolist() == [0, 2, 2, 3]
    assert pages.tolist() == [*copy.block_tables[0, :2].tolist(), int(copy.block_tables[2, 0])]


def planted(change):
    """Accuracy of the reference itself after `change` was done to it."""
    torch.manual_seed(0)
    reference = torch.randn(4, 8, 512)
    out = reference.clone()
    change(out)
    return compare([(reference, reference), (out.bfloat16(), reference)])


CASE = uniform_case(1, 1, 16, 64)


def test_rounding_to_bf16_is_accepted():
    accuracy = planted(lambda out: None)
    assert accuracy.objection(CASE) is None
    assert 1e-4 < accuracy.rel_error < 2e-3


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda out: out[3, 7, 511].fill_(float("nan")), "1 elements are not finite"),
        (lambda out: out[0, 0, 0].fill_(float("inf")), "1 elements are not finite"),
        (lambda out: out.mul_(1.02), "relative error 1"),
        (lambda out: out[2, 5].mul_(1.025), "relative error of a row"),
        (lambda out: out[2, 5].zero_(), "relative error"),
    ],
)
def test_a_planted_error_is_not_accepted(change, words):
    objection = planted(change).objection(CASE)
    assert objection is not None
    assert words in objection


def test_rows_without_keys_must_be_zero():
    zero = torch.zeros(1, 2, 512)
    assert compare([(zero, zero)]) == Accuracy(0.0, 0.0, 0)
    assert compare([(zero + 1e-3, zero)]).objection(CASE)


@pytest.mark.parametrize(("name", "count"), [("drawn", 120), ("heldout", 60)])
def test_drawn_shapes_are_others_and_stay_what_they_are(name, count):
    cases = get_list(name)
    names = [case.name for case in cases]
    assert len(set(names)) == count and names == [case.name for case in get_list(name)]
    others = {case.name for case in anchor_cases()}
    others |= {case.name for case in get_list("drawn" if name == "heldout" else "heldout")}
    assert not set(names) & others
    assert {case.problem.heads for case in cases} == {8, 16, 32, 64, 128}
    assert sum(case.lengths != "uniform" for case in cases) >= 10
    for case in cases:
        assert all(q <= kv for q, kv in zip(case.problem.q_lens, case.problem.kv_lens, strict=True))


def test_formats_of_one_shape_follow_each_other():
    parser = argparse.ArgumentParser()
    add_flags(parser)
    words = "--batch 16,64 --heads 16 --kv-len 1024 --q-dtype bf16,fp16 --page-size 32,64"
    cases = chosen(parser.parse_args(words.split()))
    formats = [(c.problem.q_dtype, c.problem.kv_format, c.problem.page_size) for c in cases]
    each = [(dtype, dtype, page) for dtype in ("bf16", "fp16") for page in (32, 64)]
    assert formats == each * 2
    assert [c.problem.out_dtype for c in cases] == [dtype for dtype, _, _ in formats]


def test_a_grid_takes_pairs_of_query_and_cache_and_sparse_calls():
    parser = argparse.ArgumentParser()
    add_flags(parser)
    words = "--batch 4,8 --kv-len 512 --formats bf16,e4m3,bf16:fp8_656 --top-k 256"
    cases = chosen(parser.parse_args(words.split()))
    formats = [(c.problem.q_dtype, c.problem.kv_format) for c in cases]
    assert formats == [("bf16", "bf16"), ("e4m3", "e4m3"), ("bf16", "fp8_656")] * 2
    assert {c.problem.top_k for c in cases} == {256}
    assert len({c.name for c in cases}) == 6


def test_uniform_twins_follow_their_cases():
    parser = argparse.ArgumentParser()
    add_flags(parser)
    words = "--cases trace --requests 3,16 --seeds 0,1 --uniform"
    cases = chosen(parser.parse_args(words.split()))
    steps, twins = cases[::2], cases[1::2]
    assert [case.name for case in twins] == [f"{case.name}_uniform" for case in steps]
    for step, twin in zip(steps, twins, strict=True):
        lengths = twin.problem.kv_lens
        assert sum(lengths) == sum(step.problem.kv_lens)
        assert max(lengths) - min(lengths) <= 1 < len(set(step.problem.kv_lens))
        assert replace(twin.problem, kv_lens=step.problem.kv_lens) == step.problem
        assert step.lengths in twin.lengths != step.lengths
    both = [
        case.name
        for case in chosen(
            parser.parse_args(["--only", "b32_.*_gauss", "--uniform", "--batch-invariant"])
        )
    ]
    name = "b32_q1_h128_kv2048_gauss"
    assert both == [name + end for end in ("", "_invariant", "_uniform", "_uniform_invariant")]


def test_one_command_takes_several_traces_models_and_sizes(tmp_path):
    shipped = (data_dir() / "runtime/synthetic_trace.csv").read_bytes()
    for name in ("a_b.csv", "c.csv"):
        (tmp_path / name).write_bytes(shipped)
    (tmp_path / "c.jsonl").write_bytes((data_dir() / "runtime/synthetic_trace.jsonl").read_bytes())
    parser = argparse.ArgumentParser()
    add_flags(parser)
    words = "--cases trace --model deepseek-v2-lite,deepseek-v3 --requests 4,8 --seeds 0 --trace"
    files = f"{tmp_path}/a_b.csv,{tmp_path}/c.csv"
    cases = chosen(parser.parse_args([*words.split(), files]))
    assert [case.name for case in cases] == [
        f"trace_{trace}_{model}_n{requests}_s0"
        for trace in ("a_b", "c")
        for model in ("deepseek-v2-lite", "deepseek-v3")
        for requests in (4, 8)
    ]
    assert {(c.problem.heads, c.problem.batch) for c in cases} == {
        (16, 4),
        (16, 8),
        (128, 4),
        (128, 8),
    }
    with pytest.raises(InvalidInput, match="different names"):
        chosen(parser.parse_args([*words.split(), f"{files},{tmp_path}/c.jsonl"]))


def test_batch_invariant_twins_follow_their_cases():
    parser = argparse.ArgumentParser()
    add_flags(parser)
    words = "--cases anchor --only b128_q1_h16_kv[14] --batch-invariant"
    cases = chosen(parser.parse_args(words.split()))
    plain, twins = cases[::2], cases[1::2]
    assert [case.name for case in twins] == [f"{case.name}_invariant" for case in plain]
    assert all(case.batch_invariant for case in twins)
    assert [case.problem for case in twins] == [case.problem for case in plain]
