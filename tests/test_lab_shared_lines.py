"""Lines that the SM100 kernel has in common with the Hopper kernels."""

from __future__ import annotations

import ast

from mla_lab.lab import shared_lines
from mla_lab.lab.shared_lines import CUTE, HOPPER, OURS, reached


def test_what_is_used_is_followed_by_name() -> None:
    ours, theirs = reached(OURS), reached(HOPPER)
    records = CUTE / "rows_on_m/work_records.py"
    merge = CUTE / "split_merge/keep_ab_cooperative.py"
    assert {(records, "record"), (merge, "merge")} <= ours & theirs
    assert (CUTE / "common/ptx_sm100.py", "mma") in ours - theirs
    assert (CUTE / "keep_ab_sm90/mainloop_pv.py", "mainloop_pv") not in ours
    assert all(path.is_relative_to(CUTE) for path, _ in ours)


def test_annotations_are_no_use() -> None:
    node = ast.parse("def f(a: Config, b=Work(1)) -> Other:\n    x: Third = g(a)\n    return x")
    assert shared_lines._names(node) == {"Work", "g", "x", "a"}


def test_counts_are_of_code_and_the_table_adds_them_up() -> None:
    found = shared_lines.counts()
    text = sum(path.read_text().count("\n") for path in (CUTE / "mla_sm100").glob("*.py"))
    assert 500 < found["mla_sm100"][0] < text and found["mla_sm100"][1] == 0
    assert found["split_merge"][1] > 300 and found["rows_on_m"][1] > 50
    lines, both = (sum(pair[i] for pair in found.values()) for i in (0, 1))
    assert f"| all | {lines:,} | {both:,} (" in shared_lines.table() and 0 < both < lines
