"""Sweeps over the GPUs of a Ray cluster: one process a GPU, one case at a time, one record.

The driver holds the record. A task gets a case and the keys that are settled, measures into a
record of its own, and returns the rows; the driver appends them, each with the worker that measured
it. A case whose worker died runs again, and its rows say in which attempt; what was appended stays,
and an interrupted sweep is continued by the same command. Ray is the extra `mla-lab[ray]`.
"""

from __future__ import annotations

import os
import platform
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ...core.errors import unsupported
from ..cases import Case
from ..environment import command_line
from ..measure import Method
from ..peers import select
from ..records import Record, Row, results
from .sweep import Sweep

#: workers that a case may lose before it counts as failed
MOST_ATTEMPTS = 3

#: starts a case's task for its first, second ... time
Submit = Callable[[Case, int], Any]
Said = Callable[[int, int, str], None]


@dataclass(frozen=True)
class ClusterSweep:
    """What every task of a sweep has in common."""

    method: Method
    #: "cuda", a GPU a task, or "cpu", a core a task
    device: str
    backend: str
    per_tile: int
    peers: tuple[str, ...] = ()
    keep_failed: bool = False


def measure_case(
    settings: ClusterSweep, case: Case, known: list[Row], attempt: int = 1
) -> list[Row]:
    """The new rows of one case, measured in this process; `known`: its rows of the record."""

    class OwnSweep(Sweep):
        backend = settings.backend
        per_tile = settings.per_tile

    with tempfile.TemporaryDirectory() as folder:
        record = Record(Path(folder) / "case.jsonl")
        for row in known:
            record.append(row)
        peers = select(settings.peers) if settings.peers else []
        sweep = OwnSweep(record, peers, settings.device, settings.method)
        sweep.run([case], settings.keep_failed)
        new = record.rows[len(known) :]
        record.close()
    who = worker(settings.device) | {"attempt": attempt}
    return [{**row, "worker": who} for row in new]


def worker(device: str) -> dict[str, Any]:
    """Who measured: host, process, and the card with the index that Ray gave."""
    on_gpu = device == "cuda"
    return {
        "host": platform.node(),
        "process": os.getpid(),
        "card": torch.cuda.get_device_name() if on_gpu else "CPU",
        "gpu": os.environ.get("CUDA_VISIBLE_DEVICES") if on_gpu else None,
    }


def spread(
    cases: Sequence[Case], record: Record, settings: ClusterSweep, address: str, progress: Said
) -> list[str]:
    """Measure `cases` on the cluster at `address` ("local": this machine) into `record`.

    progress: called with (cases done, all cases, a line) as they end or lose a worker. Returns the
    names of cases that lost `MOST_ATTEMPTS` workers or raised. Raises Unsupported where the cluster
    does not answer, and where no node of it has what a task needs.
    """
    import ray

    try:
        _connect(ray, address)
        need = {"num_gpus": 1} if settings.device == "cuda" else {"num_cpus": 1}
        kind = "GPU" if settings.device == "cuda" else "CPU"
        if not ray.cluster_resources().get(kind):
            raise unsupported("--ray", f"a cluster without a {kind}", f"one with a {kind} or more")
        # a new process for each case: a lost device does not reach the next one
        task = ray.remote(max_calls=1, max_retries=0, **need)(measure_case)

        def submit(case: Case, attempt: int) -> Any:
            return task.remote(settings, case, _known(record, case.name), attempt)

        return _collect(ray, cases, submit, record, progress)
    finally:
        ray.shutdown()


def _connect(ray: Any, address: str) -> None:
    """Start a cluster of this machine, or reach the one at `address`."""
    try:
        ray.init(None if address == "local" else address, log_to_driver=False)
    except Exception as error:  # Ray has no class of its own for a node that does not start
        got = f"{address}, where Ray says: {(str(error).splitlines() or [''])[0]}"
        raise unsupported("--ray", got, "a cluster that answers, or local") from error


def _known(record: Record, case: str) -> list[Row]:
    return [row for row in results(record.rows) if row["case"] == case]


def _by_this_command(row: Row) -> Row:
    """A worker's row, with the command of the sweep in place of that of a Ray worker."""
    if "environment" not in row:
        return row
    return {**row, "environment": {**row["environment"], "command": command_line()}}


def _collect(
    ray: Any, cases: Sequence[Case], submit: Submit, record: Record, progress: Said
) -> list[str]:
    """Append rows as cases end, in any order; submit those again whose worker died."""
    pending = {submit(case, 1): (case, 1) for case in cases}
    total, lost = len(pending), []
    while pending:
        (done,), _ = ray.wait(list(pending), num_returns=1)
        case, attempt = pending.pop(done)
        try:
            rows = ray.get(done)
        except ray.exceptions.RayError as error:
            line = f"{case.name}: {str(error).splitlines()[0]}"
            died = not isinstance(error, ray.exceptions.RayTaskError)
            if died and attempt < MOST_ATTEMPTS:
                pending[submit(case, attempt + 1)] = (case, attempt + 1)
                line += f" It runs again, attempt {attempt + 1} of {MOST_ATTEMPTS}."
            else:
                lost.append(case.name)
        else:
            for row in rows:
                record.append(_by_this_command(row))
            ok = sum(row.get("status") == "ok" for row in rows if row["kind"] == "result")
            line = f"{case.name}: {ok} results"
        progress(total - len(pending), total, line)
    return lost
