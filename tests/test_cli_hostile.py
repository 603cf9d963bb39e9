"""Wrong options and files of the command line: told before anything is compiled, cut or written."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from mla_lab.cli import main
from mla_lab.core.errors import InvalidInput
from mla_lab.core.problem import Problem
from mla_lab.core.resources import data_dir
from mla_lab.emulate.recorded import load, recordings
from mla_lab.plan import make_plan
from mla_lab.simulate import bounds, simulate
from mla_lab.workload import sample, shipped_trace

RUN = "bench run {} --batch 1 --kv-len 64 --heads 16 --peers torch-eager --quick --rounds 1"
RANKS = "ranks {} --device cpu --world 2 --batch 1 --kv-len 256 --heads 16 --rounds 1"


def said(capsys: pytest.CaptureFixture[str], *line: str) -> str:
    """The error of a command that is refused."""
    assert main(list(line)) != 0
    return capsys.readouterr().err


@pytest.mark.parametrize(
    "text", [b"hello\nmy notes without newline", b"one line", b"\x00\x01\n\x02"]
)
def test_a_file_that_is_no_record_stays_as_it_is(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, text: bytes
) -> None:
    path = tmp_path / "notes.txt"
    path.write_bytes(text)
    for line in (RUN, RANKS):
        assert "something else" in said(capsys, *line.format(path).split())
        assert path.read_bytes() == text


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("compile --list --set stages=2", "--set: got stages=2; supported: with --kernel"),
        ("compile --list --kernel cute/empty --set kernel=cute/keep_ab_sm90", "--set: got kernel="),
        ("compile --workers 0", "--workers: got 0"),
        ("compile --list --kernel nope", "kernel: got 'nope'"),
        ("compile --list --kernel cute/nope", "kernel: got 'cute/nope'"),
        ("doctor --json --prove r.jsonl", "--json: got it with --prove"),
        ("ladder --rounds 3", "--rounds: got 3; supported: it with --record"),
        ("plan --seed 5", "--seed: got 5; supported: it with --trace"),
        ("plan --json --tiles", "--tiles: got it with --json"),
        (
            "plan --trace synthetic --mode replay --seed 5",
            "--seed: got 5; supported: it with --mode",
        ),
        ("bundle out --kernel cute/empty --python x", "--python: got 'x'; supported: a version"),
        ("bundle out --as-wheel --python 3.12", "--python: got it beside --as-wheel"),
        ("bench sweep r.jsonl --batch 1 --per-tile 0", "--per-tile: got 0; supported: 1 or more"),
        ("bench sweep r.jsonl --batch 1 --backend nope", "--backend: got 'nope'; supported:"),
        ("verify published r.jsonl --device cpu --dtypes ,", "--dtypes: got none; supported:"),
        ("live --only pages --into data --traces nowhere", "--traces: got nowhere"),
        ("xray --kernel cuda/planner --ptx --sass", "--ptx: got it with --sass"),
        ("bench run r --only b1_q1_h16_kv1024$ --page-size 32", "--page-size: got [32]"),
        ("bench run r --q-dtype fp16", "--q-dtype: got ['fp16']"),
        ("bench run r --batch 1 --seeds 4", "--seeds: got [4]; supported: it with --cases trace"),
        ("bench run r --batch 1 --formats e4m3 --q-dtype fp16", "--q-dtype: got ['fp16']"),
        ("bench run r --cases trace --seeds -1", "seed: got -1"),
        (
            "bench run r --cases anchor,x",
            "--cases: got 'x'; supported: ('anchor', 'twin', 'drawn',",
        ),
        ("tune r --cases traces", "'heldout', 'trace')"),
        ("verify emulated r.jsonl --build nope", "--build: got 'nope'"),
        ("verify mutations r.jsonl --build nope", "--build: got 'nope'"),
        ("verify kinds r.jsonl --calls 0", "--calls: got 0"),
        ("verify emulated r.jsonl --jobs 0", "--jobs: got 0"),
        ("verify pairwise r.jsonl --device cpu --only 1 --first 2", "--first: got 2"),
        (
            "verify sm100 r.jsonl --list builds --seconds 5",
            "--seconds: got 5.0; supported: it without",
        ),
        ("verify pairwise r.jsonl --device cpu --again --first 2", "--again: got it with --first"),
        ("verify pairwise r.jsonl --device cpu --again --only 2", "--again: got it with --only"),
        ("verify pairwise nowhere/r.jsonl --device cpu", "record: got nowhere/r.jsonl"),
        ("emulate --kernel cute/keep_ab_sm90 --batch 0", "--batch: got 0"),
        ("emulate --kernel cute/keep_ab_sm90 --q-len 0", "--q-len: got 0"),
        ("emulate --recorded --strict", "--strict: got no --check"),
        ("emulate --recorded --seed 99999999999999999999999", "--seed: got 9999"),
        ("emulate --recorded --trace t.json", "--trace: got"),
        ("emulate --recorded --trace absent/t.json", "--trace: got 'absent/t.json'"),
        ("emulate --recorded --trace .", "--trace: got '.'"),
        (
            "emulate --kernel cute/keep_ab_sm90 --record absent/r.zip",
            "--record: got 'absent/r.zip'",
        ),
        ("emulate --recorded --schedule odd --seed 3", "--schedule: got 'odd'"),
        ("emulate --recorded --numbers odd", "--numbers: got 'odd'"),
        ("emulate --kernel cute/keep_ab_sm90 --batch 200000000", "--batch: got 200000000"),
        ("emulate rank_merge", "BUILD: got 'rank_merge'"),
        ("bench rank-kernels r.jsonl --heads 100000000000", "ranks x batch x heads x 512: got"),
        ("bench rank-kernels r.jsonl --ranks 2,2", "ranks: got (2, 2)"),
        ("bench rank-kernels r.jsonl --rounds 0", "rounds: got 0"),
        ("bench rank-kernels nowhere/r.jsonl", "No such file"),
        ("emulate --recorded --seed 3", "--recorded with --seed 3 and --schedule fair"),
        ("emulate --kernel cute/found_tiles", "--kernel: got cute/found_tiles"),
        ("emulate --kernel cute/rank_merge", "--kernel: got cute/rank_merge"),
        ("emulate --kernel cute/rank_exchange", "--kernel: got cute/rank_exchange"),
        ("emulate --kernel cute/keep_ab_sm90 --kv-len 99999999999", "emulate: got a call of"),
        ("emulate --kernel cute/keep_ab_sm90 --kv-len 3,4 --batch 1", "--kv-len: got 2 lengths"),
        ("decode --batch 1 --kv-len 100 --calls 1 --page-size 2147483647", "decode: got a call of"),
    ],
)
def test_what_would_have_no_effect_or_no_meaning_is_refused(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    line: str,
    says: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert says in said(capsys, *line.split())
    assert not list(tmp_path.iterdir())


def test_a_list_that_is_none_says_what_one_is(capsys: pytest.CaptureFixture[str]) -> None:
    for text in ("1,x", "1,", ""):
        with pytest.raises(SystemExit):
            main(["ranks", "r.jsonl", f"--batch={text}"])
        assert f"--batch: got {text!r}; supported: whole numbers" in capsys.readouterr().err


def test_records_of_another_kind_are_not_shown(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    empty = tmp_path / "empty.jsonl"
    empty.touch()
    assert "record: got" in said(capsys, "ladder", "--show", str(empty))
    assert "without rows" in said(capsys, "bench", "report", str(empty))
    assert "--into: got" in said(capsys, "live", "--only", "pages", "--into", str(empty))


def test_a_table_of_no_case_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for record, table, other in (
        ("h200_traces.jsonl", "anchor", "trace"),
        ("h200_anchor.jsonl", "twin", "anchor-rates"),
        ("h200_traces.jsonl", "short", "b1_q1_h128_kv8192"),
    ):
        path = str(data_dir() / "records" / record)
        assert other in said(capsys, "bench", "report", path, "--table", table)


@pytest.mark.parametrize("held", ["my notes\n", '{"my": "data"}\n', '{"kind": "run"}\n'])
@pytest.mark.parametrize(
    "line",
    [
        "verify kinds PATH --calls 1",
        "verify pairwise PATH --device cpu --first 1",
        "verify costs PATH --device cpu",
        "verify lse PATH",
        "verify card-bits PATH",
        "verify emulated PATH --seconds 0",
        "verify mutations PATH --seconds 0",
        "verify sm100 PATH --seconds 0",
        "verify builds PATH",
        "verify builds PATH --elsewhere",
    ],
)
def test_a_record_replaces_no_other_file(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, line: str, held: str
) -> None:
    path = tmp_path / "file"
    path.write_text(held)
    assert "which holds" in said(capsys, *line.replace("PATH", str(path)).split())
    assert path.read_text() == held


@pytest.mark.parametrize("held", ['{"my": "data"}\n', '{"kind": "run", "what": "pairwise"}\n'])
def test_rank_kernels_append_to_no_other_file(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, held: str
) -> None:
    path = tmp_path / "file"
    path.write_text(held)
    for line in ("bench rank-kernels PATH", RANKS.replace("{}", "PATH")):
        words = line.replace("PATH", str(path)).split()
        assert "which holds something else" in said(capsys, *words)
        assert path.read_text() == held


def test_an_archive_of_something_else_stays_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "archive.zip"
    path.write_bytes(b"no archive")
    with pytest.raises(InvalidInput, match="archive: got"):
        load(recordings()[0]).save(path)
    assert path.read_bytes() == b"no archive"
    assert not zipfile.is_zipfile(path)


def test_numbers_of_plans_samples_and_simulations() -> None:
    problem = Problem.uniform(2, 1, 300, 16)
    for wrong in (1.5, 10**12):
        with pytest.raises(InvalidInput, match="num_workers: got"):
            make_plan(problem, num_workers=wrong)  # type: ignore[arg-type]
    plan = make_plan(problem)
    for run in (simulate, bounds):
        for cluster in (0, 17, 1000):
            with pytest.raises(InvalidInput, match=f"cluster: got {cluster}"):
                run(plan, cluster=cluster)
    for seed in (-1, None):
        with pytest.raises(InvalidInput, match="seed: got"):
            sample(shipped_trace(), 4, seed)  # type: ignore[arg-type]


def test_doctor_names_a_cache_in_which_no_file_can_be_made(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from mla_lab.api import doctor

    file = tmp_path / "file"
    file.touch()
    monkeypatch.setenv("MLA_LAB_CACHE_DIR", str(file))
    cache = next(f for f in doctor.examine() if f.name == "cache")
    assert not cache.there


def test_the_package_lists_its_public_names() -> None:
    import mla_lab

    assert {"trtllm_batch_decode_with_kv_cache_mla", "Problem"} <= set(dir(mla_lab))


def test_a_record_of_another_verb_is_not_taken_for_one_s_own(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "builds.jsonl"
    rows = '{"kind": "run", "what": "builds"}\n{"kind": "case", "name": "a", "status": "ok"}\n'
    path.write_text(rows)
    for line in ("emulated PATH", "mutations PATH", "card-bits PATH --compare"):
        assert "'builds'" in said(capsys, "verify", *line.replace("PATH", str(path)).split())
    wrong = said(capsys, "verify", "planted", str(tmp_path / "new"), "--rows", str(path))
    assert "--rows: got no tool" in wrong
    assert path.read_text() == rows
