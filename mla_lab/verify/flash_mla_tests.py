"""FlashMLA's published tests of decoding on `mla_lab.flash_mla_names`.

    python -m mla_lab.verify.flash_mla_tests CHECKOUT RECORD

runs the cases of `tests/test_flash_mla_dense_decoding.py`, in bf16 and fp16, and of
`tests/test_flash_mla_sparse_decoding.py` from a checkout of FlashMLA on a Hopper card, without
those that only take the time. FlashMLA itself is not imported: a module `flash_mla` has our names.
Cases run in an order drawn once. Dense cases of at most `DENSE_FLOP` all run, and `LARGER` of each
dtype beyond; sparse ones of at most `SPARSE_FLOP`; of each kind that is refused, `OF_A_KIND`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import importlib.util
import io
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple
from unittest.mock import patch

import torch

from ..core.errors import Unsupported
from ..interop import flash_mla
from .peer_tests import SEED, file_of, main, of_this_run
from .record import Row

FOLDER = Path("tests")
DENSE, SPARSE = "test_flash_mla_dense_decoding", "test_flash_mla_sparse_decoding"
#: in both files, what runs a case
RUN = "test_flash_mla"
#: floating-point operations of a case up to which it runs
DENSE_FLOP, SPARSE_FLOP = 8e9, 6e10
LARGER, OF_A_KIND = 60, 8
#: imported by their tables and timers alone, and perhaps not installed
UNUSED = ("rich", "rich.console", "rich.table", "triton")


class Case(NamedTuple):
    """A case: its test, parameters, the function that runs it, its kind, operations."""

    test: str
    parameters: Any
    run: Callable[[Any], Any]
    #: what it has that we refuse; empty for others
    kind: str
    flop: float


class Unused(ModuleType):
    """A module that is not there, whose decorators leave a function as it is."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _as_it_is


class TestFailed(AssertionError):
    """A sparse case whose result is not what it compares with."""


@contextlib.contextmanager
def modules_of(checkout: Path) -> Iterator[tuple[ModuleType, ModuleType]]:
    """The two test modules, with our names for `flash_mla`; none of them stays imported."""
    folder = file_of(checkout, FOLDER / f"{DENSE}.py", "FlashMLA").parent
    file_of(checkout, FOLDER / f"{SPARSE}.py", "FlashMLA")
    before = dict(sys.modules)
    sys.modules["flash_mla"] = flash_mla
    for name in UNUSED:
        if name not in sys.modules and not _installed(name):
            sys.modules[name] = Unused(name)
    sys.path.insert(0, str(folder))
    try:
        yield importlib.import_module(DENSE), importlib.import_module(SPARSE)
    finally:
        sys.path.remove(str(folder))
        for name in set(sys.modules) - set(before):
            path = getattr(sys.modules[name], "__file__", None) or ""
            if name in (*UNUSED, "flash_mla") or path.startswith(str(folder)):
                del sys.modules[name]


def _installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # of its parent
        return False


@contextlib.contextmanager
def defaults(dtype: torch.dtype) -> Iterator[None]:
    """Torch's defaults as their `main` sets them."""
    before = torch.get_default_dtype(), torch.get_float32_matmul_precision()
    torch.set_default_dtype(dtype)
    torch.set_float32_matmul_precision("high")
    try:
        with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
            yield
    finally:
        torch.set_default_dtype(before[0])
        torch.set_float32_matmul_precision(before[1])


def dense_cases(tests: ModuleType, dtype: torch.dtype) -> list[Case]:
    """What `main` of the dense tests would run."""
    found: list[Any] = []
    run, before = getattr(tests, RUN), (torch.get_default_dtype(), torch.get_default_device())
    try:
        with (
            patch.object(tests, RUN, found.append),
            patch("torch.cuda.get_device_capability", return_value=(9, 0)),
            patch("torch.cuda.set_device"),
        ):
            tests.main(dtype)
    finally:
        torch.set_default_dtype(before[0])
        torch.set_default_device(before[1])
    name = f"{DENSE} ({'bf16' if dtype == torch.bfloat16 else 'fp16'})"
    cases = []
    for p in found:
        flop = 2.0 * p.b * p.s_q * p.h_q * p.s_k * (p.d + p.dv)
        kind = f"{p.h_kv} KV heads" if p.h_kv > 1 else ""
        cases.append(Case(name, p, partial(_in_dtype, run, dtype), kind, flop))
    return cases


def _as_it_is(function: Any) -> Any:
    return function


def _in_dtype(run: Callable[[Any], Any], dtype: torch.dtype, parameters: Any) -> None:
    with defaults(dtype):
        run(dataclasses.replace(parameters, test_performance=False))


def sparse_cases(tests: ModuleType) -> list[Case]:
    """What `main` of the sparse tests would run; the number of a case is its seed, as there."""
    cases = []
    for seed, raw in enumerate(tests.gen_testcase()):
        p = raw.to_test_param()
        p.seed = seed
        kind = "a second cache" if p.decode.extra_topk else "" if p.d_qk == 576 else "d_qk 512"
        flop = 2.0 * p.decode.b * p.s_q * p.h_q * p.topk * (p.d_qk + p.d_v)
        cases.append(Case(SPARSE, p, partial(_checked, getattr(tests, RUN)), kind, flop))
    return cases


def _checked(run: Callable[[Any], Any], parameters: Any) -> None:
    with defaults(torch.bfloat16):
        if not run(parameters).is_correct:
            raise TestFailed


def timed_only(case: Case) -> bool:
    """Whether FlashMLA runs this case for its time."""
    p = case.parameters
    return bool(getattr(p, "test_performance", False) or getattr(p, "num_runs", 0))


def drawn(cases: list[Case]) -> list[Case]:
    """Those that run, in their order."""
    shuffled = random.Random(SEED).sample(cases, len(cases))
    number: Counter[tuple[str, str]] = Counter()
    chosen = []
    for case in shuffled:
        limit = SPARSE_FLOP if case.test == SPARSE else DENSE_FLOP
        larger = not case.kind and case.flop > limit
        key = (case.test, case.kind or "larger" if larger else case.kind)
        most = OF_A_KIND if case.kind else LARGER if larger and case.test != SPARSE else 0
        if (case.kind or larger) and number[key] >= most:
            continue
        number[key] += 1
        chosen.append(case)
    return chosen


def row_of(case: Case) -> Row:
    """Run a case: how it ended, and the first words of what its comparison printed."""
    began, said, reason = time.monotonic(), io.StringIO(), ""
    try:
        with contextlib.redirect_stdout(said):
            case.run(case.parameters)
        status = "passed"
    except Unsupported as error:
        status, reason = "refused", str(error)
    except Exception as error:  # of any kind: it goes into the record, and the others still run
        status = "failed"
        lines = said.getvalue().splitlines()
        compared = [line for line in lines if line.startswith(("`", "max "))]
        words = "; ".join(compared[:3]) or str(error).partition("\n")[0]
        kind = AssertionError if isinstance(error, AssertionError) else type(error)
        reason = f"{kind.__name__}: {words}"
    return {
        "kind": "case", "test": case.test, "parameters": _words(case.parameters),
        "status": status, "reason": reason, "seconds": round(time.monotonic() - began, 3),
    }  # fmt: skip


def _words(parameters: Any) -> str:
    return str(parameters).removeprefix("TestParam").replace("ExtraTestParam", "Extra")


def run(
    checkout: Path, commit: str, part: int, parts: int, progress: Callable[[str], None]
) -> list[Row]:
    """Rows of a record: the run, then each case that was drawn for this part.

    Raises InvalidInput for a checkout without one of the files.
    """
    with modules_of(checkout) as (dense, sparse):
        cases = [*dense_cases(dense, torch.bfloat16), *dense_cases(dense, torch.float16)]
        cases = [c for c in (*cases, *sparse_cases(sparse)) if not timed_only(c)]
        rows = []
        for case in drawn(cases)[part::parts]:
            rows.append(row_of(case))
            progress(f"{len(rows)}: {rows[-1]['status']} {case.test} {rows[-1]['reason']}")
    there = Counter(case.test for case in cases)
    head = of_this_run()
    head |= {"flash_mla_commit": commit, "there": dict(there)}
    return [head | {"below_flop": [SPARSE_FLOP, DENSE_FLOP], "larger": LARGER}, *rows]


if __name__ == "__main__":
    main("mla_lab.verify.flash_mla_tests", __doc__, run)
