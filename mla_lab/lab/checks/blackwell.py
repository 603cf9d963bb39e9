"""Exercise of notebook 56: where an element of S lies in tensor memory."""

from __future__ import annotations

from .hints import Attempt, Check, need, parts

#: (buffer, row, token) of scores that are tried
TRIED = ((0, 5, 9), (0, 70, 9), (0, 5, 100), (1, 5, 9), (1, 127, 127), (0, 63, 64), (1, 64, 63))


def _home(attempt: Attempt) -> str:
    from .. import tile_homes

    tile = tile_homes.TILES["S, 128 rows x 128 tokens"]
    for buffer, row, token in TRIED:
        case = f"Buffer {buffer}, row {row}, token {token}: "
        names = ("CTA's rank", "lane", "column")
        cta, lane, column = parts(attempt(buffer, row, token), *names)
        right = tile_homes.blackwell(tile, row, token)
        need(cta == right.cta, case + "the pair halves the rows, and the leader has the first half")
        need(0 <= lane < 128, case + "a CTA's tensor memory has lanes 0 to 127")
        need(
            lane % 64 == row % 64,
            case + "a row keeps its place among the rows of its CTA, in either half of the lanes",
        )
        need(lane == right.lane, case + "the later half of the tokens lies in the other lanes")
        need(0 <= column < 512, case + "a lane has columns 0 to 511")
        need(
            column % 64 == right.column,
            case + "a lane holds one half of the tokens, so its columns count within the half",
        )
        need(
            column == right.column + 64 * buffer,
            case + "S of odd tiles lies behind S of even tiles, and both are as wide",
        )
    return "So thread lane of the softmax warp group has one row and half its tokens, no shuffles."


CHECKS: dict[str, Check] = {"56.1": _home}
