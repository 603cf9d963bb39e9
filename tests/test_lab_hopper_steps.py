"""What follows the ladder in notebook 53: code from step to step, and recorded times of kernels."""

from __future__ import annotations

from itertools import pairwise

import pytest

from mla_lab.core.errors import InvalidInput
from mla_lab.lab import ladder_facts
from mla_lab.lab.hopper_steps import DiffExplorer, changes, shipped, shipped_table


def test_steps_go_from_the_formula_to_the_skeleton_of_the_shipped_kernel() -> None:
    found = changes()
    assert found[0].before.name == "step0_formula.cuh"
    assert found[-1].after.name == "split_keep_ab.py"
    assert len(found) == 9 + 7
    for before, after in pairwise(found):
        # the chain breaks once, where Hopper's means begin in another language
        assert before.after == after.before or after.before.name == "swizzled_tile.py"


@pytest.mark.parametrize(
    ("step", "new"),
    [(5, "swizzle"), (10, "make_tiled_tma_atom"), (11, "mbarrier"), (13, "wgmma|warpgroup")],
)
def test_a_diff_shows_what_the_step_is_about(step: int, new: str) -> None:
    added = "\n".join(line for line in changes()[step - 1].lines() if line.startswith("+"))
    assert any(word in added.lower() for word in new.lower().split("|"))


def test_the_explorer_says_times_from_the_record_or_that_there_are_none() -> None:
    explorer = DiffExplorer()
    explorer.widgets["step"].value = 9
    rung = ladder_facts.rungs("b64_q1_h128_kv2048")[9]
    assert f"{rung.us:,.0f} us after" in explorer.footer.value
    explorer.widgets["step"].value = 16
    assert "not timed" in explorer.footer.value
    assert "lines new" in explorer.title()


@pytest.mark.parametrize("case", ["b1_q1_h128_kv8192", "b64_q1_h16_kv4096"])
def test_the_table_is_the_record(case: str) -> None:
    shown = shipped_table(case)
    *kernels, last = shown.rows
    assert [row[4] for row in kernels] == sorted(row[4] for row in kernels)
    assert kernels[0][4] == shipped(case)[0]["us"]
    assert last[4] == ladder_facts.rungs(case)[-1].us
    for row in kernels:
        assert float(row[5]) == pytest.approx(last[4] / row[4], abs=0.06)
    assert len({row[:3] for row in kernels}) == len(kernels)
    assert shown.source is not None and "2026-11-20" in shown.source.label


def test_a_case_that_was_not_swept_is_refused() -> None:
    with pytest.raises(InvalidInput, match="b64_q1_h128_kv2048"):
        shipped("b64_q1_h128_kv2048")
