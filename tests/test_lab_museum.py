"""The museum of notebook 55: each bug is found as it says, or is not, and each mend is silent."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from mla_lab import lab
from mla_lab.lab import museum
from mla_lab.lab.explorers.museum import exhibit, places
from mla_lab.lab.museum import BUGS, Bug

ROOT = Path(__file__).parents[1]
each = pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)


@each
def test_a_bug_is_found_or_it_is_invisible_as_it_says(bug: Bug) -> None:
    made = bug.broken()
    kinds = [found.kind for found in made.findings]
    assert (bug.seen in kinds) if bug.seen else not kinds
    shown = exhibit(bug).markup
    assert bug.name in shown and all(len(words) > 10 for words in bug.text)
    assert ("All checks are silent" in shown) is not bool(bug.seen)


@each
def test_the_mend_is_silent_and_right(bug: Bug) -> None:
    made = bug.mended()
    assert made.right and not made.findings


def test_what_no_check_sees_is_seen_by_something_else() -> None:
    unseen = {bug.name: bug.broken() for bug in BUGS if not bug.seen}
    assert not unseen["0 x NaN"].right and not unseen["a stale plan"].right
    assert "more than the 64,512" in unseen["registers that are not there"].detail
    error = float(unseen["P that is never exactly 1"].detail.split()[-1])
    assert 1e-3 < error < 2e-2


def test_a_model_names_its_own_lines() -> None:
    for bug in BUGS:
        if bug.lines():
            made = bug.broken()
            named = places(made)
            assert named and all(0 < place.line <= len(bug.lines()) for place in named)


def test_commits_and_lines_that_the_texts_name_exist_in_the_history_or_say_whose_they_are() -> None:
    for bug in BUGS:
        origin, _, mend = bug.text
        assert origin.startswith(("our", "public")), origin
        assert all(len(c) == 7 for c in re.findall(r"commit (\w+)", mend))


def test_the_table_has_a_row_a_bug() -> None:
    rows = lab.museum_table().rows
    assert [row[0] for row in rows] == list(museum.NAMES) and len(rows) == 12
    assert sum(row[2] == "nothing" for row in rows) == 4
    assert all(row[3] for row in rows if row[2] != "nothing")
