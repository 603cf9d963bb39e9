"""Sweeps spread over a Ray cluster of this machine's cores; skipped where ray is not installed."""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mla_lab.bench import Record, read, results
from mla_lab.bench.cases import Case
from mla_lab.bench.measure import Method
from mla_lab.bench.tune import cluster
from mla_lab.core.errors import Unsupported
from mla_lab.core.problem import Problem

PLAIN = {"isolated": False, "planned": False, "ceilings": False}
METHOD = Method(rounds=1, warmups=0, leads=1, rotation_bytes=1, min_launches=1, **PLAIN)
CASES = [Case(f"case_{n}", "grid", Problem((1,), (n,), 16, page_size=64)) for n in (64, 128)]
SETTINGS = cluster.ClusterSweep(METHOD, "cpu", "torch", 1, ("torch-eager",))


@pytest.fixture
def record(tmp_path: Path) -> Record:
    return Record(tmp_path / "sweep.jsonl")


def test_rows_of_a_case_name_their_worker() -> None:
    rows = cluster.measure_case(SETTINGS, CASES[0], [])
    found = results(rows)
    assert {row["case"] for row in found} == {"case_64"}
    assert "torch-eager" in {row["peer"] for row in found if row["status"] == "ok"}
    assert all(row["worker"]["card"] == "CPU" for row in rows)
    again = cluster.measure_case(SETTINGS, CASES[0], found)
    settled = {row["peer"] for row in found if row["status"] in ("ok", "refused")}
    assert not settled & {row["peer"] for row in results(again)}


class _Error(Exception):
    pass


class _TaskError(_Error):
    pass


class _Ray:
    """Ray's wait and get over results that are there; some workers have died, one task raised."""

    class exceptions:
        RayError = _Error
        RayTaskError = _TaskError

    @staticmethod
    def wait(refs: list[Any], num_returns: int) -> tuple[list[Any], list[Any]]:
        return refs[-1:], refs[:-1]

    @staticmethod
    def get(ref: tuple[str, int]) -> Any:
        name, attempt = ref
        if name == "case_64" or (name == "case_128" and attempt == 1):
            raise _Error("the worker died.\nand more")
        if name == "case_256":
            raise _TaskError("a task raised\nand more")
        return [{"kind": "end", "status": f"{name} in attempt {attempt}"}]


def test_a_dead_worker_s_case_runs_again_and_loses_itself_alone(record: Record) -> None:
    told: list[tuple[int, int, str]] = []
    cases = [replace(CASES[0], name=f"case_{n}") for n in (32, 64, 128, 256)]
    lost = cluster._collect(
        _Ray, cases, lambda case, attempt: (case.name, attempt), record, lambda *s: told.append(s)
    )
    assert lost == ["case_256", "case_64"]
    assert [row["status"] for row in read(record.path)] == [
        "case_128 in attempt 2",
        "case_32 in attempt 1",
    ]
    assert told[:3] == [
        (1, 4, "case_256: a task raised"),
        (1, 4, "case_128: the worker died. It runs again, attempt 2 of 3."),
        (2, 4, "case_128: 0 results"),
    ]
    assert told[-2:] == [(3, 4, "case_64: the worker died."), (4, 4, "case_32: 0 results")]


@pytest.mark.parametrize("address", ["local", "10.0.0.1:6379"])
def test_a_cluster_that_does_not_answer_is_one_sentence(
    address: str, record: Record, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[bool] = []

    def init(given: str | None, **_: Any) -> None:
        assert given == (None if address == "local" else address)
        raise Exception("The node timed out during startup.\nand more")

    ray = SimpleNamespace(init=init, shutdown=lambda: closed.append(True))
    monkeypatch.setitem(sys.modules, "ray", ray)
    says = f"--ray: got {address}, where Ray says: The node timed out during startup.; supported"
    with pytest.raises(Unsupported, match=re.escape(says)):
        cluster.spread(CASES, record, SETTINGS, address, lambda *s: None)
    assert closed == [True] and not record.rows


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_local_cluster_fills_one_record_and_continues_it(record: Record) -> None:
    pytest.importorskip("ray")
    told: list[tuple[int, int, str]] = []
    assert cluster.spread(CASES, record, SETTINGS, "local", lambda *s: told.append(s)) == []
    ok = results(read(record.path), "ok")
    assert {row["case"] for row in ok} == {"case_64", "case_128"}
    assert len({row["worker"]["process"] for row in ok}) == 2, "a process each"
    assert told[-1][:2] == (2, 2)
    before = len(ok)
    assert cluster.spread(CASES, record, SETTINGS, "local", lambda *s: None) == []
    assert len(results(read(record.path), "ok")) == before, "nothing is measured twice"


def _workers() -> list[int]:
    """Processes of this user that run a case."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            command = (folder / "cmdline").read_bytes()
        except OSError:  # it has ended
            continue
        if command.startswith(b"ray::measure_case"):
            found.append(int(folder.name))
    return found


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_killed_worker_loses_nothing(record: Record) -> None:
    """The first worker that is seen is killed; its case runs again elsewhere."""
    pytest.importorskip("ray")
    killed: list[int] = []
    told: list[str] = []
    ended = threading.Event()

    def kill() -> None:
        while not killed and not ended.wait(0.05):
            for process in _workers()[:1]:
                os.kill(process, signal.SIGKILL)
                killed.append(process)

    killer = threading.Thread(target=kill)
    killer.start()
    try:
        lost = cluster.spread(CASES, record, SETTINGS, "local", lambda *said: told.append(said[2]))
    finally:
        ended.set()
        killer.join()
    assert killed and lost == []
    assert any("attempt 2 of 3" in line for line in told)
    ok = results(read(record.path), "ok")
    assert {row["worker"]["attempt"] for row in ok} == {1, 2}
    assert sorted(row["case"] for row in ok if row["peer"] == "torch-eager") == [
        "case_128",
        "case_64",
    ]
    assert killed[0] not in {row["worker"]["process"] for row in ok}
