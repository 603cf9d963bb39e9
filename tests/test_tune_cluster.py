"""Sweeps spread over a Ray cluster of this machine's cores; skipped where ray is not installed."""

from __future__ import annotations

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
