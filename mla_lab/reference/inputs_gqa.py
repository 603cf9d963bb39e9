"""Seeded inputs of a GQA or MQA decode call, poisoned as those of `inputs`."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..call.gqa_args import GQA_PARAMETERS, KV_LAYOUTS, GqaArgs
from ..core import kv_cache as formats
from ..core.errors import invalid
from .inputs import (
    FOREIGN_PAGES,
    KV_STD,
    LEANS,
    draft_mask,
    given,
    page_table,
    prefix_sums,
    zero_bytes,
)

GQA_FEATURES = (
    "chain_mask",  # the causal rule as a packed mask
    "device_scales",  # both scales as fp32 tensors on the device
    "lse",  # return_lse
    "one_tensor",  # keys and values in one tensor [pages, 2, ...]
    "ragged",  # cum_seq_lens_q and max_q_len
    "separate_tables",  # values in other pages than keys
    "sinks",  # one fp32 sink a head
    "tree_mask",  # a random draft tree for each request
)
GQA_DISTRIBUTIONS = ("gauss", "heavy_tailed")


@dataclass(frozen=True)
class GqaShape:
    """One GQA call as numbers; lengths in tokens, the new ones in kv_lens."""

    q_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]
    heads: int
    kv_heads: int
    head_dim: int = 128
    q_dtype: str = "bf16"
    kv_format: str = "bf16"
    page_size: int = 64
    kv_layout: str = "HND"
    window_left: int = -1

    def __post_init__(self) -> None:
        if self.heads % self.kv_heads:
            raise invalid("heads", self.heads, f"a multiple of kv_heads {self.kv_heads}")
        if len(self.q_lens) != len(self.kv_lens):
            raise invalid("kv_lens", len(self.kv_lens), f"one per q_lens ({len(self.q_lens)})")
        if self.kv_layout not in KV_LAYOUTS:
            raise invalid("kv_layout", repr(self.kv_layout), KV_LAYOUTS)

    @classmethod
    def uniform(
        cls, batch: int, q_len: int, kv_len: int, heads: int, kv_heads: int, **fields: Any
    ) -> GqaShape:
        """All requests with the same lengths, in tokens; `fields` go to the constructor."""
        return cls((q_len,) * batch, (kv_len,) * batch, heads, kv_heads, **fields)


@dataclass(slots=True, kw_only=True, eq=False)
class GqaInputs(GqaArgs):
    """The arguments of one GQA call, and its sizes."""

    shape: GqaShape
    workspace_buffer: Tensor
    q_len_per_req: int

    def contract_args(self) -> dict[str, Any]:
        """Keyword arguments of the call, without those at their defaults."""
        # the two names of the call differ in their default layout
        return {**given(self, GQA_PARAMETERS), "kv_layout": self.kv_layout}


def make_gqa_inputs(
    shape: GqaShape,
    seed: int = 0,
    features: Collection[str] = (),
    *,
    distribution: str = "gauss",
    device: torch.device | str = "cpu",
    workspace_bytes: int = 32 << 20,
) -> GqaInputs:
    """Random inputs with the named `GQA_FEATURES`; equal arguments give equal bits.

    distribution: as in `make_inputs`, without "concentrated". Ragged when q_lens differ. Raises
    InvalidInput for unknown or contradictory features and for unknown distributions.
    """
    if distribution not in GQA_DISTRIBUTIONS:
        raise invalid("distribution", repr(distribution), GQA_DISTRIBUTIONS)
    unknown = sorted(set(features) - set(GQA_FEATURES))
    if unknown or {"chain_mask", "tree_mask"} <= set(features):
        raise invalid("features", sorted(features), f"of {GQA_FEATURES}, at most one mask")
    random = torch.Generator(device=device).manual_seed(seed)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=random, device=device)

    ragged = "ragged" in features or len(set(shape.q_lens)) > 1
    separate = "separate_tables" in features
    # queries with heavy tails share this direction; keys along it have large scores
    direction = None
    if distribution == "heavy_tailed":
        direction = normal(shape.head_dim)
        direction /= direction.norm()
    kv_cache, tables = _cache(shape, separate, random, direction)
    bmm1, bmm2 = shape.head_dim**-0.5, 0.7
    scales = torch.tensor([bmm1, bmm2], device=device) if "device_scales" in features else None
    query = normal(sum(shape.q_lens), shape.heads, shape.head_dim)
    if direction is not None:
        query += LEANS[distribution] * direction
    return GqaInputs(
        shape=shape,
        query=formats.pack(query, shape.q_dtype),
        kv_cache=kv_cache if "one_tensor" in features else (kv_cache[:, 0], kv_cache[:, 1]),
        workspace_buffer=zero_bytes(workspace_bytes, device),
        block_tables=tables if separate else tables[:, 0],
        seq_lens=torch.tensor(shape.kv_lens, dtype=torch.int32, device=device),
        max_seq_len=max(shape.kv_lens),
        bmm1_scale=bmm1 if scales is None else scales[:1],
        bmm2_scale=bmm2 if scales is None else scales[1:],
        window_left=shape.window_left,
        sinks=normal(shape.heads) if "sinks" in features else None,
        kv_layout=shape.kv_layout,
        q_len_per_req=max(shape.q_lens),
        mask=draft_mask(shape.q_lens, features, ragged, random),
        cum_seq_lens_q=prefix_sums(shape.q_lens, device) if ragged else None,
        max_q_len=max(shape.q_lens) if ragged else None,
        uses_shared_paged_kv_idx=not separate,
        return_lse="lse" in features,
    )


def _cache(
    shape: GqaShape, separate: bool, random: torch.Generator, direction: Tensor | None
) -> tuple[Tensor, Tensor]:
    """[pages, 2, ...] in the shape's layout, NaN where no token is, and int32 tables."""
    copies = 2 if separate else 1
    counts = [formats.pages_of(n, shape.page_size) for n in shape.kv_lens]
    pages = copies * sum(counts) + FOREIGN_PAGES
    width = shape.kv_heads * shape.head_dim
    pool = formats.poisoned_pages(
        pages, 2 * shape.page_size, shape.kv_format, head_dim=width, device=random.device
    ).unflatten(1, (2, shape.page_size))
    order = torch.randperm(pages, generator=random, device=random.device)
    tables = page_table(counts, order, copies)
    for rows, length in zip(tables, shape.kv_lens, strict=True):
        for which in range(2):  # keys, then values
            tokens = torch.randn(length, width, generator=random, device=random.device) * KV_STD
            if direction is not None:
                add_tails(tokens.view(length, -1, shape.head_dim), direction, keys=which == 0)
            row = rows[which if separate else 0]
            formats.scatter(pool[:, which], row, formats.pack(tokens, shape.kv_format))
    pool = pool.unflatten(-1, (shape.kv_heads, shape.head_dim))
    if shape.kv_layout == "HND":
        pool = pool.transpose(2, 3).contiguous()
    return pool, tables


def add_tails(tokens: Tensor, direction: Tensor, keys: bool) -> None:
    """Outlier columns for one request's tokens fp32 [length, kv_heads, head_dim], in place; keys
    also have a component along `direction` [head_dim], which adds about 10 to the first score.
    """
    length, _, head_dim = tokens.shape
    tokens[..., :: head_dim // 4] *= 8
    if keys and length:
        age = torch.arange(length - 1, -1, -1, device=tokens.device)
        lean = 16 * torch.exp(-age / 64)
        lean[0] = 35
        tokens += (lean * (head_dim / 192) ** 0.5).view(-1, 1, 1) * direction
