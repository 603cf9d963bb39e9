"""What is on record of the SM100 kernel: every case of both lists, and what builds take."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import mla_lab
from mla_lab.core.resources import data_dir
from mla_lab.lab.blackwell_facts import card_facts
from mla_lab.verify import emulated_xqa, sm100_builds, sm100_lists, sm100_tables
from mla_lab.verify.published import configurations
from mla_lab.verify.record import read
from mla_lab.verify.sm100_lists import KV_TILE, Run, feature_runs, published_runs

RECORDS = data_dir() / "records"
Row = dict[str, Any]


@cache
def recorded() -> tuple[Row, dict[str, Row]]:
    head, *rows = read(RECORDS / "sm100.jsonl")
    return head, {row["name"]: row for row in rows}


@cache
def wanted() -> dict[str, Run]:
    return {run.name: run for run in (*published_runs(), *feature_runs())}


def published_rows() -> list[Row]:
    _, rows = recorded()
    return [rows[run.name] for run in published_runs()]


def test_every_case_of_both_lists_is_on_record_right_and_silent() -> None:
    head, rows = recorded()
    assert head["cases"] == len(rows) == len(wanted()) and set(rows) == set(wanted())
    assert {row["status"] for row in rows.values()} == {"ok"}
    assert not any("findings" in row for row in rows.values())
    for name, run in wanted().items():
        row = rows[name]
        assert tuple(row["kv_lens"]) == run.problem.kv_lens
        assert tuple(row["q_lens"]) == run.problem.q_lens
        assert tuple(row["schedules"]) == run.schedules
        assert row["build"] == run.config.name() and len(row["commit"]) == 40
        assert row["out_error"] < 0.06 and row["lse_error"] < 0.02


def test_each_published_configuration_is_cut_within_what_was_asked() -> None:
    rows = published_rows()
    assert len(rows) == len(configurations()) == 396
    for row, c in zip(rows, configurations(), strict=True):
        assert row["name"].startswith(f"{c.name}_") and set(row["q_lens"]) == {c.q_len}
        assert row["splits"] >= 2
        for length in row["kv_lens"]:
            tiles = -(-length // KV_TILE)
            assert length % KV_TILE and tiles == 3 * row["splits"]
        pieces = len(row["kv_lens"]) * c.q_len * row["splits"]
        assert 1 <= row["workers"] <= 2 and pieces >= 2 * row["workers"]


def test_lengths_are_equal_and_unlike_for_every_dtype_page_length_and_query() -> None:
    ways: dict[tuple[object, ...], set[int]] = defaultdict(set)
    for row, c in zip(published_rows(), configurations(), strict=True):
        if len(row["kv_lens"]) == 2:
            ways[c.dtype, c.page_size, c.kv_len, c.q_len].add(len(set(row["kv_lens"])))
    assert len(ways) == 36 and all(found == {1, 2} for found in ways.values())


def test_every_tenth_configuration_ran_under_all_schedules() -> None:
    schedules = [len(row["schedules"]) for row in published_rows()]
    assert sm100_lists.SCHEDULES == ("greedy", "random", "late", "adverse")
    assert schedules == [5 if index % 10 == 0 else 1 for index in range(396)]


def test_the_whole_list_takes_less_than_an_hour_of_two_cores() -> None:
    _, rows = recorded()
    seconds = [float(row.get("cpu_seconds", row.get("seconds", 0.0))) for row in rows.values()]
    assert sum(seconds) < 2 * 3600


def test_requests_have_the_same_bits_alone() -> None:
    _, rows = recorded()
    names = [run.name for run in feature_runs() if run.splits is None]
    assert len(names) >= 5 and all(rows[name]["same_alone"] is True for name in names)
    formats = {name.split("_")[0] for name in names}
    assert formats >= {"bf16", "fp16", "e4m3"}


@pytest.mark.parametrize("arch", sm100_builds.ARCHS)
def test_builds_on_record_fit_and_spill_nothing(arch: str) -> None:
    rows = [row for row in read(RECORDS / "sm100_builds.jsonl")[1:] if row["name"].endswith(arch)]
    assert len(rows) == 4
    for row in rows:
        assert row["status"] == "ok" and row["stack"] == row["local"] == 0
        assert row["registers"] <= 255 and row["shared_bytes"] <= 232_448
        assert row["tensor_columns"] == 512
        roles = row["by_role"]
        assert list(roles) == ["MMA", "producer", "softmax", "shared"]
        assert all(0 < named <= row["registers"] for named in roles.values())


def test_each_fact_that_only_a_card_settles_has_a_guard_in_the_code() -> None:
    facts = card_facts()
    assert len(facts.rows) >= 8
    package = Path(mla_lab.__file__).parent
    for fact, _, guard in facts.rows:
        names = re.findall(r"[a-z]\w*(?:\.\w+)+", guard)
        assert names, fact
        for name in names:
            module, _, attribute = name.rpartition(".")
            tree = ast.parse((package / module.replace(".", "/")).with_suffix(".py").read_text())
            defined = {getattr(node, "name", None) for node in tree.body}
            defined |= {
                target.id
                for node in tree.body
                if isinstance(node, ast.Assign)
                for target in node.targets
                if isinstance(target, ast.Name)
            }
            assert attribute in defined, f"{fact}: {name}"


def test_pages_of_the_kernel_are_made_from_the_records() -> None:
    assert "UTCHMMA" in sm100_tables.builds() and "sm_103a" in sm100_tables.builds()
    assert re.search(r"published: \d+ of 396: \d+ ok;", sm100_tables.record())


def test_sm120_is_right_on_every_pair_and_every_published_configuration() -> None:
    head, *rows = read(RECORDS / "sm120_xqa.jsonl")
    assert head["cases"] == len(rows) and {row["status"] for row in rows} == {"ok"}
    assert not any("findings" in row for row in rows)
    names = {row["name"] for row in rows}
    cases, shapes = emulated_xqa.cases(), emulated_xqa.shapes()
    assert len(names) == len(cases) + len(shapes)
    assert names >= {", ".join(case[factor] for factor in emulated_xqa.FACTORS) for case in cases}
    assert sum(row.get("stands_for", 0) for row in rows) == len(configurations()) == 396
    assert "396 configurations" in sm100_tables.xqa()
