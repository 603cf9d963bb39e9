"""Exercises of notebooks 40 to 99: eight bits, budgets, kernels, measurements, drafts."""

from __future__ import annotations

import torch

from ...core.gpu import H200
from ..eight_bits import e4m3
from ..explorers import transpose
from ..explorers.budget import Budget
from ..tiny_decode import kept_of
from .hints import Attempt, Check, need, number, parts, short, truth

#: (buffer, row, token) of scores that are tried
TRIED = ((0, 5, 9), (0, 70, 9), (0, 5, 100), (1, 5, 9), (1, 127, 127), (0, 63, 64), (1, 64, 63))


def _two_terms(attempt: Attempt) -> str:
    numbers = torch.arange(0x3C80, 0x4380, dtype=torch.int16).view(torch.bfloat16).double()
    hi, lo = (torch.as_tensor(x).double() for x in parts(attempt(numbers), "hi", "lo"))
    need(hi.shape == lo.shape == numbers.shape, "hi and lo have the shape of x, one term a number")
    need(torch.equal(e4m3(hi), hi), "hi has to be a number that e4m3 can hold: round it")
    need(torch.equal(e4m3(lo), lo), "lo has to be a number that e4m3 can hold: round it")
    wrong = int((hi + lo / 16 != numbers).sum())
    need(
        not wrong,
        f"{wrong} of {len(numbers)} numbers are not hi + lo / 16: lo stands for what rounding "
        "to hi left over, *in units of a sixteenth*",
    )
    return f"All {len(numbers)} bf16 numbers from 2^-6 to 256 split; the 11 bits of fp16 would not."


def _selectors(attempt: Attempt) -> str:
    m0, m1, *_ = transpose.ldmatrix_trans(0)
    for column, selector in enumerate(parts(attempt(), "lower column", "upper column")):
        need(
            isinstance(selector, int) and 0 <= selector <= 0x7777,
            "A selector is four digits of 0 to 7, such as 0x6240",
        )
        word = transpose.prmt(m0, m1, selector)
        tokens = [token for token, _ in word]
        need(
            [c for _, c in word] == [column] * 4,
            f"{selector:#06x} takes bytes of both columns; a word holds one column of V, "
            f"here column {column}",
        )
        need(
            tokens == [0, 1, 8, 9],
            f"{selector:#06x} gives tokens {tokens}: the lowest digit names the first of them",
        )
    return "Any order serves; the kernel takes the one in which P already lies."


def _proposal(attempt: Attempt) -> str:
    size, fits = parts(attempt(), "bytes", "fits")
    proposal = Budget(64, 128, 2, 2, q_in_registers=True, kv_bytes=1)
    size = number(size, "The size")
    without = proposal.shared()
    need(
        size != proposal.shared_bytes - without["barriers"],
        "The barriers are missing: they take shared memory too",
    )
    need(
        size != proposal.shared_bytes - without["P"], "P is missing: 64 rows of 128 weights in bf16"
    )
    need(
        size == proposal.shared_bytes,
        "Add KV stages (tokens x 576 x bytes of a number, for each stage), P and the barriers; Q "
        "is in registers",
    )
    fits = truth(fits, f"The second value is True or False, and yours is {short(fits)}")
    need(fits == (proposal.verdict() == "fits"), "Compare the size with what a block may have")
    left = H200.smem_per_block - proposal.shared_bytes
    stage = without["KV stages"] // 2
    return f"{size:,.0f} bytes fit; the {left:,} that are left are less than a stage of {stage:,}."


def _matrix_kb(attempt: Attempt) -> str:
    for down in (4, 2, 1):
        across = 8 // down
        scores = 36 * (64 // down + 64 // across) * 32
        values = 4 * (64 // down + 512 // across) * 32
        got = number(attempt(down), "The number of KB")
        case = f"{down} warps share the rows: "
        need(got * 1024 != 8 * scores, case + "that is the scores alone; values are read too")
        need(got * 1024 != scores + values, case + "that is one warp's share; there are eight")
        need(got != 8 * (scores + values), case + "that is bytes; the unit is 1024 of them")
        need(
            got * 1024 == 8 * (scores + values),
            case
            + f"a warp has {64 // down} rows, {64 // across} keys and {512 // across} columns; "
            "each step reads 32 bytes for each of them",
        )
    return "592 KB with 2 down and 4 across, the choice of step 8: the squarest share reads least."


def _verdict(attempt: Attempt) -> str:
    quiet = [20.0, 20.1, 20.2, 20.0, 20.1, 20.1, 20.0, 20.2, 20.1]
    wild = [18.0, 25.0, 20.0, 23.0, 17.0, 26.0, 20.0, 24.0, 19.0]
    cases = (
        (quiet, quiet, "same", "a variant against itself"),
        (quiet, [0.98 * t for t in quiet], "same", "medians 2 % apart, and 3 % is noise at least"),
        (quiet, [0.9 * t for t in quiet], "faster", "b takes 10 % less time in each quiet round"),
        (quiet, [1.1 * t for t in quiet], "slower", "b takes 10 % more time in each quiet round"),
        (quiet, [0.9 * t for t in wild], "same", "rounds of b spread by more than the difference"),
        (wild, [0.9 * t for t in quiet], "same", "rounds of a spread by more than the difference"),
        (quiet, [*quiet[:8], 90.0], "same", "one disturbed round does not move a median"),
        (
            quiet,
            [*(0.9 * t for t in quiet[:8]), 90.0],
            "faster",
            "one disturbed round does not hide 10 %",
        ),
    )
    for a, b, right, hint in cases:
        got = attempt(a, b)
        need(
            got in ("faster", "slower", "same"),
            f"Return 'faster', 'slower' or 'same', in place of {got!r}",
        )
        need(got == right, f"'{got}' is the wrong word for this pair: {hint}")
    return "Your verdict looks at the noise first."


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


def _kept(attempt: Attempt) -> str:
    cases: tuple[tuple[list[int], list[int], str], ...] = (
        ([7, 8, 9], [7, 8, 9, 4], "the whole draft is right, and one more token comes for free"),
        ([7, 8, 9], [7, 5, 9, 4], "the second guess is wrong: what stands in its place?"),
        ([7, 8, 9], [6, 8, 9, 4], "the first guess is wrong; the later ones were judged behind it"),
        ([], [3], "without a draft the call is an ordinary step"),
        ([7, 7], [7, 7, 7], "equal tokens are kept one by one"),
    )
    for draft, chosen, hint in cases:
        got = attempt(list(draft), list(chosen))
        need(isinstance(got, list | tuple), f"Return a list of tokens, in place of {got!r}")
        case = f"Draft {draft}, chosen by the model {chosen}: "
        need(
            len(got) >= 1,
            f"{case}nothing is returned, and the model's own next token is always right",
        )
        need(len(got) <= len(draft) + 1, f"{case}{len(got)} tokens are more than the draft and one")
        need(list(got) == kept_of(draft, chosen), f"{case}{list(got)} is not it: {hint}")
    return "Every call gives at least one token, and the text is the one without drafts."


CHECKS: dict[str, Check] = {
    "40.1": _two_terms,
    "40.2": _selectors,
    "51.1": _proposal,
    "53.1": _matrix_kb,
    "56.1": _home,
    "70.1": _kept,
    "90.1": _verdict,
}
