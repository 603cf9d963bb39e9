"""Planted bugs: ours on each model, what a card runs of them, and how its tools' words are read."""

from __future__ import annotations

import json
import shutil
import struct
from pathlib import Path

import pytest

from mla_lab.cli import main
from mla_lab.core.resources import data_dir
from mla_lab.lab import planted
from mla_lab.verify import planted_tables, planted_tools
from mla_lab.verify.record import read

RECORD = data_dir() / "records/planted.jsonl"
KINDS = {
    "a phase lapped": "parity alias",
    "one buffer, one barrier a tile": "race",
    "a unit outside its stage": "race",
    "a flag before its data": "race",
    "a worker behind the last item": "out of bounds",
    "no barrier between warps": "unwritten",
    "no barrier inside a warp": "race",
    "a store behind shared memory": "out of bounds",
    "a misaligned load": "misaligned",
    "shared memory that nobody wrote": "unwritten",
    "global memory that nobody wrote": "",
    "a barrier of fewer threads": "deadlock",
    "half a warp at an aligned barrier": "deadlock",
    "an mbarrier that waits for one more": "deadlock",
    "no cluster barrier": "unwritten",
    "a peer that has exited": "exited",
}


def first(found: list[str]) -> str:
    return found[0].split(": ")[1] if found else ""


def test_models_are_reported_and_their_twins_are_not() -> None:
    assert {*planted.BREAKS, *KINDS} == set(planted.names())
    assert {name: first(planted.ours(name, True)) for name in KINDS} == KINDS
    assert [name for name in KINDS if planted.ours(name, False)] == []


def test_a_planted_kernel_is_the_changed_ptx() -> None:
    name = "delete the proxy fences behind P"
    assert first(planted.ours(name, True)) == "proxy fence"
    whole, broken = (planted.case(name, b).kernel.text for b in (False, True))
    gone = whole.count("fence.proxy.async") - broken.count("fence.proxy.async")
    assert gone == broken.count("nanosleep.u32 0;") > 0


@pytest.mark.skipif(shutil.which("ptxas") is None, reason="needs ptxas")
def test_a_card_gets_machine_code_launch_and_tensors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planted, "names", lambda: ["global memory that nobody wrote"])
    record = tmp_path / "record.jsonl"
    line = ["verify", "planted", str(record), "--pack", str(tmp_path / "packed")]
    assert main(line) == 0
    (broken,) = (tmp_path / "packed").glob("*wrote.json")
    facts = json.loads(broken.read_text())
    assert (broken.with_suffix(".cubin")).read_bytes()[:4] == b"\x7fELF"
    assert facts["grid"] == [1, 1, 1] and facts["results"] == [2] and len(facts["tensors"]) == 3
    assert [bool(t["data"]) for t in facts["tensors"]] == [False, True, True]
    params = [bytes.fromhex(p) for p in facts["params"]]
    at = [planted_tools.moved(p, facts["tensors"], (1000, 2000, 3000)) for p in params]
    assert [struct.unpack("<Q", p)[0] for p in at] == [1000, 2000, 3000]
    assert [row["name"] for row in read(record)[1:]] == ["global memory that nobody wrote"]


SAID = """========= COMPUTE-SANITIZER
========= Error: Potential RAW hazard detected at __shared__ 0x400 in block (0,0,0) :
=========     Write Thread (0,0,0) at k+0x90 in model.ptx:5
=========
result 0123456789abcdef
========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)
"""


def test_words_of_a_tool_become_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "no barrier between warps"
    monkeypatch.setattr(planted, "names", lambda: [name])
    row = planted_tools.judged("racecheck", SAID, 0)
    assert (row["end"], row["errors"], row["result"]) == ("exit", 1, "0123456789abcdef")
    assert row["first"][0].startswith("Error: Potential RAW hazard")
    assert planted_tools.judged("memcheck", "", None)["end"] == "hang"
    alone = planted_tools.judged(planted_tools.ALONE, "DRIVER: cuCtxSynchronize: error 716", 1)
    assert (alone["end"], alone["first"]) == ("failed", "cuCtxSynchronize: error 716")
    tools = [{"kind": "run", "card": "X"}]
    for file in ("no-barrier-between-warps", "no-barrier-between-warps-mended"):
        tools.append({"kind": "case", "name": file, "tool": "racecheck", **row})
    _, found = planted.rows(tools)
    assert found["name"] == name and found["mended"]["racecheck"]["errors"] == 1
    assert planted_tables.verdict(found, "racecheck") == "RAW hazard"
    assert planted_tables.verdict(found, "memcheck") == "not run"
    # a tool that ended early is not a silent one
    found["planted"]["memcheck"] = planted_tools.judged("memcheck", "Internal error", 1)
    assert planted_tables.verdict(found, "memcheck") == "no summary"
    assert "memcheck 0 of 1" in planted_tables.summary([{}, found])


@pytest.mark.skipif(not RECORD.exists(), reason="no record: mla-lab verify planted")
def test_what_is_on_record_is_what_the_checks_say() -> None:
    for row in read(RECORD)[1:]:
        assert not row["mended"]["ours"]
        if row["name"] in KINDS:
            assert row["planted"]["ours"] == planted.ours(row["name"], True)
