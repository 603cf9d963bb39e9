"""compute-sanitizer's summaries as a record's rows."""

from __future__ import annotations

import pytest

from mla_lab.core.errors import Unsupported
from mla_lab.verify import sanitizer
from mla_lab.verify.sanitizer_cases import CASES


def test_racecheck_runs_a_process_a_call_and_the_others_one() -> None:
    seen = []

    def run(line: list[str]) -> tuple[int, str]:
        seen.append(line)
        if "racecheck" in line:
            errors = int(line[-1] == "sinks")
            return errors, f"x: ok, error 1e-3\n===== RACECHECK SUMMARY: {errors} hazards\n"
        return 0, "a: ok, error 1e-3\nb: wrong, error 1\n===== ERROR SUMMARY: 0 errors\n"

    rows = list(sanitizer.rows(run))  # type: ignore[arg-type]
    assert len(seen) == len(rows) == 2 + len(CASES)
    assert [r["calls"] for r in rows if r["tool"] != "racecheck"] == [2, 2]
    assert [r["name"] for r in rows if r["errors"]] == ["sinks"]
    assert all(("--kernel-name" in line) == ("racecheck" in line) for line in seen)


def test_a_process_without_a_call_is_no_proof() -> None:
    row = {"kind": "case", "tool": "memcheck", "name": "all", "calls": 2, "errors": 0, "exit": 0}
    assert not sanitizer.failed([row])
    for change in ({"calls": 0}, {"errors": 1}, {"exit": 1}):
        assert sanitizer.failed([row, row | change])


def test_a_tool_without_a_summary_is_no_proof() -> None:
    with pytest.raises(Unsupported, match="cannot find the device"):
        list(sanitizer.rows(lambda line: (1, "cannot find the device")))
