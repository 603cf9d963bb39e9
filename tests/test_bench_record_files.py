"""A record's file: nothing that was written is lost, one writer, and every bad file is one line."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mla_lab.bench import records
from mla_lab.bench.records import Record, read, schema
from mla_lab.cli import main
from mla_lab.core import files
from mla_lab.core.errors import InvalidInput
from mla_lab.core.resources import data_dir

from .house import ROOT
from .test_bench_harness import CASES, FakePeer, run

#: processes killed by the stress test; MLA_LAB_KILLS=200 is the whole of it
KILLS = int(os.environ.get("MLA_LAB_KILLS", "8"))


def written(path: Path, *values: int) -> Path:
    record = Record(path)
    for value in values:
        record.append({"kind": "end", "value": value})
    record.close()
    return path


def values(path: Path) -> list[int]:
    return [row["value"] for row in read(path)]


def test_a_whole_last_line_without_its_newline_is_kept(tmp_path: Path) -> None:
    path = written(tmp_path / "r", 1, 2)
    path.write_bytes(path.read_bytes()[:-1])
    assert values(written(path, 3)) == [1, 2, 3]


def test_opening_a_whole_record_does_not_touch_it(tmp_path: Path) -> None:
    path = written(tmp_path / "r", 1, 2)
    before = (path.stat().st_ino, path.stat().st_mtime_ns, path.read_bytes())
    Record(path).close()
    assert (path.stat().st_ino, path.stat().st_mtime_ns, path.read_bytes()) == before


def test_only_the_torn_line_is_cut_and_never_in_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = written(tmp_path / "r", 1, 2)
    path.chmod(0o640)
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"schema": 1, "ti')

    def killed(old: object, new: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", killed)
        with pytest.raises(KeyboardInterrupt):
            Record(path)
    assert path.read_bytes().startswith(whole)
    Record(path).close()
    assert path.read_bytes() == whole
    assert path.stat().st_mode & 0o777 == 0o640
    assert [p.name for p in tmp_path.iterdir()] == ["r"]


def test_a_second_writer_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path / "r", 1)
    first = Record(path)
    code = "import pathlib, sys; from mla_lab.bench.records import Record; "
    code += f"Record(pathlib.Path({str(path)!r}))"
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True,
    )  # fmt: skip
    assert "which another process writes; supported: one writer at a time" in done.stderr
    first.close()
    assert values(written(path, 2)) == [1, 2]


def test_a_full_disk_is_one_sentence_and_leaves_no_half_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = written(tmp_path / "r", 1)
    write, record = os.write, Record(path)

    def full(descriptor: int, data: bytes) -> int:
        if len(data) < 20:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(descriptor, data[: len(data) // 2])

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        with pytest.raises(InvalidInput, match="No space left"):
            record.append({"kind": "end", "value": 2})
    record.append({"kind": "end", "value": 3})
    record.close()
    assert values(path) == [1, 3]


STRESS = """
import os, random, signal, sys, time
from pathlib import Path
from mla_lab.bench.records import Record
path, kills = Path(sys.argv[1]), int(sys.argv[2])
draw, said = random.Random(1), 0
for turn in range(kills):
    told, tell = os.pipe()
    child = os.fork()
    if not child:
        value = turn * 10**6
        while True:
            record = Record(path)
            for _ in range(3):
                record.append({"kind": "end", "value": value, "pad": "x" * 3000})
                os.write(tell, b"%d\\n" % value)
                value += 1
            record.close()
    os.close(tell)
    # every other one is killed while it appends, the rest while they open
    first = os.read(told, 1) if turn % 2 else b""
    time.sleep(draw.random() * 0.03)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    with open(told) as heard:
        print(first.decode() + heard.read(), end="")
    if turn % 3 == 0:  # as a kill within a write leaves it
        with path.open("ab") as file:
            file.write(b'{"schema": 1, "kind": "end", "val')
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_no_row_is_lost_to_kills(tmp_path: Path) -> None:
    path = written(tmp_path / "r", -1)
    done = subprocess.run(
        [sys.executable, "-c", STRESS, str(path), str(KILLS)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    Record(path).close()
    found = values(path)
    assert len(found) == len(set(found))
    assert {int(line) for line in done.stdout.split()} <= set(found)
    assert len(done.stdout.split()) >= KILLS // 2
    assert [p.name for p in tmp_path.iterdir() if not p.name.startswith(".")] == ["r"]


# --- files that somebody else wrote ----------------------------------------------------------

END = {"schema": 1, "time": "2026-11-20T00:00:00+00:00", "kind": "end"}
RESULT = END | {
    "kind": "result", "case": "c", "peer": "p", "part": 0, "status": "ok", "us": 1.0,
    "rounds": {"us": [1.0]},
    "problem": {
        "batch": 1, "q_lens": 1, "kv_lens": 1, "heads": 1, "q_dtype": "bf16",
        "kv_format": "bf16", "page_size": 64, "top_k": 0,
    },
}  # fmt: skip


def without(row: dict[str, object], name: str) -> dict[str, object]:
    return {key: value for key, value in row.items() if key != name}


BAD = {
    "deep": b"[" * 200_000 + b"\n",
    "not UTF-8": b'{"schema": 1, "kind": "\xff"}\n',
    "a long number": b'{"schema": ' + b"1" * 5000 + b"}\n",
    "a list": b"[]\n",
    "no kind": json.dumps(without(END, "kind")).encode(),
    **{
        f"no {name}": json.dumps(without(RESULT, name)).encode()
        for name in ("case", "peer", "part", "status", "problem", "us", "rounds")
    },
    "no rounds of us": json.dumps(RESULT | {"rounds": {}}).encode(),
    "no batch": json.dumps(RESULT | {"problem": {}}).encode(),
    "a part that is no number": json.dumps(RESULT | {"part": True}).encode(),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_row_is_one_sentence_with_file_and_line(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "r.jsonl"
    path.write_bytes(json.dumps(END).encode() + b"\n" + BAD[name])
    assert main(["bench", "report", str(path)]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"mla-lab bench: record {path}:2")
    assert said.count("\n") == 1
    assert len(said) < 500


@pytest.mark.parametrize("verb", [["report"], ["compare", "/dev/null"]])
def test_a_record_that_cannot_be_read_is_one_sentence(
    verb: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for path, why in (("/nonexist", "No such file"), (str(tmp_path), "Is a directory")):
        assert main(["bench", *verb, path]) == 2
        said = capsys.readouterr().err
        assert said.startswith(f"mla-lab bench: record: got {path}: {why}")
        assert said.count("\n") == 1


def test_a_line_without_end_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "MAX_LINE", 1 << 20)
    (tmp_path / "r").write_bytes(b" " * (3 << 20))
    with pytest.raises(InvalidInput, match=r"r:1: got a longer line; supported: lines up to 1 MiB"):
        list(read(tmp_path / "r"))


def paths_required(node: dict[str, Any]) -> Iterator[tuple[str, set[str]]]:
    """(kind or property, required keys) of the schema."""
    for part in node["oneOf"]:
        yield part["properties"]["kind"]["const"], set(part["required"])


def test_what_is_checked_is_what_the_schema_requires() -> None:
    """The table by hand asks for nothing that a valid row may lack."""
    whole = schema()
    assert set(records.COMMON) <= set(whole["required"])
    required: dict[str, set[str]] = {}
    for kind, names in paths_required(whole):
        required[kind] = required.get(kind, names) & names
    for kind, keys in records.KINDS.items():
        assert set(keys) <= required[kind], kind
    (result,) = [p for p in whole["oneOf"] if p["properties"]["kind"]["const"] == "result"]
    assert set(records.PROBLEM) <= set(result["properties"]["problem"]["required"])


def test_the_shipped_records_pass() -> None:
    for name in ("h200_anchor", "h200_sweep", "ladder", "h200_invariant"):
        assert list(read(data_dir() / "records" / f"{name}.jsonl"))


def test_a_record_of_another_card_or_case_is_not_continued(tmp_path: Path) -> None:
    path = tmp_path / "record.jsonl"
    run(path, [FakePeer("a")])
    before = path.read_bytes()
    row = json.loads(before.splitlines()[0])
    row["environment"]["card"] = {"name": "NVIDIA H100"}
    path.write_bytes(json.dumps(row).encode() + b"\n")
    with pytest.raises(InvalidInput, match="of NVIDIA H100, to continue on a CPU"):
        run(path, [FakePeer("a")])
    path.write_bytes(before)
    longer = replace(CASES[0], problem=replace(CASES[0].problem, page_size=128))
    with pytest.raises(InvalidInput, match=f"{CASES[0].name} is another problem"):
        run(path, [FakePeer("a")], cases=[longer])
    assert path.read_bytes() == before
