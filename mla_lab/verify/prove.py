"""The kernels on the user's own card: pairs of features and published configurations, as a record.

The lists of `proof_cases`, each case against the float64 oracle with poisoned caches: of
"contract" by whatever backend "auto" takes, of the others on capability 10.x by the SM100 kernel or
not at all. Where all cases pass there, the proof is remembered (`backends.cute.proofs`), and "auto"
takes the kernel from then on.

The record is written before and after each case, so that one of a card that stopped names the case:
a case that does not end within `CASE_SECONDS` ends the process.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from time import perf_counter
from unittest.mock import patch

import torch

from .. import backends
from ..backends.cute import blackwell, proofs
from ..core.errors import BuildError, MlaLabError, unsupported
from ..core.gpu import Gpu
from ..jit import compile_all
from ..jit.build import Built, no_count
from .check import Outcome
from .proof_cases import Check, Lists, builds
from .record import Progress, Row, guarded, head_row, write

#: told the name and size of a phase
Phase = Callable[[str, int], None]

CAPABILITIES = ("9.0", "10.0", "10.3")
#: seconds of one case at most, a compilation included
CASE_SECONDS = 300
#: compiling processes at most
COMPILERS = 16


def no_phase(name: str, total: int) -> None:
    """Shows nothing."""


def here() -> Gpu:
    """The card of this machine. Raises Unsupported without one that kernels here are for."""
    gpu, wanted = Gpu.here(), f"compute capability {', '.join(CAPABILITIES)}"
    if gpu is None:
        got = "no GPU that torch can use"
        raise unsupported("--prove", got, f"a machine with an NVIDIA GPU of {wanted}")
    try:
        known = proofs.capability(gpu) in CAPABILITIES
    except MlaLabError:
        known = False
    if not known:
        raise unsupported("--prove", f"{gpu.name} ({gpu.arch})", wanted)
    return gpu


def prove(path: Path, say: Progress, count: Built = no_count, phase: Phase = no_phase) -> list[Row]:
    """Compile, run and judge everything on the first card; the rows of the record at `path`.

    count: called with (done, total) builds, then cases, which `phase` announces. Raises Unsupported
    without a card that kernels here are for.
    """
    gpu = here()
    if blackwell.is_blackwell(gpu):
        proofs.forget(proofs.Identity.of(gpu))  # a proof that does not end does not count either
    with _consent():
        wanted = builds(gpu)
        say(f"compiling what is missing of {len(wanted)} builds for {proofs.arch(gpu)}")
        try:
            workers = max(1, min(COMPILERS, (os.cpu_count() or 1) // 2))
            compile_all(wanted, proofs.arch(gpu), workers=workers, built=count)
        except MlaLabError as error:
            say(f"{error}")  # its cases say so in the record
        checks = Lists(gpu, "cuda").checks()
        phase("cases", len(checks))
        return run_checks(gpu, checks, path, say, count)


@contextlib.contextmanager
def _consent() -> Iterator[None]:
    """Calls take the SM100 kernel inside, whatever was remembered or chosen before."""
    backends.choose.cache_clear()
    try:
        with patch.dict(os.environ, {blackwell.CONSENT: "1"}):
            yield
    finally:
        backends.choose.cache_clear()


def run_checks(
    gpu: Gpu, checks: list[Check], path: Path, say: Progress, count: Built = no_count
) -> list[Row]:
    """Run the cases and write the record; a passed proof of the SM100 kernel is remembered.

    Ends early where the device takes no more work: a later case would tell nothing.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    head = {**head_row("prove", device, len(checks)), "capability": proofs.capability(gpu)}
    head["environment"]["command"] = ["mla-lab", "doctor", "--prove"]
    rows: list[Row] = [head]
    for number, check in enumerate(checks, 1):
        about = {"kind": "case", "part": check.part, "name": check.name}
        stuck = Outcome("failed", reason=f"it did not end within {CASE_SECONDS} s")
        write(path, [*rows, {**about, **stuck.row()}])
        began = perf_counter()
        with _limit(CASE_SECONDS):
            outcome = guarded(check.run)
        found = _by(check, outcome)
        seconds = round(perf_counter() - began, 2)
        rows.append({**about, **found.row(), "seconds": seconds})
        count(number, len(checks))
        say(f"{number}/{len(checks)} {found.status} {check.name} {found.reason}".strip())
        if found.status != "ok" and _lost():
            say("the device takes no more work: the proof ends here")
            break
    rows.append(_verdict(gpu, checks, rows[1:], say))
    write(path, rows)
    return rows


def _by(check: Check, outcome: Outcome) -> Outcome:
    """The outcome, "wrong" where another backend than the one that is proved ran the case."""
    if outcome.status != "ok" or check.backend in ("", outcome.backend):
        return outcome
    reason = f"{outcome.backend or 'no backend'} ran it, not {check.backend}"
    return Outcome("wrong", outcome.backend, reason)


def _verdict(gpu: Gpu, checks: list[Check], rows: list[Row], say: Progress) -> Row:
    """The last row: passed where every case is there and "ok", and whether that is remembered."""
    passed = bool(checks) and len(rows) == len(checks)
    passed = passed and all(row["status"] == "ok" for row in rows)
    row: Row = {"kind": "proof", "passed": passed, "cases": len(rows), "remembered": False}
    row["statuses"] = dict(Counter(each["status"] for each in rows))
    if not blackwell.is_blackwell(gpu):
        return row
    identity = proofs.Identity.of(gpu)
    row["identity"] = asdict(identity)
    if passed and any(check.backend == "cute" for check in checks):
        date = datetime.now(UTC).date().isoformat()
        try:
            proofs.remember(identity, {"cases": len(rows), "date": date})
        except BuildError as error:
            say(f"{error}")
        else:
            row["remembered"] = True
    return row


@contextlib.contextmanager
def _limit(seconds: float) -> Iterator[None]:
    """Ends the process where the block takes longer, also while it waits for the device."""
    if sys.__stderr__ is None:
        yield
        return
    faulthandler.dump_traceback_later(seconds, exit=True, file=sys.__stderr__)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


def _lost() -> bool:
    """Whether the device reports an error of its own, after which it runs nothing."""
    if not torch.cuda.is_available():
        return False
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False


def summary(rows: list[Row], path: Path) -> str:
    """What came of the proof, in a sentence or two."""
    last = rows[-1]
    words = ", ".join(f"{count} {status}" for status, count in last["statuses"].items())
    text = f"{'passed' if last['passed'] else 'not passed'}: {words}; the record is {path}"
    if last["remembered"]:
        text += "; auto takes the SM100 kernel on this card from now on"
    return text
