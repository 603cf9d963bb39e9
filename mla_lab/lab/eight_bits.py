"""Arithmetic of an fp8 cache: bytes of a token, e4m3, hi + lo queries, rounded softmax weights.

`mla_lab.cute.swap_ab_sm90` has the kernels' version; here it is on small tensors in float64, so
that the rounding in question is the only error. `kernel_errors` has the kernels' own, as recorded.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..core.dims import LATENT_DIM, ROPE_DIM
from ..core.errors import invalid
from ..core.kv_cache import (
    E4M3_MAX,
    ROPE_BEGIN,
    SCALE_GROUP,
    SCALES_BEGIN,
    pack,
    token_bytes,
    unpack,
)
from ..core.problem import ELEMENT_BYTES
from ..core.resources import data_dir
from ..plan.promotion import PROMOTED_KEYS
from ..verify.eight_bit_error import exact
from ..verify.record import read
from ..verify.rounding import worst_of
from .source import Source
from .tables import Table, table

#: errors of our kernels over an fp8 cache, beside those of torch with the same rounding
RECORD = "records/h200_eight_bit_errors.jsonl"
#: value of one unit of the lo term
LOW = 1 / 16
#: a row's largest magnitude is scaled to [TOP / 2, TOP)
TOP = 256.0
#: roundings of softmax weights by name; a number multiplies them before rounding to e4m3
WEIGHTS = {"bf16": 0, "e4m3 x 1": 1, "e4m3 x 256": 256, "e4m3 x 448": 448, "two terms x 256": 256}


class Field(NamedTuple):
    """Bytes [begin, end) of a stored token: elements of `size` bytes, the first named `first`."""

    part: str
    begin: int
    end: int
    size: int
    first: int = 0

    def element(self, byte: int) -> int:
        """Number of the element that holds `byte`."""
        return self.first + (byte - self.begin) // self.size


def fields(kv_format: str) -> tuple[Field, ...]:
    """Parts of a stored token, in order; the latent of the 656-byte format by scale group."""
    if kv_format == "fp8_656":
        groups = LATENT_DIM // SCALE_GROUP
        return (
            *(
                Field("latent", g * SCALE_GROUP, (g + 1) * SCALE_GROUP, 1, g * SCALE_GROUP)
                for g in range(groups)
            ),
            Field("scale", SCALES_BEGIN, ROPE_BEGIN, 4),
            Field("rope", ROPE_BEGIN, token_bytes(kv_format), 2),
        )
    size = token_bytes(kv_format) // (LATENT_DIM + ROPE_DIM)
    middle = LATENT_DIM * ELEMENT_BYTES[kv_format]
    return (Field("latent", 0, middle, size), Field("rope", middle, token_bytes(kv_format), size))


def field_at(kv_format: str, byte: int) -> Field:
    """The part that holds `byte` of a token."""
    for field in fields(kv_format):
        if field.begin <= byte < field.end:
            return field
    raise invalid("byte", byte, f"0 to {token_bytes(kv_format) - 1}")


def e4m3(x: Tensor) -> Tensor:
    """`x` to the nearest e4m3 number, saturating at 448; float64."""
    return unpack(pack(x.float(), "e4m3"))


def int8(x: Tensor) -> Tensor:
    """`x` to the nearest of 255 evenly spaced numbers up to its greatest magnitude; float64."""
    step = x.abs().amax().double() / 127
    return torch.round(x.double() / step) * step


class Terms(NamedTuple):
    """Two e4m3 numbers of an element, float64."""

    hi: Tensor
    lo: Tensor

    @property
    def sum(self) -> Tensor:
        """The number they represent."""
        return self.hi + self.lo * LOW


def split(x: Tensor) -> Terms:
    """x = hi + lo / 16 as closely as possible, for magnitudes up to 256: hi is x rounded to e4m3,
    lo is 16 (x - hi) rounded to e4m3.
    """
    hi = e4m3(x)
    return Terms(hi, e4m3((x.double() - hi) / LOW))


def row_scale(rows: Tensor) -> Tensor:
    """The power of two that scales each row's largest magnitude to 128 .. 256, [..., 1]."""
    top = rows.double().abs().amax(-1, keepdim=True)
    _, exponent = torch.frexp(top.clamp_min(2.0**-126))
    return torch.ldexp(torch.full_like(top, TOP), -exponent)


def splits_exactly(rows: Tensor) -> Tensor:
    """True for elements of rows [..., n] that two e4m3 numbers represent exactly."""
    scaled = rows.double() * row_scale(rows)
    return split(scaled).sum == scaled


def rounded(weights: Tensor, rounding: str) -> Tensor:
    """Softmax weights relative to the row's largest, rounded by an entry of WEIGHTS."""
    if rounding not in WEIGHTS:
        raise invalid("rounding", repr(rounding), tuple(WEIGHTS))
    factor = WEIGHTS[rounding]
    if not factor:
        return weights.bfloat16().double()
    if rounding.startswith("two"):
        return split(weights * factor).sum / factor
    return e4m3(weights * factor) / factor


def decode(query: Tensor, keys: Tensor, scale: float, rounding: str, *, sums: str) -> Tensor:
    """Attention of query [heads, 576] over keys [kv, 576] with rounded weights: [heads, 512].

    sums: "rounded" divides by the sum of the rounded weights, "exact" by that of the exact ones.
    """
    if sums not in ("rounded", "exact"):
        raise invalid("sums", repr(sums), ("rounded", "exact"))
    scores = scale * (query.double() @ keys.double().T)
    weights = torch.exp(scores - scores.amax(-1, keepdim=True))
    kept = rounded(weights, rounding)
    total = (kept if sums == "rounded" else weights).sum(-1, keepdim=True)
    return kept @ keys[:, :LATENT_DIM].double() / total


def sum_errors(query: Tensor, keys: Tensor, scale: float) -> list[tuple[str, float, float]]:
    """(rounding, error with sums of rounded weights, with exact sums), against exact attention."""
    wanted = exact(query, keys.double(), scale)

    def error(rounding: str, sums: str) -> float:
        out = decode(query, keys, scale, rounding, sums=sums)
        return float((out - wanted).norm() / wanted.norm())

    return [(name, error(name, "rounded"), error(name, "exact")) for name in WEIGHTS]


def spread_errors(octaves: int) -> dict[str, float]:
    """Error of the quietest of 64 tokens, whose sizes span `octaves` powers of two, by format."""
    random = torch.Generator().manual_seed(0)
    sizes = torch.exp2(-torch.linspace(0, octaves, 64, dtype=torch.float64)).unsqueeze(-1)
    tokens = torch.randn(64, LATENT_DIM + ROPE_DIM, generator=random).double() * sizes
    by_token = tokens.abs().amax(-1, keepdim=True) / E4M3_MAX
    by_tensor = tokens.abs().amax() / E4M3_MAX
    back = {
        "int8, one scale": int8(tokens),
        "e4m3, one scale": e4m3(tokens / by_tensor) * by_tensor,
        "e4m3, a scale a token": e4m3(tokens / by_token) * by_token,
        "656 bytes, a scale for 128": unpack(pack(tokens.float(), "fp8_656")),
    }
    latent = tokens[-1, :LATENT_DIM]
    return {
        name: float((values[-1, :LATENT_DIM] - latent).norm() / latent.norm())
        for name, values in back.items()
    }


def kernel_errors() -> Table:
    """Errors of our kernels over those of torch with the same rounding: a row for each kernel and
    format; pieces that keep_ab promotes are apart.
    """
    head, *rows = read(data_dir() / RECORD)
    here = head["environment"]
    source = Source("recorded", card=here["card"]["name"], date=here["date"])
    worst = worst_of(row for row in rows if row["status"] == "ok")
    shown = [
        (query, cache, kernel, f"beyond {PROMOTED_KEYS:,}" if beyond else "", f"{times:.2f}x")
        for (query, cache, kernel, beyond), times in worst.items()
    ]
    return table(("query", "cache", "kernel", "keys", "of torch's error"), shown, source=source)
