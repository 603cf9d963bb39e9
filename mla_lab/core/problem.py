"""One decode call as numbers: lengths, heads, formats, least traffic and operations."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from numbers import Integral

import numpy as np

from .dims import FP8_656_BYTES, LATENT_DIM, ROPE_DIM
from .errors import invalid, invalid_type

#: bytes of one element of a dense format
ELEMENT_BYTES = {"bf16": 2, "fp16": 2, "e4m3": 1, "fp32": 4, "fp64": 8}
#: cached token formats (`dims.FP8_656_BYTES`)
KV_FORMATS = ("bf16", "fp16", "e4m3", "fp8_656", "fp32", "fp64")
#: numbers of a problem, and the least of each
LEAST = {"heads": 1, "latent_dim": 1, "rope_dim": 0, "page_size": 1, "top_k": 0}


def _whole(name: str, value: object) -> int:
    """An int, Python's or NumPy's (no bool)."""
    if not isinstance(value, Integral) or isinstance(value, bool):
        raise invalid_type(name, repr(value), "an int")
    return int(value)


def _lengths(name: str, values: Iterable[int]) -> tuple[int, ...]:
    if not isinstance(values, Iterable):
        raise invalid_type(name, repr(values), "lengths, one of each request")
    result = tuple(v if type(v) is int else _whole(name, v) for v in values)
    if any(v < 0 for v in result):
        raise invalid(name, f"{min(result)}", "lengths of 0 or more")
    return result


@dataclass(frozen=True)
class Problem:
    """One MLA decode call. Lengths are in tokens; `kv_lens` count the new tokens in.

    `top_k` > 0 makes it sparse: each query token reads that many token slots, and
    `kv_lens` plays no part in the work.
    """

    q_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]
    heads: int
    latent_dim: int = LATENT_DIM
    rope_dim: int = ROPE_DIM
    q_dtype: str = "bf16"
    kv_format: str = "bf16"
    out_dtype: str = "bf16"
    page_size: int = 64
    top_k: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "q_lens", _lengths("q_lens", self.q_lens))
        object.__setattr__(self, "kv_lens", _lengths("kv_lens", self.kv_lens))
        if not self.q_lens:
            raise invalid("q_lens", "no length", "one request or more")
        if len(self.q_lens) != len(self.kv_lens):
            raise invalid(
                "kv_lens", f"{len(self.kv_lens)} lengths", f"one per q_lens ({len(self.q_lens)})"
            )
        for name, least in LEAST.items():
            value = getattr(self, name)
            if type(value) is not int:
                value = _whole(name, value)
                object.__setattr__(self, name, value)
            if value < least:
                raise invalid(name, value, f"{least} or more")
        if self.kv_format not in KV_FORMATS:
            raise invalid("kv_format", self.kv_format, KV_FORMATS)
        for name in ("q_dtype", "out_dtype"):
            if getattr(self, name) not in ELEMENT_BYTES:
                raise invalid(name, getattr(self, name), tuple(ELEMENT_BYTES))

    @classmethod
    def uniform(cls, batch: int, q_len: int, kv_len: int, heads: int, **fields: object) -> Problem:
        """`batch` requests of the same lengths."""
        batch = _whole("batch", batch)
        if batch < 1:
            raise invalid("batch", batch, "1 or more")
        return cls((q_len,) * batch, (kv_len,) * batch, heads, **fields)  # type: ignore[arg-type]

    @property
    def batch(self) -> int:
        return len(self.q_lens)

    @cached_property
    def total_q(self) -> int:
        """Query tokens in all."""
        return sum(self.q_lens)

    @cached_property
    def total_kv(self) -> int:
        """Cached tokens that are read, counted once per request (per query token if sparse)."""
        return self.total_q * self.top_k if self.top_k else sum(self.kv_lens)

    @property
    def head_dim(self) -> int:
        """Width of a query and of a cached key: latent and rope."""
        return self.latent_dim + self.rope_dim

    @cached_property
    def rows(self) -> np.ndarray:
        """Query rows (q_len x heads) of each request, int64 [batch]."""
        return np.asarray(self.q_lens, dtype=np.int64) * self.heads

    @property
    def kv_token_bytes(self) -> int:
        """Bytes of one cached token."""
        if self.kv_format == "fp8_656":
            return FP8_656_BYTES
        return self.head_dim * ELEMENT_BYTES[self.kv_format]

    def flops(self) -> int:
        """Operations of both matrix products, each multiply-add as two, no causal discount.

        2 x rows x kv_len x (576 + 512), as the published tables count.
        """
        per_pair = 2 * (self.head_dim + self.latent_dim)
        if self.top_k:
            return per_pair * self.heads * self.total_q * self.top_k
        pairs = int((self.rows * np.asarray(self.kv_lens, dtype=np.int64)).sum())
        return per_pair * pairs

    def bytes(self) -> int:
        """Least traffic: every needed KV token and query read once, every output written once. Of a
        sparse call each query token has slots of its own: one that two of them chose counts twice.
        """
        q = self.total_q * self.heads * self.head_dim * ELEMENT_BYTES[self.q_dtype]
        out = self.total_q * self.heads * self.latent_dim * ELEMENT_BYTES[self.out_dtype]
        return self.total_kv * self.kv_token_bytes + q + out

    def intensity(self) -> float:
        """Operations per byte of least traffic."""
        return self.flops() / self.bytes()
