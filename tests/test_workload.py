"""Trace files and their errors, replay and sample, the shipped synthetic trace."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mla_lab.core.errors import InvalidInput
from mla_lab.core.models import get_model
from mla_lab.core.problem import Problem
from mla_lab.core.resources import data_dir
from mla_lab.workload import (
    Trace,
    load_azure,
    load_mooncake,
    load_trace,
    replay,
    sample,
    shipped_trace,
    synthetic_trace,
)
from mla_lab.workload.synthetic import write

HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens"
ROWS = ("2023-11-16 18:15:46.6805900,374,44", "2023-11-16 18:15:50.9951690,396,109")
LINE = '{"timestamp": 1500, "input_length": 6758, "output_length": 500, "hash_ids": [0, 1]}'


def make_trace(rows: list[tuple[float, int, int]]) -> Trace:
    arrival, inputs, outputs = (np.array(column) for column in zip(*rows, strict=True))
    return Trace("made", arrival.astype(float), inputs, outputs)


SMALL = make_trace([(0.0, 100, 3), (1.0, 200, 0), (1.0, 300, 5), (10.0, 7, 1)])


def test_azure(tmp_path):
    path = tmp_path / "azure.csv"
    path.write_text("\n".join((HEADER, *ROWS)) + "\n\n")
    trace = load_azure(path)
    assert trace.arrival_s.tolist() == pytest.approx([0.0, 4.314579], abs=1e-6)
    assert trace.input_lens.tolist() == [374, 396]
    assert trace.output_lens.tolist() == [44, 109]
    assert trace.name == "azure.csv"
    assert len(trace) == 2
    assert repr(trace) == f"<Trace {trace.summary()}>" and "\n" not in repr(trace)


def test_azure_columns_by_name_and_zones(tmp_path):
    path = tmp_path / "azure.csv"
    path.write_text(
        "\ufeffExtra,GeneratedTokens,TIMESTAMP,ContextTokens\r\n"
        'x,5,"2024-05-10 00:00:01.5+00:00",10\r\n'
        "y,6,2024-05-10 01:00:00+01:00,20\r\n"
    )
    trace = load_trace(path)
    assert trace.arrival_s.tolist() == [1.5, 0.0]
    assert trace.input_lens.tolist() == [10, 20]
    assert trace.output_lens.tolist() == [5, 6]


def test_mooncake(tmp_path):
    path = tmp_path / "mooncake.jsonl"
    path.write_text(LINE + "\n" + LINE.replace("1500", "2750.5") + "\n")
    trace = load_trace(path)
    assert trace.arrival_s.tolist() == pytest.approx([0.0, 1.2505])
    assert trace.input_lens.tolist() == [6758, 6758]
    assert trace.output_lens.tolist() == [500, 500]


@pytest.mark.parametrize(
    ("lines", "where", "what"),
    [
        (["TIMESTAMP,ContextTokens", "x,1"], 1, "no column GeneratedTokens; supported: "),
        (["Context,Generated"], 1, "no column TIMESTAMP, ContextTokens, GeneratedTokens"),
        ([HEADER, ROWS[0], "2023-11-16 18:15:46,374"], 3, "2 fields; supported: 3 as in the"),
        ([HEADER, "2023-11-16 18:15:46,1,2,3"], 2, "4 fields; supported: 3"),
        ([HEADER, ROWS[0], "", "yesterday,374,44"], 4, "TIMESTAMP 'yesterday'; supported: a date"),
        ([HEADER, "2023-11-16,many,44"], 2, "ContextTokens 'many'; supported: a whole number"),
        ([HEADER, "2023-11-16,12,1.5"], 2, "GeneratedTokens '1.5'; supported: a whole number"),
        ([HEADER, "2023-11-16,-3,44"], 2, "ContextTokens '-3'"),
        ([HEADER, "2023-11-16,,44"], 2, "ContextTokens ''"),
        ([HEADER, "2023-11-16,99999999999,44"], 2, "ContextTokens '99999999999'"),
        ([HEADER, "2023-11-16,3000000000,44"], 2, "ContextTokens 3000000000"),
    ],
)
def test_broken_csv_names_file_and_line(tmp_path, lines, where, what):
    path = tmp_path / "broken.csv"
    path.write_text("\n".join(lines))
    with pytest.raises(InvalidInput, match=re.escape(f"trace {path}, line {where}: got {what}")):
        load_trace(path)


def edited(**fields: object) -> str:
    row = json.loads(LINE)
    row.update(fields)
    return json.dumps({k: v for k, v in row.items() if v != "gone"})


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ('{"timestamp": 1500, "input_', "broken JSON ("),
        ("[1, 2]", "a JSON list; supported: one JSON object a line"),
        (edited(output_length="gone"), "no output_length; supported: "),
        (edited(timestamp="gone", hash_ids="gone"), "no timestamp, hash_ids"),
        (edited(timestamp="soon"), "timestamp 'soon'; supported: milliseconds"),
        (edited(timestamp=True), "timestamp True"),
        (edited(timestamp=-1), "timestamp -1"),
        (edited(timestamp=float("nan")), "timestamp nan"),
        (edited(input_length=None), "input_length None; supported: a whole number"),
        (edited(input_length=True), "input_length True"),
        (edited(input_length=10.5), "input_length 10.5"),
        (edited(output_length=-4), "output_length -4"),
        (edited(output_length="4"), "output_length '4'"),
        (edited(timestamp=10**400), "timestamp 1000"),
        (edited(timestamp=1e15), "timestamp 1000000000000000.0; supported: milliseconds from 0 to"),
        ("[" * 100_000, "nested too deeply"),
        ('{"timestamp": ' + "1" * 5000 + "}", "no JSON (Exceeds the limit"),
        (edited(hash_ids=7), "hash_ids 7; supported: a list"),
    ],
)
def test_broken_json_lines_name_file_and_line(tmp_path, line, what):
    path = tmp_path / "broken.jsonl"
    path.write_text(f"{LINE}\n\n{line}\n{LINE}\n")
    with pytest.raises(InvalidInput, match=re.escape(f"trace {path}, line 3: got {what}")):
        load_trace(path)


def test_bytes_that_are_no_text(tmp_path):
    path = tmp_path / "bytes.csv"
    path.write_bytes(HEADER.encode() + b"\n2023-11-16,\xff\xfe12,3\n")
    with pytest.raises(InvalidInput, match=r"bytes\.csv, line 2: got ContextTokens"):
        load_trace(path)


def test_empty_and_missing_files(tmp_path):
    path = tmp_path / "empty.csv"
    for text in ("", "\n\n", HEADER + "\n"):
        path.write_text(text)
        with pytest.raises(
            InvalidInput, match=r"empty\.csv without a request; supported: at least"
        ):
            load_trace(path)
    for wrong in (tmp_path / "nowhere.csv", tmp_path):
        with pytest.raises(InvalidInput, match="supported: a readable file"):
            load_trace(wrong)


def test_a_trace_has_three_equal_columns():
    with pytest.raises(InvalidInput, match="trace: got arrays of shapes"):
        Trace("odd", np.zeros(2), np.zeros(2, int), np.zeros(3, int))
    with pytest.raises(ValueError, match="read-only"):
        SMALL.input_lens[0] = 1


def test_a_short_trace_is_summed_up():
    one, two = make_trace([(0.0, 5, 2)]), make_trace([(0.0, 5, 2), (0.4, 5, 2)])
    assert one.summary().startswith("made: 1 request at one moment; tokens in")
    assert two.summary().startswith("made: 2 requests in 0.4 s; tokens in")
    assert SMALL.summary().startswith("made: 4 requests in 10 s")


def test_replay_by_hand():
    """Tokens every 0.5 s: request 0 decodes in [0, 1.5), 2 in [1, 3.5), 3 in [10, 10.5)."""
    expected = {
        -0.1: [],
        0.0: [(0, 101)],
        0.5: [(0, 102)],
        1.0: [(0, 103), (2, 301)],
        1.49: [(0, 103), (2, 301)],
        1.5: [(2, 302)],
        3.4: [(2, 305)],
        3.5: [],
        10.4: [(3, 8)],
    }
    for t, decoding in expected.items():
        step = replay(SMALL, t, 0.5)
        assert list(zip(step.request.tolist(), step.kv_lens, strict=True)) == decoding


def test_replay_counts_steps_in_spite_of_binary_fractions():
    trace = make_trace([(0.0, 10, 100)])
    assert [replay(trace, k * 0.1, 0.1).kv_lens[0] for k in range(100)] == list(range(11, 111))


@settings(max_examples=50, deadline=None)
@given(st.floats(0, 120), st.sampled_from((0.02, 0.05, 0.3)))
def test_replay_against_the_definition(t, step_time):
    trace = synthetic_trace(60)
    step = replay(trace, t, step_time)
    decoding = {}
    for i, (arrival, tokens_in, tokens_out) in enumerate(
        zip(trace.arrival_s, trace.input_lens, trace.output_lens, strict=True)
    ):
        done = int(np.floor((t - arrival) / step_time + 1e-9))
        if arrival <= t and done < tokens_out:
            decoding[i] = int(tokens_in) + done + 1
    assert dict(zip(step.request.tolist(), step.kv_lens, strict=True)) == decoding


def test_sample_is_deterministic_and_in_range():
    trace = synthetic_trace()
    step = sample(trace, 500, seed=3)
    assert step.kv_lens == sample(trace, 500, seed=3).kv_lens
    assert step.kv_lens != sample(trace, 500, seed=4).kv_lens
    assert len(step) == 500
    assert (step.position >= 1).all()
    assert (step.position <= trace.output_lens[step.request]).all()
    assert step.kv_lens[0] == trace.input_lens[step.request[0]] + step.position[0]


def test_sample_weighs_by_output_and_is_uniform_within():
    step = sample(SMALL, 9000, seed=0)
    pairs, counts = np.unique(np.stack([step.request, step.position]), axis=1, return_counts=True)
    # nine decode steps in all, each as likely; request 1 writes nothing
    assert pairs.T.tolist() == [[0, p] for p in (1, 2, 3)] + [[2, p] for p in range(1, 6)] + [
        [3, 1]
    ]
    assert np.abs(counts - 1000).max() < 5 * np.sqrt(1000)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: sample(SMALL, 0, 0), "n: got 0; supported: 1 or more"),
        (lambda: sample(SMALL, 2.5, 0), "n: got 2.5; supported: 1 or more"),
        (lambda: synthetic_trace(0), "requests: got 0; supported: 1 or more"),
        (lambda: sample(make_trace([(0.0, 5, 0)]), 1, 0), "trace: got made without output tokens"),
        (lambda: replay(SMALL, 0.0, 0.0), "step_time: got 0.0; supported: seconds above 0"),
        (lambda: replay(SMALL, float("nan"), 0.1), "t: got nan; supported: a finite time"),
        (lambda: replay(SMALL, 5.0, 0.1).problem(get_model("kimi-k2")), "a moment when no"),
        (lambda: sample(SMALL, 2, 0).problem(get_model("kimi-k2"), 0), "q_len: got 0"),
    ],
)
def test_wrong_requests(call, message):
    with pytest.raises(InvalidInput, match=message):
        call()


def test_problem_of_a_step():
    step = replay(SMALL, 1.0, 0.5)
    model = get_model("deepseek-v3")
    assert step.problem(model) == Problem((1, 1), (103, 301), heads=128)
    drafts = step.problem(model, 4, tensor_parallel=8, page_size=32)
    assert drafts == Problem((4, 4), (106, 304), heads=16, page_size=32)


def test_shipped_files_are_the_generator_s(tmp_path):
    made = synthetic_trace()
    for path in write(tmp_path):
        shipped = data_dir() / "runtime" / path.name
        assert shipped.read_text() == path.read_text()
        loaded = load_trace(shipped)
        assert loaded.arrival_s.tolist() == pytest.approx(made.arrival_s.tolist(), abs=1e-6)
        assert loaded.input_lens.tolist() == made.input_lens.tolist()
        assert loaded.output_lens.tolist() == made.output_lens.tolist()
    assert (
        load_mooncake(data_dir() / "runtime/synthetic_trace.jsonl").summary()
        == shipped_trace().summary()
    )


def test_synthetic_trace_follows_its_law():
    trace = synthetic_trace(20000, seed=1)
    assert np.median(trace.input_lens) == pytest.approx(1024, rel=0.05)
    assert np.median(trace.output_lens) == pytest.approx(160, rel=0.05)
    assert np.log(trace.output_lens).std() == pytest.approx(0.8, rel=0.05)
    assert np.diff(trace.arrival_s).mean() == pytest.approx(0.5, rel=0.05)
    assert trace.input_lens.min() >= 16
    assert "20000 requests in" in trace.summary()
