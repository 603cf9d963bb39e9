"""What the proofs on a card consist of, tried on a CPU: pairs are covered, mistakes are caught."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mla_lab import cli
from mla_lab.api import contract
from mla_lab.call.checks import form_of
from mla_lab.call.decode_args import native_args
from mla_lab.core.errors import InvalidInput
from mla_lab.reference.mla import decode_reference
from mla_lab.reference.tolerance import rel_error
from mla_lab.verify import cases, check, limits, published, record, tables
from mla_lab.verify.pairwise import allowed_pairs, cover, pairs_of

CASES = cases.pairwise_cases()
SMALL = {"a": ("0", "1", "2"), "b": ("0", "1"), "c": ("0", "1", "2", "3"), "d": ("0", "1")}


def anything(_: Any) -> bool:
    return True


def counts(chosen, factors):
    return Counter(pair for case in chosen for pair in pairs_of(case, factors))


# --- the generator ----------------------------------------------------------------------------


def test_pairs_of_free_factors_are_all_there():
    pairs = allowed_pairs(SMALL, anything)
    assert len(pairs) == len(set(pairs)) == 3 * 2 + 3 * 4 + 3 * 2 + 2 * 4 + 2 * 2 + 4 * 2
    chosen = cover(SMALL, anything)
    assert set(counts(chosen, SMALL)) == set(pairs)
    assert len(chosen) <= 16, "12 at least: the two largest factors"


@given(st.data(), st.integers(1, 3))
def test_every_allowed_pair_is_covered(data, times):
    """Against brute force over all cases, under random exclusions of pairs."""
    pairs = allowed_pairs(SMALL, anything)
    excluded = set(data.draw(st.lists(st.sampled_from(pairs), max_size=12)))

    def allowed(case):
        levels = [(name, case[name]) for name in SMALL if name in case]
        return not any((x, y) in excluded for x, y in product(levels, levels))

    everything = [dict(zip(SMALL, levels, strict=True)) for levels in product(*SMALL.values())]
    possible = counts([case for case in everything if allowed(case)], SMALL)
    assert set(allowed_pairs(SMALL, allowed)) == set(possible)
    chosen = cover(SMALL, allowed, times=times)
    assert all(allowed(case) for case in chosen)
    assert len({tuple(case.items()) for case in map(dict, map(sorted_items, chosen))}) == len(
        chosen
    )
    found = counts(chosen, SMALL)
    assert all(found[pair] >= min(times, count) for pair, count in possible.items())


def sorted_items(case):
    return sorted(case.items())


def test_equal_arguments_give_equal_cases():
    assert cover(SMALL, anything, seed=3) == cover(SMALL, anything, seed=3)
    with pytest.raises(InvalidInput, match="times"):
        cover(SMALL, anything, times=0)


# --- the cases --------------------------------------------------------------------------------


def test_several_hundred_cases_cover_every_pair():
    assert 400 <= len(CASES) <= 600
    found = counts(CASES, cases.FACTORS)
    assert set(found) == set(allowed_pairs(cases.FACTORS, cases.allowed))
    assert min(found.values()) >= cases.TIMES
    assert len({tuple(sorted_items(case)) for case in CASES}) == len(CASES)


def test_what_kernels_run_is_covered_by_itself():
    by_kernels = [case for case in CASES if cases.has_kernel(case)]
    assert len(by_kernels) >= 150
    found = counts(by_kernels, cases.FACTORS)
    possible = allowed_pairs(cases.FACTORS, lambda c: cases.allowed(c) and cases.has_kernel(c))
    assert set(found) == set(possible)
    assert min(found.values()) >= cases.TIMES


def test_every_case_is_a_call_that_the_contract_has():
    """The checks of a call find nothing, and what the case names is in use."""
    for seed, case in enumerate(CASES[::4]):
        problem = cases.problem_of(case)
        if sum(problem.kv_lens) > 700 or problem.total_q * problem.heads > 500:
            continue
        inputs = cases.inputs_of(case, seed)
        named = {**inputs.contract_args(), **cases.choices_of(case)}
        # what has one row, or one request, has no gaps between them
        apart = {
            "strided_query": not inputs.query.is_contiguous(),
            "strided_tables": not inputs.block_tables.is_contiguous(),
            "planned": False,
        }
        rows = problem.total_q * problem.heads
        expected = cases.form_features(case)
        assert apart["strided_query"] == (case["query"] != "whole" and rows > 1)
        assert apart["strided_tables"] == (case["tables"] == "apart" and problem.batch > 1)
        assert form_of(native_args(**named)).features == replace(expected, **apart)
        assert form_of(native_args(**named)).bounds.kv_format == problem.kv_format


def work(case) -> int:
    """What a case costs on a CPU: rows x keys, and keys in all."""
    problem = cases.problem_of(case)
    keys = sum(problem.kv_lens)
    rows = problem.total_q * problem.heads
    return rows * (problem.top_k or max(problem.kv_lens)) + 40 * keys


CHEAP = sorted(range(len(CASES)), key=lambda index: work(CASES[index]))[:50]


@pytest.fixture(scope="module")
def workspace():
    """One buffer, zeroed once, for all cases."""
    return torch.zeros(64 << 20, dtype=torch.uint8)


@pytest.mark.parametrize("index", CHEAP)
def test_the_torch_backend_passes(index, workspace):
    outcome = check.run_case(CASES[index], index, workspace)
    assert (outcome.status, outcome.reason, outcome.backend) == ("ok", "", "torch")


# --- mistakes are caught ----------------------------------------------------------------------

PLAIN = {name: levels[0] for name, levels in cases.FACTORS.items()} | {
    "q_len": "2",
    "heads": "7",
    "lengths": "mixed",
    "page_size": "16",
    "lse": "natural",
}


def outcome_of(change, monkeypatch, workspace, seed=1, **levels):
    """The outcome of a case whose call is followed by `change(given, result)`."""

    def call(**given: Any):
        return change(given, contract.trtllm_batch_decode_with_kv_cache_mla(**given))

    monkeypatch.setattr(check, "trtllm_batch_decode_with_kv_cache_mla", call)
    return check.run_case({**PLAIN, **levels}, seed, workspace)


def test_a_right_call_is_right(monkeypatch, workspace):
    assert outcome_of(lambda given, result: result, monkeypatch, workspace).status == "ok"


def spoil_row(given, result):
    result[0][2, 1, 3] *= 1.05
    return result


def spoil_element(given, result):
    result[0][2, 1, 3, 100] = torch.nan
    return result


def spoil_lse(given, result):
    result[1][5] += 1e-3
    return result


def write_outside(given, result):
    storage = torch.empty(0, dtype=torch.bfloat16).set_(given["out"].untyped_storage())
    storage[-1] = 0
    return result


def write_cache(given, result):
    given["kv_cache"].view(torch.uint8)[0, 0, 0] = 1
    return result


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (spoil_row, "error of a row|relative error"),
        (spoil_element, "1 elements are not finite"),
        (spoil_lse, "lse error"),
        (write_outside, "out: rows outside of it were written"),
        (write_cache, "only read was written"),
    ],
)
def test_a_mistake_is_found(change, says, monkeypatch, workspace):
    outcome = outcome_of(change, monkeypatch, workspace)
    assert outcome.status == "wrong"
    assert re.search(says, outcome.reason)


def test_a_refusal_keeps_its_words(monkeypatch, workspace):
    def refuse(**given: Any):
        raise InvalidInput("words")

    monkeypatch.setattr(check, "trtllm_batch_decode_with_kv_cache_mla", refuse)
    outcome = check.run_case(PLAIN, 0, workspace)
    assert (outcome.status, outcome.reason) == ("refused", "words")


def test_dropped_mass_is_allowed_for():
    """A skipping call is compared with the oracle that skips nothing."""
    inputs = cases.inputs_of({**PLAIN, "skip": "1e-3"}, 1)
    exact = decode_reference(replace(inputs, skip_softmax_threshold_scale_factor=None))
    near = exact.out * (1 + 1.5e-3)
    assert check.judge(inputs, near.bfloat16(), exact.lse.float(), "x", None).status == "ok"


# --- the published configurations -------------------------------------------------------------


def test_the_published_list_has_396():
    listed = published.configurations()
    assert len(listed) == len(set(listed)) == 396
    assert len([c for c in listed if c.dtype == "bf16"]) == 198
    assert {c.batch for c in listed} == {1, 2, 4, 16, 32, 64, 128, 256, 512, 768, 1024}


@pytest.fixture(scope="module")
def pool():
    return published.Pool("bf16", 3 * 1024, "cpu")


@pytest.mark.parametrize("page_size", published.PAGE_SIZES)
@pytest.mark.parametrize("q_len", [1, 4])
def test_a_configuration(page_size, q_len, pool, workspace, monkeypatch):
    monkeypatch.setattr(published, "HEADS", 4)
    monkeypatch.setattr(published, "CHUNK_BYTES", 2 * 1024 * 576 * 4)  # two requests, then one
    c = published.Configuration("bf16", page_size, 3, 1024, q_len)
    assert published.run(c, pool, workspace, ["torch"]).status == "ok"
    call = pool.call(c)
    parts = list(published.references(call))
    assert [(p.start, p.stop) for p, _ in parts] == [(0, 2), (2, 3)]
    together = torch.cat([part for _, part in parts])
    assert rel_error(together, decode_reference(call).out.float()) < 1e-6


def test_a_configuration_that_is_refused(pool, workspace, monkeypatch):
    monkeypatch.setattr(published, "HEADS", 4)
    c = published.Configuration("bf16", 32, 1, 64, 1)
    outcome = published.run(c, pool, workspace)
    assert outcome.status == "refused"
    assert re.search(r"got 'cute'.* CPU.*; backend: got 'cuda'", outcome.reason)
    assert published.run(c, pool, workspace, ["cute", "torch"]).backend == "torch"


def test_a_wrong_reference_is_no_witness(pool, workspace, monkeypatch):
    monkeypatch.setattr(published, "HEADS", 4)
    monkeypatch.setattr(published, "SCALE", 0.1)
    call = pool.call(published.Configuration("bf16", 32, 1, 64, 1))
    part, right = next(published.references(call))
    _, oracle = published._ends(call, part)
    assert published._objection_to(right, oracle) == ""
    assert "reference is" in published._objection_to(right * 1.001, oracle)


# --- records ----------------------------------------------------------------------------------


def test_runs_are_rows(tmp_path: Path):
    said: list[str] = []
    rows = list(record.pairwise_run("cpu", CHEAP[:2], said.append))
    assert rows[0]["what"] == "pairwise" and rows[0]["cases"] == 2
    assert [row["status"] for row in rows[1:]] == ["ok", "ok"] and said == []
    path = tmp_path / "record.jsonl"
    record.write(path, rows)
    assert record.read(path) == json.loads(json.dumps(rows))
    for text in ("", "{", "[1]\n"):
        path.write_text(text, encoding="utf-8")
        with pytest.raises(InvalidInput, match="record"):
            record.read(path)


def test_an_accident_is_an_outcome(monkeypatch):
    def fail(*_: Any):
        raise RuntimeError("launch failed")

    said: list[str] = []
    monkeypatch.setattr(record, "run_case", fail)
    rows = list(record.pairwise_run("cpu", [0], said.append))
    assert rows[1]["status"] == "failed"
    assert said == ["case 0: failed: RuntimeError: launch failed"]


def test_the_commands(tmp_path: Path, capsys):
    path = tmp_path / "record.jsonl"
    assert cli.main(["verify", "pairwise", str(path), "--device", "cpu", "--first", "1"]) == 0
    assert "1 ok" in capsys.readouterr().out
    assert len(record.read(path)) == 2
    command = ["verify", "published", str(path), "--device", "cpu", "--dtypes", "fp4"]
    assert cli.main(command) == 2, "no such dtype"


@pytest.mark.parametrize(
    ("statuses", "fails"),
    [
        (["ok"], False),
        (["ok", "refused"], False),
        (["ok", "wrong"], True),
        (["failed", "ok"], True),
        (["refused"], True),
        ([], True),
    ],
)
def test_what_fails_a_run(statuses, fails):
    assert (
        record.failed([{"kind": "run"}, *({"kind": "case", "status": s} for s in statuses)])
        == fails
    )


def test_the_published_command_counts(tmp_path: Path, capsys, monkeypatch):
    path = tmp_path / "record.jsonl"
    small = [c for c in published.configurations() if c.batch == 1 and c.kv_len == 1024]
    monkeypatch.setattr(published, "configurations", lambda: small)
    monkeypatch.setattr(published, "KV_LENS", (1024,))
    command = ["verify", "published", str(path), "--device", "cpu", "--batch", "1"]
    assert cli.main(command) == 1, "a run in which nothing passed proves nothing"
    assert "12 refused" in capsys.readouterr().out, "the CuTe backend is named, and this is a CPU"
    note = tables.published_note(record.read(path))
    assert "bf16: 0 of 6 passed; 6 backend: got 'cute'" in note and "e4m3: 0 of 6" in note


# --- tables -------------------------------------------------------------------------------------

ENVIRONMENT = {"card": {"name": "X"}, "commit": "abcdef0123456", "date": "2026-01-02"}


def pairwise_rows(statuses=("ok",), backends=("cute",)):
    rows: list[record.Row] = [{"kind": "run", "environment": ENVIRONMENT}]
    for index, case in enumerate(CASES):
        status, backend = statuses[index % len(statuses)], backends[index % len(backends)]
        rows.append({"kind": "case", "case": case, "status": status, "backend": backend,
                     "reason": "", "rel_error": 1e-3})  # fmt: skip
    return rows


def test_feature_names_are_those_of_the_cases():
    assert {name for case in CASES for name in cases.features_of(case)} == set(tables.FEATURES)


def test_tables_count_every_case():
    rows = pairwise_rows(backends=("cute", "torch"))
    table = tables.formats_table(rows)
    numbers = [int(n) for n in re.findall(r"\d+", table.splitlines()[2])]
    assert sum(numbers) == len(CASES)
    pairs = tables.pairs_table(rows).splitlines()
    assert len(pairs) == len(tables.FEATURES) + 1
    assert "abcdef012" in tables.shapes_note(rows)
    assert f"{len(CASES)} calls" in tables.shapes_note(rows)


def test_what_did_not_pass_is_said():
    assert tables.cell([]) == "–"
    table = tables.formats_table(pairwise_rows(statuses=("ok", "wrong", "refused")))
    assert "wrong**" in table and "refused**" in table


def test_the_drop_in_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    head = {"kind": "run", "parametrisations": {"f.py::test_a": 9, "f.py::test_b": 1}, "seed": 7,
            "flashinfer_commit": "0123456789abc", "mla_lab_commit": "fedcba9876543", "card": "X",
            "date": "2026-01-02"}  # fmt: skip
    rows = [head] + [
        {"kind": "case", "test": test, "status": status, "backends": backends, "reason": reason}
        for test, status, backends, reason in (
            ("test_a", "passed", ["cute"], ""),
            ("test_a", "passed", ["torch"], ""),
            ("test_a", "failed", ["cute"], "Unsupported: a 12 | b"),
            ("test_a", "failed", ["cute"], "Unsupported: a 13 | b"),
            ("test_b", "skipped", [], "not here"),
        )
    ]
    note = tables.dropin_note(rows)
    assert "5 of 10 parametrisations" in note and "commit fedcba987: " in note
    assert "2 passed (1 of them by the torch backend), 2 failed, 1 skipped." in note
    assert "| `test_a` | 9 | 2 | 1 | 2 |  |" in tables.dropin_tests(rows)
    assert "| failed | Unsupported: a # \\| b | 2 |" in tables.dropin_reasons(rows)
    (tmp_path / "records").mkdir()
    record.write(tmp_path / tables.TABLES["dropin"][0], rows)
    monkeypatch.setattr(record, "data_dir", lambda: tmp_path)
    assert tables.made("dropin") == note


def test_cases_by_number(tmp_path: Path) -> None:
    path = tmp_path / "some.jsonl"
    assert not cli.main(["verify", "pairwise", str(path), "--device", "cpu", "--only", "3,1"])
    rows = record.read(path)
    assert [row["index"] for row in rows if row["kind"] == "case"] == [3, 1]


@pytest.mark.parametrize(
    ("verb", "options", "says"),
    [
        ("pairwise", ["--first", "1"], "--device: got cuda; supported: cpu"),
        ("pairwise", ["--first", "1", "--device", "tpu"], "--device: got 'tpu'"),
        ("pairwise", ["--first", "0", "--device", "cpu"], "--first: got 0"),
        ("soak", ["--seconds", "nan", "--device", "cpu"], "--seconds: got nan"),
    ],
)
def test_what_the_command_refuses(
    verb: str,
    options: list[str],
    says: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    path = tmp_path / "none.jsonl"
    assert cli.main(["verify", verb, str(path), *options]) == 2
    assert capsys.readouterr().err.startswith(f"mla-lab verify: {says}")
    assert not path.exists()


@pytest.mark.parametrize("lengths", ["mixed", "early", "one"])
@pytest.mark.parametrize(("form", "weights"), [("e4m3", "e4m3"), ("bf16 on 656", "bf16")])
def test_rounded_weights_are_judged_by_torch_s_own_error(
    form: str, weights: str, lengths: str
) -> None:
    """Torch's result is within twice its error, one whose rows have other weights is not."""
    case = {**PLAIN, "format": form, "heads": "16", "q_len": "1", "lengths": lengths}
    inputs = cases.inputs_of(case, 3)
    expected = decode_reference(inputs)
    allowed = limits.limits_of(inputs, expected)
    eight = weights == "e4m3"
    assert 2e-3 < allowed.rel_error < (0.055 if eight else 8e-3)
    longest = {"one": 0.012}.get(lengths, 0.065) if eight else 1.1 * limits.LSE_OF_TWO_TERMS
    assert 1e-4 < allowed.lse_error < longest
    out, lse = limits.rounded(inputs, weights, 300.0)
    if not eight:  # whose sums are those of weights before they are rounded
        lse = expected.lse.float()
    assert check.judge(inputs, out.bfloat16(), lse, "x", None).status == "ok"
    off = lse + 2 * allowed.lse_error * lse.abs().clamp_min(1)
    outcome = check.judge(inputs, out.bfloat16(), off, "x", None)
    assert outcome.status == "wrong" and "lse error" in outcome.reason
    outcome = check.judge(inputs, (out * 1.06).bfloat16(), lse, "x", None)
    assert outcome.status == "wrong" and outcome.allowed == allowed.rel_error
