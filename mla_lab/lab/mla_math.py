"""Multi-head latent attention of one layer in NumPy, twice, with every multiply-add counted.

Shapes and names follow DeepSeek-V2 (arXiv:2405.04434, section 2.1): a token's keys and values
are linear maps of one latent of 512; a rope key of 64 is shared by all heads. Per head, 128 query
columns meet the latent part and 64 the rope part; values have 128 columns.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod

import numpy as np

NOPE, ROPE, LATENT, VALUE = 128, 64, 512, 128


@dataclass
class Counter:
    """Multiplies matrices and counts the operations, two a multiply-add."""

    flops: int = 0
    by_step: dict[str, int] = field(default_factory=dict)

    def einsum(self, step: str, formula: str, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        """np.einsum of two operands; `step` names what it is for."""
        sizes = dict(zip(formula.split("->")[0].replace(",", ""), a.shape + b.shape, strict=True))
        count = 2 * prod(sizes.values())
        self.flops += count
        self.by_step[step] = self.by_step.get(step, 0) + count
        return np.einsum(formula, a, b, optimize=True)


@dataclass(frozen=True)
class Layer:
    """Up-projections of one layer: keys [heads, 128, 512], values [heads, 512, 128]."""

    up_key: np.ndarray
    up_value: np.ndarray

    @classmethod
    def random(cls, heads: int, seed: int = 0) -> Layer:
        rng = np.random.default_rng(seed)
        shapes = (heads, NOPE, LATENT), (heads, LATENT, VALUE)
        key, value = (rng.standard_normal(shape) / LATENT**0.5 for shape in shapes)
        return cls(key, value)

    @property
    def heads(self) -> int:
        return len(self.up_key)


@dataclass(frozen=True)
class Step:
    """One decode step: queries [q_len, heads, 192] and the cache, latent and rope."""

    q_nope: np.ndarray
    q_rope: np.ndarray
    latent: np.ndarray
    k_rope: np.ndarray

    @classmethod
    def random(cls, q_len: int, kv_len: int, heads: int, seed: int = 1) -> Step:
        rng = np.random.default_rng(seed)
        shapes = (q_len, heads, NOPE), (q_len, heads, ROPE), (kv_len, LATENT), (kv_len, ROPE)
        return cls(*(rng.standard_normal(shape) for shape in shapes))


def softmax(scores: np.ndarray) -> np.ndarray:
    """Over the last axis."""
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return np.asarray(weights / weights.sum(-1, keepdims=True))


SCALE = (NOPE + ROPE) ** -0.5


def naive(layer: Layer, step: Step, count: Counter) -> np.ndarray:
    """Expand the cache to full keys and values of every head, then attend: [q, heads, 128]."""
    keys = count.einsum("expand keys", "tl,hnl->thn", step.latent, layer.up_key)
    values = count.einsum("expand values", "tl,hlv->thv", step.latent, layer.up_value)
    scores = count.einsum("scores", "qhn,thn->qht", step.q_nope, keys)
    scores = scores + count.einsum("scores, rope", "qhr,tr->qht", step.q_rope, step.k_rope)
    return count.einsum("values", "qht,thv->qhv", softmax(scores * SCALE), values)


def absorbed(layer: Layer, step: Step, count: Counter) -> np.ndarray:
    """Move both maps to the query's side: the cache is used as it lies: [q, heads, 128]."""
    query = count.einsum("absorb key map", "qhn,hnl->qhl", step.q_nope, layer.up_key)
    scores = count.einsum("scores", "qhl,tl->qht", query, step.latent)
    scores = scores + count.einsum("scores, rope", "qhr,tr->qht", step.q_rope, step.k_rope)
    mixed = count.einsum("values", "qht,tl->qhl", softmax(scores * SCALE), step.latent)
    return count.einsum("apply value map", "qhl,hlv->qhv", mixed, layer.up_value)


def naive_flops(q_len: int, kv_len: int, heads: int) -> int:
    """Operations of `naive`: the cache is expanded once, then 192 + 128 a pair and head."""
    expand = 2 * kv_len * heads * LATENT * (NOPE + VALUE)
    return expand + 2 * q_len * kv_len * heads * (NOPE + ROPE + VALUE)


def absorbed_flops(q_len: int, kv_len: int, heads: int) -> int:
    """Operations of `absorbed`: two maps of the query, then 576 + 512 a pair and head."""
    maps = 2 * q_len * heads * LATENT * (NOPE + VALUE)
    return maps + 2 * q_len * kv_len * heads * (LATENT + ROPE + LATENT)


def break_even() -> float:
    """New tokens at which both forms cost the same over a long cache."""
    return LATENT * (NOPE + VALUE) / (2 * LATENT - NOPE - VALUE)
