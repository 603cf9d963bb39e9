"""Exercises of notebooks 00 to 29: sizes, operations, rooflines, layouts, banks, pages."""

from __future__ import annotations

from ...core.errors import InvalidInput
from .. import banks
from ..layout import Layout
from ..measuring import measured_card
from ..roofline import free_drafts
from .hints import Attempt, Check, Hint, need, number, parts, short


def _cache_bytes(attempt: Attempt) -> str:
    mla, ordinary = parts(attempt(), "mla", "ordinary")
    mla, ordinary = number(mla, "The first value"), number(ordinary, "The second value")
    need(mla != 576, "576 counts the numbers of a row; how many bytes does one take in bf16?")
    need(mla != 576 * 4, "The first value: a bf16 number has 16 bits; you count 32, as of float32")
    need(mla == 576 * 2, "The first value: one row of 576 numbers, in bytes of bf16")
    need(
        ordinary not in (128 * 192 * 2, 128 * 128 * 2),
        "The second value: ordinary attention caches a key *and* a value for each head",
    )
    need(
        ordinary == 128 * (192 + 128) * 2,
        "The second value: numbers of one head's key and value, times heads, times bytes of bf16",
    )
    return f"1,152 bytes against 81,920: the cache of MLA is {ordinary / mla:.0f} times smaller."


def _small_latent(attempt: Attempt) -> str:
    size, operations, crossing = parts(attempt(), "bytes", "operations", "new tokens")
    latent, rope, nope, value = 256, 64, 128, 128
    size = number(size, "The size")
    need(size != 2 * latent, "A cached row holds more than the latent: rope has to be stored too")
    need(
        size == 2 * (latent + rope), "The size: latent and rope numbers of one row, two bytes each"
    )
    operations = number(operations, "The count of operations")
    need(
        operations != 2 * latent + rope,
        "That counts multiply-adds; an operation is one multiplication or one addition",
    )
    need(
        operations == 2 * (latent + rope + latent),
        "Operations: a score is a product as long as the row, a value one as long as the latent",
    )
    wanted = latent * (nope + value) / (2 * latent - nope - value)
    crossing = number(crossing, "The number of new tokens")
    need(
        -0.5 < crossing - wanted <= 1,  # equal there, cheaper from the next one on
        "The crossing: expanding costs the same once as the longer rows cost for all new tokens. "
        "Over a long cache the two maps of the query do not count; the paragraph below the "
        "explorer has the same sum for a latent of 512",
    )
    return "A smaller latent nearly halves the cache and needs more new tokens before naive pays."


def _kimi_drafts(attempt: Attempt) -> str:
    plain, packed = parts(attempt(), "bf16", "656 bytes")
    heads = 64 // 4
    plain, packed = number(plain, "The first value"), number(packed, "The second value")
    right = free_drafts(measured_card(), heads)
    need(
        plain != right + 1,
        "That counts the token itself, or the bytes of query and output: drafts are the rows "
        "beyond it, and a long cache outweighs those bytes",
    )
    need(
        plain == right,
        "bf16: with 64 heads over four ranks, how many heads has one rank, and how many rows of "
        "so many heads fit under the ridge?",
    )
    need(
        packed != plain,
        "656 bytes: the products are the same and the bytes fewer, so the ridge is reached sooner",
    )
    need(
        packed == free_drafts(measured_card(), heads, "fp8_656"),
        "656 bytes: count the rows whose operations per byte of 656 stay below the ridge",
    )
    return f"{plain:.0f}, and {packed:.0f}: a smaller cache leaves less memory time to hide in."


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
    sizes = [mode.size for mode in layout.modes]
    need(
        sizes == [6, 4],
        f"The offsets are right, and the modes count {short(sizes)} places: the first is to count "
        "the places of a tile, the second the tiles, and a mode may nest",
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


CHECKS: dict[str, Check] = {
    "00.1": _cache_bytes,
    "10.1": _small_latent,
    "11.1": _kimi_drafts,
    "20.1": _transposing_tiles,
    "21.1": _wider_rows,
    "22.1": _lookup,
}
