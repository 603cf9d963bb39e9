"""The debugger of notebook 54: what its film says, what each break is reported as, its pictures."""

from __future__ import annotations

import re
from itertools import pairwise

import pytest

from mla_lab import lab
from mla_lab.core.errors import InvalidInput
from mla_lab.emulate.ptx import Place
from mla_lab.lab import film, film_breaks, film_card, film_picture, film_report, source_lines
from mla_lab.lab.film_breaks import NOTHING, film_of
from mla_lab.lab.gantt import ROLE_LANES
from mla_lab.lab.source_lines import line_of

TILES = 8

#: break -> a finding that must be among those reported
REPORTED = {
    "delete the arrive that frees a stage": "deadlock",
    "delete the wait for a free stage": "race",
    "swap two waits": "race",
    "shrink the ring": "deadlock",
    "wait for the other parity": "unwritten",
    "free a stage early": "race",
    "delete the proxy fences behind P": "proxy fence",
    "delete the wait for S": "in flight",
    "count four arrivals for eight": "parity alias",
}


def test_the_shipped_kernel_is_silent_and_each_tile_goes_through_its_stage() -> None:
    whole = film_of()
    assert whole.right and not whole.findings and not whole.stuck
    held: dict[str, int] = {}
    for stage in range(film.STAGES):
        spans = whole.stage(stage)
        assert all(a[1] <= b[0] for a, b in pairwise(spans))
        held |= {what: stage for _, _, what in spans if what.startswith("tile")}
    assert held == {f"tile {t}": (t + 1) % film.STAGES for t in range(TILES)}


def test_barriers_have_the_counts_that_their_names_say() -> None:
    counts = {name: history.expected for name, history in film_of().barriers.items()}
    wanted = {"kv.full": 1, "kv.empty": 8, "p.full": 128, "p.empty": 256, "stats": 256}
    assert len(counts) == len(film.BARRIERS)
    assert all(n == wanted[name.split("[")[0]] for name, n in counts.items())
    with pytest.raises(InvalidInput, match="mbarrier"):
        film.barrier_name(8 * len(counts))


def test_a_barrier_counts_down_within_each_phase() -> None:
    whole = film_of()
    history = whole.barriers["p.full[1]"]
    states = [history.at(slot) for slot in range(0, whole.end, 7)]
    assert [s.phase for s in states] == sorted(s.phase for s in states)
    assert all(0 <= s.pending <= s.expected for s in states)
    assert states[-1].phase == len(history.phases) == 3
    assert max(whole.barriers["kv.full[0, 0]"].at(s).bytes for s in whole.steps()) == 64 * 192 * 2


def test_registers_move_by_setmaxnreg_and_fit() -> None:
    whole = film_of()
    assert set(whole.held(0)) == {film.LAUNCH_REGISTERS}
    assert whole.held(whole.end // 2) == [160] * 8 + [184] * 4
    assert 32 * sum(whole.held(whole.end // 2)) <= 65_536
    assert whole.held(whole.end) == [160] * 12, "the QK-softmax warps go on to the merge's code"


def test_the_source_line_of_a_barrier_calls_it() -> None:
    """The recording is of today's sources: lines at which warps wait or arrive say so."""
    words = re.compile(r"wait|acquire|arrive|release|commit|expect|issue_qk|fence_view")
    for pc in film_of().uses:
        assert words.search(line_of(film.caller(pc))), film.caller(pc)


@pytest.mark.parametrize("name", REPORTED)
def test_each_break_is_reported(name: str) -> None:
    found = film_of(name)
    assert REPORTED[name] in found.kinds
    assert "mla_lab/cute/" in found.report
    shown = film_report.report(found)
    assert re.search(r"mla_lab/cute/keep_ab_sm90/\w+\.py:\d+", shown)
    assert found.kinds[0] in shown


def test_every_break_is_tested_and_changes_something() -> None:
    assert set(REPORTED) == set(film_breaks.NAMES) - {NOTHING}
    for name in REPORTED:
        made = film_breaks.named(name)
        code = film.program().kernel.code
        assert made.edits() and all(s != code[pc] for pc, s in made.edits().items())
        assert all("keep_ab_sm90" in place.file for place in made.places)
    with pytest.raises(InvalidInput, match="break"):
        film_breaks.named("delete everything")


def test_a_hang_names_who_waits_for_what() -> None:
    found = film_of("delete the arrive that frees a stage")
    rows = {row[0]: row for row in lab.who_waits(found).rows}
    _, state, waiting, arriving, place = rows["kv.empty[1]"]
    assert (waiting, arriving) == ("0", "0 to 7") and "0 of 8 arrived" in state
    assert "producer.py" in place
    assert film.PRODUCTS in rows, "warps of the producer's own warp group cannot finish a product"


def test_the_picture_before_and_behind_run() -> None:
    explorer = lab.DebugExplorer(warp=8)
    name = "shrink the ring"
    film_breaks._FILMS.pop((name, "random"), None)
    explorer.set(broken=name, schedule="random")
    assert explorer.title().startswith("Press Run") and explorer.note(explorer.state) == ""
    explorer.run()
    assert "deadlock" in explorer.title()
    assert explorer.state["step"] == len(film_of(name, "random").steps()) - 1
    assert "waits for" in explorer.out.outputs[0]["data"]["text/html"]
    assert "no warp can go on" in explorer.footer.value


def test_the_slider_reaches_the_end_of_the_film_that_is_shown() -> None:
    explorer = lab.DebugExplorer().run(broken="delete the arrive that frees a stage")
    hang = explorer.widgets["step"].max
    explorer.widgets["broken"].value = film_breaks.NOTHING
    assert explorer.widgets["step"].max == len(film_breaks.whole().steps()) - 1 > hang
    explorer.widgets["broken"].value = "delete the arrive that frees a stage"
    assert explorer.widgets["step"].max == hang


def test_where_a_warp_stands_changes_with_the_step() -> None:
    whole = film_of()
    steps = whole.steps()
    seen = {film_picture.stand(whole, steps[i], 8) for i in range(0, len(steps), 10)}
    assert len(seen) > 5
    assert any("waits for <b>kv.full" in text for text in seen)
    assert "has exited" in film_picture.stand(whole, whole.end, 8)


def test_the_card_keeps_the_same_order() -> None:
    card, source = film_card.recorded()
    assert source.card == "NVIDIA H200"
    mine = film_card.timeline(film_of())
    assert [len(mine.only(role)) for role in ROLE_LANES] == [TILES] * 4
    assert film_card.ahead(mine) == film_card.ahead(card) == (TILES - 1, TILES - 1)


def test_a_statement_that_ends_behind_its_text_is_shown_at_its_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(source_lines, "lines_of", lambda file: ("a = 1", "wait(a)", "", "b = 2"))
    place = Place("x.py", 3)
    assert source_lines.written(place) == Place("x.py", 2)
    assert source_lines.line_of(place) == "wait(a)"
    assert [row for row in source_lines.context(place, 1) if row[2]] == [(2, "wait(a)", True)]
    assert source_lines.written(Place("x.py", 4)).line == 4
    assert source_lines.line_of(Place("x.py", 9)) == ""
