"""Parts of the exercises 60 to 69 that are plain numbers, judged before anything is compiled."""

from __future__ import annotations

import struct
from collections.abc import Callable
from itertools import pairwise
from typing import Any

from ...core.gpu import H200
from .. import banks
from .hints import Hint, need, number, parts, short

#: `setmaxnreg`: multiples of 8 in this range (PTX ISA)
LEAST, MOST, GRAIN = 24, 256, 8
WARP_GROUP = 128
#: the word of -0.0
MINUS_ZERO = -(1 << 31)
CTA_THREADS = 3 * WARP_GROUP
#: registers a thread at launch, and of the CTA: what setmaxnreg moves
AT_LAUNCH = H200.registers_per_sm // CTA_THREADS // GRAIN * GRAIN
CTA_REGISTERS = CTA_THREADS * AT_LAUNCH


def _registers(mine: Any) -> None:
    if not mine:
        return
    counts = []
    for name in ("producer_registers", "consumer_registers"):
        count = number(getattr(mine, name)(), name)
        need(
            count % GRAIN == 0 and LEAST <= count <= MOST,
            f"{name} returns {count:g}: setmaxnreg takes multiples of {GRAIN} from {LEAST} to "
            f"{MOST}",
        )
        counts.append(int(count))
    producer, consumer = counts
    total = WARP_GROUP * (producer + 2 * consumer)
    need(
        total <= CTA_REGISTERS,
        f"One warp group of {producer} and two of {consumer} want {total:,} registers, and the CTA "
        f"had {CTA_REGISTERS:,} at its launch, {AT_LAUNCH} a thread: on a card the third warp "
        "group would wait forever",
    )
    need(
        total + 2 * WARP_GROUP * GRAIN > CTA_REGISTERS,
        f"{CTA_REGISTERS - total:,} registers of the CTA are left over: what can the consumers "
        "have, and what is the least that a producer needs?",
    )
    need(
        producer <= LEAST + GRAIN,
        f"A producer that only issues copies holds {producer} registers: it can do with fewer, "
        "and the consumers cannot",
    )
    used = sorted(mine.element_of(b, t) for b in range(2) for t in range(CTA_THREADS))
    twice = next((a for a, b in pairwise(used) if a == b), None)
    if twice is not None:
        raise Hint(f"Two threads write element {short(twice)}: the CTAs write over each other")


def _swizzle(mine: Any) -> None:
    if not mine:
        return
    places = [mine.swizzled(i) for i in range(64 * 64)]
    need(all(isinstance(p, int) for p in places), "swizzled computes one integer of another")
    broken = next((i for i in range(4096) if places[i] != places[i - i % 8] + i % 8), None)
    need(
        broken is None,
        f"Number {broken} does not follow its neighbour: the 8 numbers of a vector have to stay "
        "together, or no access of 16 bytes is possible",
    )
    need(len(set(places)) == 4096, "Some place is taken twice: a swizzle moves, it loses nothing")
    turns = max(
        banks.turns([2 * places[64 * row + 8 * v] for row in range(first, first + 8)])
        for v in range(8)
        for first in range(0, 64, 8)
    )
    need(
        turns == 1,
        f"Eight rows of one column of vectors take {turns} turns: they want the same banks",
    )
    vectors = [(row, v) for row in range(64) for v in range(8)]
    moved = [(r, v) for r, v in vectors if places[64 * r + 8 * v] != 64 * r + 8 * (v ^ r % 8)]
    if moved:
        row, vector = moved[0]
        place = places[64 * row + 8 * vector]
        left = "" if place // 64 == row else f", which is in row {place // 64}"
        raise Hint(
            f"Without conflicts, but another swizzle than the copy engine's: vector {vector} of "
            f"row {row} lies at {place}{left}. Which bits of the row are xored, and are they xored?"
        )
    _swizzle_numbers(mine)


def _swizzle_numbers(mine: Any) -> None:
    """(bits, base, shift), each by what it counts."""
    numbers = parts(mine.swizzle_numbers(), "bits", "base", "shift")
    need(all(isinstance(n, int) for n in numbers), "Three whole numbers: bits, base, shift")
    bits, base, shift = numbers
    need(
        2**base == 8,
        f"base = {base} keeps {2**base if 0 <= base < 12 else 'other'} numbers together, and a "
        "vector has 8: each unit here is one number of 2 bytes",
    )
    need(
        2**bits == 8,
        f"bits = {bits}: the bits that change number the vectors of a row. A row has 8: how many "
        "bits tell 8 things apart?",
    )
    need(
        2 ** (base + shift) == 64,
        f"shift = {shift}: bits {base} to {base + bits - 1} are xored with those from bit "
        f"{base + shift} on, and the row begins at another bit",
    )


def _shares(mine: Any) -> None:
    for workers, tiles in ((4, 11), (4, 9), (7, 3), (2, 64)):
        cuts = [mine.first_of_share(w, workers, tiles) for w in range(workers + 1)]
        case = f"{tiles} tiles on {workers} workers are cut at {short(cuts)}"
        need(cuts[0] == 0 and cuts[-1] == tiles, f"{case}: which tiles belong to no worker?")
        sizes = [b - a for a, b in pairwise(cuts)]
        need(min(sizes) >= 0, f"{case}: a share ends before it begins")
        need(
            max(sizes) - min(sizes) <= 1,
            f"{case}: the shares are {short(sizes)}, and could differ by one tile at most",
        )


class _Word(float):
    """An fp32 of a step's function, called as Python: its bits as the DSL gives them."""

    def bitcast(self, _kind: Any) -> int:
        """The 32 bits as a signed integer."""
        (bits,) = struct.unpack("<i", struct.pack("<f", self))
        return int(bits)


def _words(mine: Any) -> None:
    """Words of the exchange, where the function is plain arithmetic: each is its number's own, and
    that of +0.0 means zero too. The emulator alone finds no changed last bit.
    """
    for value in (1.5, -0.0, -2.0e-38, 3.0e5, 0.0):
        number_of = _Word(value)
        try:
            word = int(mine.nonzero_word(number_of))
        except Exception:  # it needs the compiler
            return
        right = number_of.bitcast(int) or MINUS_ZERO
        need(
            value or word != 0,
            "A worker polls a word that stays 0: what travels where a sum is +0.0?",
        )
        need(
            word == right,
            f"{value} travels as the word {word & 0xFFFFFFFF:#010x}, which is another number: all "
            "but +0.0 keep their words, and of +0.0 one other word means the same",
        )


def _workers(mine: Any) -> None:
    if mine:
        _shares(mine)
        _words(mine)


NUMBERS: dict[str, Callable[[Any], None]] = {"60": _registers, "62": _swizzle, "69": _workers}
