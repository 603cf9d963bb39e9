"""Sweeps spread over a Ray cluster of this machine's cores; skipped where ray is not installed."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

from mla_lab.bench import Record, read, results
from mla_lab.bench.cases import Case
from mla_lab.bench.measure import Method
from mla_lab.core.problem import Problem
from mla_lab.tune import cluster

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


class _Ray:
    """Ray's wait and get over results that are there; one worker has died."""

    class exceptions:
        RayError = _Error

    @staticmethod
    def wait(refs: list[Any], num_returns: int) -> tuple[list[Any], list[Any]]:
        return refs[-1:], refs[:-1]

    @staticmethod
    def get(ref: Any) -> Any:
        if ref == "dead":
            raise _Error("the worker died\nand more")
        return [{"kind": "end", "status": ref}]


def test_a_dead_worker_loses_its_case_alone(record: Record) -> None:
    told: list[tuple[int, int, str]] = []
    pending = {"a": "case_a", "dead": "case_b", "c": "case_c"}
    lost = cluster._collect(_Ray, pending, record, lambda *said: told.append(said))
    assert lost == ["case_b"]
    assert [row["status"] for row in read(record.path)] == ["c", "a"]
    assert told[1] == (2, 3, "case_b: the worker died") and told[-1][:2] == (3, 3)


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
    ended = threading.Event()

    def kill() -> None:
        while not killed and not ended.wait(0.05):
            for process in _workers()[:1]:
                os.kill(process, signal.SIGKILL)
                killed.append(process)

    killer = threading.Thread(target=kill)
    killer.start()
    try:
        lost = cluster.spread(CASES, record, SETTINGS, "local", lambda *said: None)
    finally:
        ended.set()
        killer.join()
    assert killed and lost == []
    ok = results(read(record.path), "ok")
    assert sorted(row["case"] for row in ok if row["peer"] == "torch-eager") == [
        "case_128",
        "case_64",
    ]
    assert killed[0] not in {row["worker"]["process"] for row in ok}
