"""Notebook 34's explorer: batches of a trace, predictions with their errors, the step as a file."""

from __future__ import annotations

import argparse
import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from traitlets import Bunch

from mla_lab import lab
from mla_lab.bench.records import problem_of as problem_of_row
from mla_lab.bench.records import read, results
from mla_lab.cli.commands._problem import add_problem_options, problem_of
from mla_lab.core.errors import InvalidInput
from mla_lab.core.models import get_model
from mla_lab.lab import measuring, serving_day
from mla_lab.workload import replay, shipped_trace


def test_the_curve_counts_every_request_of_the_trace() -> None:
    moments, counts = serving_day.batches("", 30)
    assert len(moments) == serving_day.MOMENTS and counts.max() > 1
    slower = serving_day.batches("", 60)[1]
    assert slower.sum() > counts.sum(), "requests that take longer are more at a time"


def test_the_curve_ends_with_the_last_token_of_any_request(tmp_path: Path) -> None:
    moments, _ = serving_day.batches("", 30)
    trace = shipped_trace()
    assert len(replay(trace, float(moments[-1]) - 0.02, 0.03))
    assert not len(replay(trace, float(moments[-1]) + 0.02, 0.03))
    path = tmp_path / "long_first.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2026-01-01 00:00:00,900,4000\n2026-01-01 00:00:01,900,1\n"
    )
    moments, counts = serving_day.batches(str(path), 30)
    assert moments[-1] == pytest.approx(4000 * 0.03)
    assert set(counts[2:-1]) == {1}


def test_a_moment_without_requests_goes_to_the_nearest_that_has_some() -> None:
    assert all(len(serving_day.step_at("", share / 10, 1)) for share in range(11))
    moments, counts = serving_day.batches("", 1)
    idle = next(p for p in range(0, 101, 2) if not counts[round(p / 100 * (len(counts) - 1))])
    explorer = lab.TuneExplorer()
    figure = explorer.figure({**explorer.state, "moment": idle, "step_ms": 1})
    (line,) = (shape for shape in figure.layout.shapes if shape.xref == "x")
    assert counts[list(moments).index(line.x0)], "the line stands at a moment without a step"
    assert "(nearest step)" in [note.text for note in figure.layout.annotations]
    chosen = explorer.picture()
    assert "(nearest step)" not in [note.text for note in chosen.layout.annotations]


def test_recorded_steps_lie_around_the_prediction() -> None:
    errors = serving_day.errors()
    assert errors.steps >= 20 and errors.card == "NVIDIA H200"
    assert 0.8 < errors.low < errors.middle < errors.high < 1.25


@pytest.mark.parametrize("state", [{}, {"tp": 8, "drafts": 2, "kind": "KV e4m3", "moment": 20}])
def test_the_command_below_makes_the_same_call(state: dict[str, Any], tmp_path: Path) -> None:
    explorer = lab.TuneExplorer(**state)
    path = explorer.write(tmp_path)
    call, bench = serving_day.commands(str(path), explorer.state, 3)
    parser = argparse.ArgumentParser()
    add_problem_options(parser)
    same = problem_of(parser.parse_args(call.split()[2:])).problem
    mine = explorer.problem(explorer.state)
    assert (same.kv_lens, same.q_lens, same.heads) == (mine.kv_lens, mine.q_lens, mine.heads)
    assert (same.q_dtype, same.kv_format) == (mine.q_dtype, mine.kv_format)
    assert bench.startswith("mla-lab bench run")


def test_what_notebook_34_says_of_a_rank_and_of_an_engine() -> None:
    """V2-Lite has the heads of one of V3's 8 ranks; green is the plain call; errors are of it."""
    assert get_model("deepseek-v2-lite").heads == get_model("deepseek-v3").heads // 8
    explorer = lab.TuneExplorer()
    us = serving_day.policy_us(explorer.problem(explorer.state))
    assert us["plain call"] < 1.1 * us["cost"] < us["none"]
    rows = [row for run in measuring.runs(serving_day.RECORD) for row in run.rows]
    ours = [row for row in rows if row.get("peer") == serving_day.PEER]
    assert ours and {row["notes"]["max_seq_len"] for row in ours} == {131_072}


def test_bench_takes_the_written_step(tmp_path: Path) -> None:
    from mla_lab.cli import build_parser

    explorer = lab.TuneExplorer()
    _, bench = serving_day.commands(str(explorer.write(tmp_path)), explorer.state, 3)
    build_parser().parse_args(bench.split()[1:])


def test_an_uploaded_trace_is_shown_and_a_bad_one_names_its_line() -> None:
    explorer = lab.TuneExplorer()
    rows = "TIMESTAMP,ContextTokens,GeneratedTokens\n2026-01-01 00:00:00,900,50\n"
    explorer.upload(rows.encode())
    assert explorer.title().startswith("1 request decodes")
    before = explorer.state["trace"]
    with pytest.raises(InvalidInput, match="line 2"):
        explorer.upload(b"TIMESTAMP,ContextTokens,GeneratedTokens\nnoon,9,9\n")
    assert explorer.state["trace"] == before


def test_buttons_show_their_errors_and_take_the_same_file_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    explorer = lab.TuneExplorer()
    upload, save = explorer.layout().children[0].children
    head = b"TIMESTAMP,ContextTokens,GeneratedTokens\n"
    file = {"name": "t.csv", "type": "", "size": 1, "last_modified": datetime.now(UTC)}
    good = (Bunch(file, content=head + b"2026-01-01 00:00:00,900,50\n"),)
    upload.value = (Bunch(file, content=head + b"noon,9,9\n"),)
    (shown,) = explorer.out.outputs
    assert len(shown["traceback"]) == 1 and "line 2" in shown["traceback"][0]
    for _ in range(2):
        explorer.widgets["trace"].value = ""
        upload.value = good
        assert explorer.title().startswith("1 request decodes")
    save.click()
    assert save.description == "wrote step.jsonl, 1 request"
    explorer.widgets["trace"].value = ""
    assert save.description == "write step.jsonl", "that step is not in the file"
    monkeypatch.setattr(serving_day, "write_step", lambda *_: (tmp_path / "no" / "f").open("w"))
    save.click()
    assert explorer.out.outputs[0]["ename"] == "FileNotFoundError"
    explorer.redraw()


def test_a_trace_without_a_step_is_told(tmp_path: Path) -> None:
    path = tmp_path / "silent.csv"
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2026-01-01 00:00:00,900,0\n")
    with pytest.raises(InvalidInput, match=r"trace: got silent\.csv: no request decodes"):
        serving_day.step_at(str(path), 0.5, 30)


def test_no_error_bars_on_a_card_without_a_record() -> None:
    explorer = lab.TuneExplorer(card="H100")
    assert "No error bars" in explorer.note(explorer.state)
    assert shipped_trace().summary().split(":")[0] in explorer.note(explorer.state)


def test_both_commands_below_run(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """The printed lines, run: the call against its oracle, the benchmark for one round on a CPU."""
    from mla_lab.cli import main

    explorer = lab.TuneExplorer(tp=8, moment=0)
    path, step = explorer.write(tmp_path), explorer.step(explorer.state)
    call, bench = serving_day.commands(str(path), explorer.state, len(step))
    assert not main([*call.split()[1:], "--backend", "torch", "--device", "cpu", "--json"])
    told = json.loads(capsys.readouterr().out)
    assert told["error"]["good"]
    assert told["problem"]["kv_lens"] == list(step.kv_lens)
    record = tmp_path / "record.jsonl"
    words = bench.replace("record.jsonl", str(record)).split()[1:]
    quick = "--seeds 0 --rounds 1 --rotation-mb 1 --quick --no-ceilings --no-preflight"
    peer = "--peers mla-lab-torch --device cpu"
    assert not main([*words, *quick.split(), *peer.split()])
    (row,) = results(read(record), "ok")
    assert row["us"] > 0 and problem_of_row(row).kv_lens == step.kv_lens
