"""Transposition of e4m3 values for WGMMA: ldmatrix.trans moves pairs of bytes, prmt bytes.

Simulates one warp on 16 columns of V and 32 tokens, as in `mla_lab.cute.common.fp8`: the order
follows from moving every byte as the two instructions do.
"""

from __future__ import annotations

from typing import Any

from .. import explorer
from ..source import formula
from ..style import FONT, PAGE_INK, PAGE_TINT
from ..svg import Cell, Svg, box, document, grid, label, row_of, tint

#: tokens of a k-step, and columns of V^T that a warp turns over
TOKENS, COLUMNS = 32, 16
#: byte selectors of prmt: the lower column of a pair, the upper one
ORDERS = (0x6240, 0x7351)

#: (token, column) of a byte
Byte = tuple[int, int]
#: four bytes, the lowest first
Word = tuple[Byte, Byte, Byte, Byte]


def ldmatrix_trans(lane: int) -> tuple[Word, ...]:
    """What a lane gets of four 8 x 8 matrices of pairs of bytes, one for each eight tokens.

    PTX ISA, ldmatrix with .trans: of column lane / 4, rows 2 (lane % 4) and the next.
    """
    pair, first = lane // 4, 2 * (lane % 4)
    words = []
    for matrix in range(TOKENS // 8):
        low, high = 8 * matrix + first, 8 * matrix + first + 1
        words.append(((low, 2 * pair), (low, 2 * pair + 1), (high, 2 * pair), (high, 2 * pair + 1)))
    return tuple(words)


def prmt(x: Word, y: Word, selector: int) -> Word:
    """Four of eight bytes (x 0 to 3, y 4 to 7), the lowest digit of the selector first."""
    both = x + y
    a, b, c, d = (both[selector >> 4 * i & 7] for i in range(4))
    return a, b, c, d


def operand(lane: int) -> tuple[Word, ...]:
    """A lane's four registers of V^T for one k-step: rows g and g + 8, K 0 to 15, then 16 to 31."""
    m = ldmatrix_trans(lane)
    return tuple(prmt(m[2 * i], m[2 * i + 1], order) for i in range(2) for order in ORDERS)


def token_order() -> list[int]:
    """Which token stands at each K of the operand, read off the registers of row 0."""
    order = [-1] * TOKENS
    for lane in range(4):
        for half in range(2):
            for byte, (token, _) in enumerate(operand(lane)[2 * half]):
                order[16 * half + 4 * lane + byte] = token
    return order


class TransposeExplorer(explorer.Explorer):
    """V in shared memory left; a lane's registers after each of the two instructions right."""

    source = formula("PTX ISA")
    frames_over = "lane"

    knobs = explorer.knobs(lane=explorer.integers("lane", 0, 31, 5, width="420px"))

    def figure(self, state: dict[str, Any]) -> Svg:
        lane = state["lane"]
        words = operand(lane)
        tokens = ", ".join(str(token) for token, _ in words[0])
        finding = f"Lane {lane}, first word: column {words[0][0][1]} of tokens {tokens}"
        pictures = row_of([_memory(lane), _registers(lane), _order(lane)], gap=30)
        head = f"<div style='font:16px {FONT};color:{PAGE_INK};margin-bottom:8px'>{finding}</div>"
        return Svg(head + pictures.markup, f"{finding}; {pictures.alt}")

    def note(self, state: dict[str, Any]) -> str:
        g = state["lane"] // 4
        return (
            f"<div>Row {g} of the warp's V^T is column {2 * g}, row {g + 8} column {2 * g + 1}. "
            "P must hold its tokens in the same order along K; any order serves, if both have "
            "it.</div>"
        )


def _memory(lane: int) -> Svg:
    """32 tokens x 16 columns of a tile; the lane's bytes are filled."""
    size, left, top = (16.0, 14.0), 34.0, 44.0
    held = {byte: m for m, word in enumerate(ldmatrix_trans(lane)) for byte in word}
    parts = [label(0, 12, "V in shared memory: a row a token", size=14, anchor="start")]
    for column in range(COLUMNS):
        parts.append(label(left + (column + 0.5) * size[0], top - 10, str(column), size=10))
    for token in range(TOKENS):
        y = top + token * size[1]
        parts.append(label(left - 5, y + size[1] / 2, str(token), size=10, anchor="end"))
        background = Cell("", PAGE_TINT, f"token {token}")
        parts.append(box(left, y, COLUMNS * size[0], size[1], background))
    for (token, column), matrix in held.items():
        cell = Cell("", tint(matrix), f"token {token}, column {column}: matrix {matrix}", True)
        x, y = left + column * size[0], top + token * size[1]
        parts.append(box(x, y, *size, cell))
    alt = f"V in shared memory; lane {lane} holds {len(held)} bytes of it"
    return document(left + COLUMNS * size[0] + 4, top + TOKENS * size[1] + 4, "".join(parts), alt)


def _cells(words: tuple[Word, ...]) -> list[list[Cell]]:
    """token.column, in the colour of the matrix that a byte came from."""
    return [
        [Cell(f"{t}.{c}", tint(t // 8), f"token {t}, column {c}") for t, c in word]
        for word in words
    ]


def _registers(lane: int) -> Svg:
    """The four words after ldmatrix, and after prmt."""
    g = lane // 4
    loaded = grid(
        _cells(ldmatrix_trans(lane)),
        f"Registers of lane {lane} after ldmatrix.trans",
        rows=[f"m{i}" for i in range(4)],
        columns=[f"byte {i}" for i in range(4)],
        size=(48, 28),
        caption="after ldmatrix.trans: token.column",
    )
    turned = grid(
        _cells(operand(lane)),
        f"Registers of lane {lane} after prmt: row {g} is column {2 * g}",
        rows=[f"row {g + 8 * (i % 2)}" for i in range(4)],
        columns=[f"K {4 * (lane % 4) + i}" for i in range(4)],
        size=(48, 28),
        caption="after prmt: A (last two: K + 16)",
    )
    return Svg(f"{loaded.markup}<div style='height:22px'></div>{turned.markup}", turned.alt)


def _order(lane: int) -> Svg:
    """K of the operand against tokens, the lane's own in bold."""
    mine = {token for word in operand(lane) for token, _ in word}
    order = token_order()
    cells = [
        [Cell(str(t), tint(t // 8), f"K {k}: token {t}", t in mine)] for k, t in enumerate(order)
    ][:16]
    return grid(
        cells,
        f"Tokens along K: {order[:16]}",
        rows=[f"K {k}" for k in range(16)],
        size=(64, 25),
        caption="token at K",
    )
