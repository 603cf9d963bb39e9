"""Exercises of notebooks 00 to 19: sizes, operations, rooflines."""

from __future__ import annotations

from ..measuring import measured_card
from ..roofline import free_drafts
from .hints import Attempt, Check, need, number, parts


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
    need(plain != right + 1, "That counts the token itself; drafts are the rows beyond it")
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


CHECKS: dict[str, Check] = {"00.1": _cache_bytes, "10.1": _small_latent, "11.1": _kimi_drafts}
