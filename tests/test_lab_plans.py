"""The plan explorer and its charts: pure pictures, synchronous controls, real lengths, the map."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from mla_lab.bench.records import medians
from mla_lab.core.errors import InvalidInput
from mla_lab.core.problem import Problem
from mla_lab.lab import gantt, lengths, measuring, policies, predicted, workbook_map
from mla_lab.lab.explorer import mime_bundle
from mla_lab.lab.explorers import plan as plan_explorer
from mla_lab.plan import POLICIES, RULES
from mla_lab.plan.self_schedule import COSTS, self_schedule

NOTEBOOKS = Path(__file__).resolve().parents[1] / "notebooks"


def test_a_moved_slider_changes_the_gantt_and_its_title() -> None:
    explorer = plan_explorer.PlanExplorer()
    before = explorer.out.outputs[0]["data"]
    explorer.widgets["batch"].value = 1
    after = explorer.out.outputs[0]["data"]
    assert before != after
    assert "as fast as" in after["text/plain"] or "within" in after["text/plain"]


def test_a_gantt_is_one_bar_trace_a_role_and_side() -> None:
    explorer = plan_explorer.PlanExplorer(batch=256, kv_len=8192)
    figure = explorer.figure(explorer.state)
    assert len(figure.data) <= 2 * 5
    assert sum(len(trace.y) for trace in figure.data) > 500


def test_neighbouring_sms_that_do_the_same_share_a_bar() -> None:
    """A role's bars cover its SMs' time, each once, with fewer bars than events."""
    explorer = plan_explorer.PlanExplorer(batch=16)
    problem = explorer.problem(explorer.state)
    plan, timeline = predicted.planned(problem, "fa3")
    for bar in gantt.bars(timeline, plan):
        at = timeline.only(bar.name)
        width = np.ones(len(bar.y)) if bar.width is None else np.asarray(bar.width)
        covered = [
            (sm, base)
            for y, wide, base in zip(bar.y, width, bar.base, strict=True)
            for sm in np.arange(y - (wide - 1) / 2, y + wide / 2)
        ]
        happened = zip(timeline.sm[at], timeline.start[at].round(3), strict=True)
        assert sorted(covered) == sorted(happened)
        spent = (timeline.end[at] - timeline.start[at]).sum()
        assert abs((width * np.asarray(bar.x)).sum() - spent) < 0.002 * len(at)
        assert len(bar.y) <= max(1, len(at) / 2)


def test_a_hatched_chart_has_a_trace_a_fill() -> None:
    explorer = plan_explorer.PlanExplorer(batch=2, kv_len=1024)
    problem = explorer.problem(explorer.state)
    plan, timeline = predicted.planned(problem, "none")
    hatched = [b for b in gantt.bars(timeline, plan, kind="predicted") if b.name == "attend"]
    assert len(hatched) == 2 and all(isinstance(b.marker.color, str) for b in hatched)
    assert [row[2] for b in hatched for row in b.customdata] == [0, 1]


def test_the_picture_depends_on_the_state_alone() -> None:
    first = plan_explorer.PlanExplorer(left="greedy")
    other = plan_explorer.PlanExplorer(batch=1)
    assert first.figure(first.state) == other.figure(first.state)


def test_a_trace_file_replaces_the_preset(tmp_path: Path) -> None:
    trace = tmp_path / "mine.csv"
    trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,700,1\n")
    explorer = plan_explorer.PlanExplorer(batch=4, trace=str(trace))
    assert explorer.problem(explorer.state).kv_lens == (701,) * 4
    with pytest.raises(InvalidInput, match=r"nowhere\.csv"):
        explorer.widgets["trace"].value = str(tmp_path / "nowhere.csv")


@pytest.mark.parametrize("preset", lengths.PRESETS)
def test_presets_are_seeded_and_positive(preset: str) -> None:
    drawn = lengths.preset_lengths(preset, 32, 2048)
    assert drawn == lengths.preset_lengths(preset, 32, 2048)
    assert len(drawn) == 32
    assert min(drawn) >= 1


def test_an_unknown_preset_is_named() -> None:
    with pytest.raises(InvalidInput, match=r"supported: .*ragged"):
        lengths.preset_lengths("odd", 4, 100)


def test_no_prediction_is_quicker_than_the_read_that_the_note_states() -> None:
    for sms, kv_len in ((66, 8192), (132, 32768)):
        state = {"lengths": "all equal", "heads": 16, "batch": 64, "kv_len": kv_len, "sms": sms}
        explorer = plan_explorer.PlanExplorer(left="none", right="plain call", **state)
        read = re.search(r"reading them once takes ([\d.]+) us", explorer.note(explorer.state))
        assert read
        for policy in ("none", "plain call"):
            timeline = predicted.planned(explorer.problem(explorer.state), policy, sms)[1]
            assert timeline.makespan > float(read[1]), (sms, policy)


def test_the_policy_table_has_every_policy_quickest_first() -> None:
    table = policies.policy_table(Problem.uniform(1, 1, 8192, 128))
    assert set(table.column("policy")) == {*POLICIES, *RULES}
    best = [min(filter(None, row[-2:])) for row in table.rows]
    assert best == sorted(best)
    splits = dict(zip(table.column("policy"), table.column("splits"), strict=True))
    assert (splits["greedy"], splits["none"]) == (43, 1)


def test_a_call_without_a_plan_stands_beside_the_policies() -> None:
    """Its tiles are those that the kernels find, and each written partial counts once."""
    problem = Problem((1,) * 64, lengths.trace_lengths("", 64, 1), heads=128)
    plan, timeline = predicted.planned(problem, predicted.PLAIN)
    costs = COSTS["keep_ab_persistent"]
    found = self_schedule(problem, tile_rows=64, num_workers=132, costs=costs)
    assert np.array_equal(plan.tiles, found.tiles)
    assert timeline.makespan < predicted.planned(problem, "fa3")[1].makespan / 4
    for policy in POLICIES:
        made = predicted.planned(problem, policy)[0]
        one = made.tile_rows * (512 * 4 + 4) / 1e6
        assert predicted.partial_mb(made) == pytest.approx(made.num_slots * one)
    assert 0 < predicted.partial_mb(plan) < plan.num_slots * one


def test_the_efficiency_chart_marks_fa3s_choice() -> None:
    figure = policies.efficiency_chart(8, 128)
    assert "15 splits" in figure.layout.title.text
    assert list(figure.data[1].x) == [15]


def test_curves_are_ratios_to_the_best_policy() -> None:
    figure = policies.policy_curves(("none", "cost"), (1, 64), 4096, 128)
    assert min(min(trace.y) for trace in figure.data) == 1.0
    assert max(figure.data[0].y) > 2


def test_the_map_knows_the_stops_of_each_path() -> None:
    numbers = {e.number for e in workbook_map.NOTEBOOKS}
    assert all(set(path) <= numbers for path in workbook_map.PATHS.values())
    assert {number[0] for number in numbers} <= set(workbook_map.THEMES)


def test_the_map_shows_its_path_and_titles() -> None:
    shown = workbook_map.WorkbookMap()
    shown.widgets["path"].value = "everything"
    bundle = mime_bundle(shown.figure(shown.state))
    assert bundle["text/html"].count("<title>") == len(workbook_map.NOTEBOOKS) + 1
    assert "31_split_kv_policies.ipynb" in shown.footer.value


def test_recorded_policies_are_rows_of_the_sweep() -> None:
    """The table that arbitrates between policies: each time is that variant's in the record."""
    shown = policies.recorded_policies(heads=128)
    (run,) = measuring.runs(policies.SWEEP)
    times = medians(run.rows)
    assert len(shown.rows) >= 8
    for case, cost, greedy, fixed, count in shown.rows:
        assert cost == times[case, "keep_ab-64x1-cost"]
        assert greedy == times.get((case, "keep_ab-64x1-greedy"))
        assert fixed == times[case, f"keep_ab-64x1-fixed-{count}"]
    assert shown.source is not None
    assert shown.source.kind == "recorded"
