"""Notebook 36: recorded steps of two ranks, and the model of words that cross between them."""

from __future__ import annotations

import pytest

from mla_lab.lab import peer_words
from mla_lab.lab.explorers.ranks import WAYS, RanksExplorer, WordsExplorer, steps, steps_of


@pytest.mark.parametrize("seed", range(10))
def test_with_two_halves_no_word_is_lost(seed: int) -> None:
    found = peer_words.moments(2, seed)
    assert len(found) == peer_words.MOVES + 1
    for ranks in found:
        assert abs(ranks.calls[0] - ranks.calls[1]) <= 1
        assert ranks.lost == ranks.wrong == 0 and not ranks.hung
    assert found[-1].done and found[-1].memory == peer_words.empty(2)


@pytest.mark.parametrize("seed", range(10))
def test_with_one_half_a_rank_that_is_ahead_overwrites(seed: int) -> None:
    last = peer_words.moments(1, seed)[-1]
    assert last.hung and not last.done and last.lost > 0 and last.wrong > 0
    assert last.calls == [peer_words.CALLS, peer_words.CALLS - 1]


def test_moments_are_kept_as_they_were() -> None:
    first, *others = peer_words.moments(2, 0)
    assert first.memory == peer_words.empty(2) and others[0].memory != first.memory


@pytest.mark.parametrize(
    ("halves", "moment", "said"),
    [
        (2, 0, "Rank 0 is in call 0 and rank 1 is in call 0"),
        (2, peer_words.MOVES, "All calls have ended"),
        (1, peer_words.MOVES, "Rank 1 waits for ever; overwritten: 4, taken of a wrong call: 12"),
    ],
)
def test_the_drawing_says_what_is_so(halves: int, moment: int, said: str) -> None:
    explorer = WordsExplorer()
    picture = explorer.picture(halves=halves, moment=moment)
    assert said in picture.alt
    written = picture.markup.count(", of call ")
    ranks = explorer.at({"halves": halves, "moment": moment, "seed": 0})
    held = [word for owner in ranks.memory for half in owner for row in half for word in row]
    assert written == sum(word is not None for word in held)


def test_the_record_has_every_batch_and_both_ways() -> None:
    batches = RanksExplorer().widgets["batch"].options
    for batch in batches:
        rows = steps_of(batch)
        assert [row["kv_len"] for row in rows] == [65536, 262144, 1048576]
        assert all(row["ok"] and row["same_bits"] and row["heads"] == 128 for row in rows)
    assert {row["world"] for row in steps()} == {2}


def test_bars_are_the_parts_and_marks_the_steps() -> None:
    figure = RanksExplorer().picture(batch=4, microseconds=True)
    rows = steps_of(4)
    for way, (parts, step) in WAYS.items():
        bars = [trace for trace in figure.data if trace.type == "bar" and trace.offsetgroup == way]
        assert [list(bar.y) for bar in bars] == [[row[p[1]] for row in rows] for p in parts]
        assert list(bars[-1].base) == pytest.approx(
            [sum(row[p[1]] for p in parts[:-1]) for row in rows]
        )
        (marks,) = (trace for trace in figure.data if trace.name == f"step {way}")
        assert list(marks.y) == [row[step] for row in rows]
    assert rows[0]["time"][:10] in RanksExplorer().note({})


def test_the_title_is_the_first_length_s_share() -> None:
    row = steps_of(1)[0]
    title = RanksExplorer().title(batch=1)
    assert title.startswith("1 request of 65,536 tokens on two cards: ")
    assert f"{row['peers_us'] / row['alone_us']:.2f} by peer memory" in title
