"""Exercises of notebooks 20 to 29: layouts, banks, pages."""

from __future__ import annotations

from ...core.errors import InvalidInput
from .. import banks
from ..layout import Layout
from .hints import Attempt, Check, Hint, need, number, parts, short


def _transposing_tiles(attempt: Attempt) -> str:
    text = attempt.plain()
    need(
        isinstance(text, str), f"Write the layout as text, such as '(4,6):(6,1)', not {short(text)}"
    )
    try:
        layout = Layout.of(text)
    except InvalidInput as error:
        raise Hint(f"This is not a layout: {error}") from error
    wanted = [
        6 * (2 * (tile // 2) + place // 3) + 3 * (tile % 2) + place % 3
        for tile in range(4)
        for place in range(6)
    ]
    got = layout.offsets()
    need(len(got) == 24, f"It has {len(got)} coordinates; the matrix has 24 elements")
    twice = next((i for i in range(24) if got[i] in got[:i]), None)
    if twice is not None:
        raise Hint(
            f"Offset {got[twice]} is reached twice, by coordinates {got.index(got[twice])} and "
            f"{twice}, so that some other element is never reached"
        )
    need(max(got) == 23, f"Offset {max(got)} is no element: the last of the 24 is at offset 23")
    wrong = next((i for i in range(24) if got[i] != wanted[i]), None)
    if wrong is not None:
        raise Hint(
            f"Place {wrong % 6} of tile {wrong // 6} is at offset {got[wrong]}, which is row "
            f"{got[wrong] // 6}, column {got[wrong] % 6}: not the element that was asked for"
        )
    return f"{layout} visits the tiles in the order that was asked for."


def _wider_rows(attempt: Attempt) -> str:
    starts, turns = parts(attempt(), "banks", "turns")
    offsets = [48 * row for row in range(8)]
    need(
        isinstance(starts, list | tuple) and len(starts) == 8,
        "The first value is a list: the bank in which each of the eight rows begins",
    )
    need(starts != offsets, "Those are byte offsets; a bank is 4 bytes wide, and there are 32")
    for row, (start, offset) in enumerate(zip(starts, offsets, strict=True)):
        need(
            start == banks.bank_of(offset),
            f"Row {row} begins {offset} bytes in: which of the 32 banks of 4 bytes is that?",
        )
    need(
        number(turns, "The number of turns") == banks.turns(offsets),
        "Each vector covers four banks: how many of the eight vectors want the same four?",
    )
    return "48 is 3 x 16, and 3 is odd: the rows visit all eight groups of banks by themselves."


def _lookup(attempt: Attempt) -> str:
    slot, touched = parts(attempt(), "function", "pages")
    look = Attempt(slot)
    table = [7, 3]
    for token, why in ((0, "the first row of its page"), (31, "the last row of the first page")):
        need(
            look(table, 32, token) == table[0] * 32 + token,
            f"Token {token} is {why}: page id times page size, and the row within the page",
        )
    need(
        look(table, 32, 40) == table[1] * 32 + 8,
        "Token 40 lies on the second page of the table: which entry is that, and which row of it?",
    )
    need(
        look([5, 2, 9], 16, 40) == 9 * 16 + 8,
        "With pages of 16 token 40 lies elsewhere: divide by the page size that is handed over",
    )
    need(
        number(touched, "The number of pages") == 64 // 32,
        "A tile that begins at a multiple of 64 begins on a new page: how many pages does it fill?",
    )
    return "One division, one remainder, one look-up in the table: that is paging."


CHECKS: dict[str, Check] = {"20.1": _transposing_tiles, "21.1": _wider_rows, "22.1": _lookup}
