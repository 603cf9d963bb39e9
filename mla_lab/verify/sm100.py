"""The SM100 kernel on the CPU, emulated with all checks, as a record; it has not run on a card.

Both lists of `sm100_lists`. Inputs hold NaN where a correct call does not read. A row names the
digest of its build's instructions: a later run goes on where an earlier one ended, and runs again
what has changed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from time import perf_counter, process_time

import torch

from ..core.revision import Revision
from ..emulate import EmulatedKernel, Fault, Options
from ..emulate.calls import Call, call_of, is_right, make_call
from ..jit import Artifact
from ..jit import compile as compiled
from ..jit.build import Built, no_count
from ..reference.inputs import DecodeInputs
from .emulated import digest_of_code
from .record import Continued, Progress, Row, not_ok
from .sm100_lists import OWN_LENGTH, Run, feature_runs, published_runs

ARCH = "sm_100a"
LISTS = {"published": published_runs, "features": feature_runs}


def request_of(inputs: DecodeInputs, request: int) -> DecodeInputs:
    """The inputs of one request of a batch, in the same cache."""
    p, some = inputs.problem, slice(request, request + 1)
    first = sum(p.q_lens[:request])
    tokens = slice(first, first + p.q_lens[request])
    query, mask, ragged = inputs.query, inputs.mask, inputs.query.dim() == 3
    if mask is not None:
        mask = mask[tokens].unsqueeze(0) if ragged else mask[some]
    return replace(
        inputs,
        problem=replace(p, q_lens=(p.q_lens[request],), kv_lens=(p.kv_lens[request],)),
        query=query[tokens].unsqueeze(0) if ragged else query[some],
        block_tables=inputs.block_tables[some],
        seq_lens=inputs.seq_lens[some],
        cum_seq_lens_q=None,
        mask=mask,
    )


def _same_alone(kernel: EmulatedKernel, call: Call, wanted: Run) -> bool:
    """Whether each request gives the bits alone that it has in `call`."""
    p, first = wanted.problem, 0
    out, same = call.out.flatten(0, 1), True
    for request, tokens in enumerate(p.q_lens):
        inputs = request_of(call.inputs, request)
        alone = call_of(call.config, inputs, workers=wanted.workers, pieces=OWN_LENGTH)
        kernel(*alone.args)
        rows = slice(first, first + tokens)
        same &= torch.equal(_bytes(alone.out.flatten(0, 1)), _bytes(out[rows]))
        same &= torch.equal(_bytes(alone.lse), _bytes(call.lse[rows]))
        first += tokens
    return same


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


def call_for(wanted: Run) -> Call:
    """The call of a run."""
    splits = 1 if wanted.splits is None else wanted.splits
    call = make_call(wanted.config, wanted.problem, splits, wanted.seed, workers=wanted.workers)
    if wanted.splits is None:
        return call_of(wanted.config, call.inputs, workers=wanted.workers, pieces=OWN_LENGTH)
    return call


def run_one(artifact: Artifact, wanted: Run) -> Row:
    """The row of a run: "ok", "wrong", "found" by a check, or "fault"; and where pieces follow from
    a request's own length, whether each request has the same bits alone."""
    began, status, found = process_time(), "ok", []
    errors, same = [0.0, 0.0], True
    for schedule in wanted.schedules:
        call = call_for(wanted)
        numbers = "exact" if wanted.splits is None else "fast"
        options = Options(check=True, schedule=schedule, seed=wanted.seed, numbers=numbers)
        kernel = EmulatedKernel.of(artifact, options)
        try:
            kernel(*call.args)
            found += [f"{schedule}: {finding}" for finding in kernel.run.findings]
            errors = [max(pair) for pair in zip(errors, call.errors(), strict=True)]
            if wanted.splits is None:
                same &= _same_alone(kernel, call, wanted)
            if not (is_right(call) and same):
                status = "wrong"
        except Fault as fault:
            status = "fault"
            found += [f"{schedule}: {fault}", *map(str, kernel.run.findings)]
    row: Row = {
        "kind": "case",
        "name": wanted.name,
        "status": "found" if found and status == "ok" else status,
        "q_lens": wanted.problem.q_lens,
        "kv_lens": wanted.problem.kv_lens,
        "splits": "own length" if wanted.splits is None else wanted.splits or "found",
        "workers": wanted.workers,
        "schedules": wanted.schedules,
        "out_error": errors[0],
        "lse_error": errors[1],
        "build": wanted.config.name(),
        "ptx": digest_of_code(artifact.ptx.read_text()),
        "commit": Revision.here().commit,
        "cpu_seconds": round(process_time() - began, 2),
    }
    row |= {"same_alone": same} if wanted.splits is None else {}
    return {**row, "findings": found} if found else row


def run(path: Path, part: str, seconds: float, say: Progress, count: Built = no_count) -> list[Row]:
    """Run what is not "ok" in the record with this code, until the time is over. Rows of calls that
    the lists no longer have go.

    part: "published", "features" or both ("").
    """
    lists = {name: list(runs()) for name, runs in LISTS.items()}
    wanted = [run for name, runs in lists.items() if part in ("", name) for run in runs]
    record = Continued(path, "sm100", [run.name for runs in lists.values() for run in runs])
    until = perf_counter() + seconds

    def told(row: Row) -> None:
        say(f"{row['status']} {row['name']} {row['cpu_seconds']} s")

    made = (run_anew(run, record.rows.get(run.name, {}), until) for run in wanted)
    return record.extend(made, len(wanted), told, count)


def run_anew(wanted: Run, before: Row, until: float) -> Row | None:
    """The row of a run, None where `before` is "ok" and of this code, or the time is over."""
    if perf_counter() > until:
        return None
    artifact = compiled(wanted.config, ARCH)
    same = before.get("ptx") == digest_of_code(artifact.ptx.read_text())
    return None if same and before["status"] == "ok" else run_one(artifact, wanted)


def summary(rows: Sequence[Row]) -> str:
    """How many of how many cases ran, and what came of them."""
    counts = Counter(row["status"] for row in rows[1:])
    words = ", ".join(f"{count} {status}" for status, count in counts.items())
    return f"{len(rows) - 1} of {rows[0]['cases']}: {words}"


failed = not_ok
