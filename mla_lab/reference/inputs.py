"""Seeded inputs of a decode call in which a wrong read shows in the result.

Pages are in random order. Every slot that a correct call must not read (the tail of a last page,
pages of no request, gaps between pages) holds NaN, and unused block-table entries hold invalid page
ids, so that a read too many gives NaN or an illegal access.

    inputs = make_inputs(Problem.uniform(4, 1, 1000, heads=16), seed=1)
    trtllm_batch_decode_with_kv_cache_mla(**inputs.contract_args())
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..call.decode_args import PARAMETERS, Declared, DecodeArgs
from ..core import kv_cache as formats
from ..core import masks
from ..core.errors import invalid
from ..core.problem import Problem

#: values of unused block-table entries, in turn: too large, negative, the least int32
WILD_PAGE_IDS = (1 << 30, -7, -(1 << 31))
#: pages in the pool that belong to no request
FOREIGN_PAGES = 3

DISTRIBUTIONS = ("gauss", "heavy_tailed", "concentrated")
#: component of a query along the direction of keys with large scores
LEANS = {"gauss": 0, "heavy_tailed": 4, "concentrated": 8}
#: tokens of a concentrated request for each needle (a token with a large score)
NEEDLE_TOKENS = 1024
#: standard deviation of cached values, about that of DeepSeek's normalised latents
KV_STD = 0.5

FEATURES = (
    "cache_4d",  # kv_cache [pages, 1, page_size, width]
    "chain_mask",  # the causal rule as a packed mask
    "device_scales",  # both scales as fp32 tensors on the device
    "lse",  # return_lse
    "max_q_len",  # max_q_len is given, above the longest; makes the call ragged
    "page_gap",  # pages with unused slots between them
    "ragged",  # cum_seq_lens_q even where all requests are equal
    "scales",  # a bmm2_scale other than 1
    "separate_tables",  # values in other pages than keys
    "sinks",  # one fp32 sink a head
    "top_k_lens",  # sparse: how many slots of each query token count; the others are invalid
    "tree_mask",  # a random draft tree for each request
)


@dataclass(slots=True, kw_only=True, eq=False)
class DecodeInputs(DecodeArgs):
    """Arguments of one call, and its sizes; derive variants with `replace`."""

    problem: Problem
    workspace_buffer: Tensor
    max_seq_len: int

    def contract_args(self) -> dict[str, Any]:
        """Keyword arguments of the contract's call that differ from their defaults."""
        return given(self, PARAMETERS)


def given(args: object, parameters: Sequence[Declared]) -> dict[str, Any]:
    """Public arguments without a default, or with another value than the default."""
    values = {p.name: (getattr(args, p.name), p.default) for p in parameters if p.public}
    return {
        name: value
        for name, (value, default) in values.items()
        if isinstance(value, Tensor) or (value is not default and value != default)
    }


def zero_bytes(size: int, device: torch.device | str = "cpu") -> Tensor:
    """A uint8 tensor of zeros, [size], at a multiple of 64 bytes. On a CPU its pages come from the
    system when they are first written: 4 ms for 128 MiB, 120 with `torch.zeros` (2026-11-28)."""
    if torch.device(device).type != "cpu":
        return torch.zeros(size, dtype=torch.uint8, device=device)
    memory = np.zeros(size + 63, np.uint8)
    first = -memory.ctypes.data % 64
    return torch.from_numpy(memory[first : first + size])


def make_inputs(
    problem: Problem,
    seed: int = 0,
    features: Collection[str] = (),
    *,
    distribution: str = "gauss",
    device: torch.device | str = "cpu",
    workspace_bytes: int = 32 << 20,
) -> DecodeInputs:
    """Random inputs of `problem` with the named `FEATURES`; equal arguments give equal bits.

    distribution: "gauss", "heavy_tailed" (a sink token with a large score, recent tokens favoured,
    a few outlier columns) or "concentrated" (nearly all weight on a sink token, the last few tokens
    and a needle now and then). Ragged when q_lens differ; sparse when problem.top_k > 0.
    Raises InvalidInput for unknown names and for features that exclude each other.
    """
    _check(problem, features, distribution)
    maker = _Maker(problem, seed, torch.device(device), distribution)
    ragged = len(set(problem.q_lens)) > 1 or bool({"ragged", "max_q_len"} & set(features))
    kv_cache, page_table = maker.cache(
        separate="separate_tables" in features, gap=2 if "page_gap" in features else 0
    )
    max_q_len = max(problem.q_lens) + 3 if "max_q_len" in features else None
    bmm1, bmm2 = maker.scales(features)
    inputs = DecodeInputs(
        problem=problem,
        query=maker.query(ragged),
        kv_cache=kv_cache.unsqueeze(1) if "cache_4d" in features else kv_cache,
        workspace_buffer=zero_bytes(workspace_bytes, device),
        qk_nope_head_dim=128,
        block_tables=maker.sparse_slots(page_table, ragged) if problem.top_k else page_table,
        seq_lens=maker.int32(problem.kv_lens),
        max_seq_len=max(problem.kv_lens),
        kv_lora_rank=problem.latent_dim,
        qk_rope_head_dim=problem.rope_dim,
        sparse_mla_top_k=problem.top_k,
        bmm1_scale=bmm1,
        bmm2_scale=bmm2,
        sinks=maker.normal(problem.heads) if "sinks" in features else None,
        uses_shared_paged_kv_idx="separate_tables" not in features,
        return_lse="lse" in features,
        cum_seq_lens_q=prefix_sums(problem.q_lens, device) if ragged else None,
        max_q_len=max_q_len,
        mask=draft_mask(problem.q_lens, features, ragged, maker.random, max_q_len),
    )
    return maker.cut_slots(inputs) if "top_k_lens" in features else inputs


def prefix_sums(q_lens: Sequence[int], device: torch.device | str) -> Tensor:
    """First query token of each request and the end of the last, int32 [batch + 1]."""
    return torch.tensor([0, *accumulate(q_lens)], dtype=torch.int32, device=device)


def draft_mask(
    q_lens: Sequence[int],
    features: Collection[str],
    ragged: bool,
    random: torch.Generator,
    max_q_len: int | None = None,
) -> Tensor | None:
    """The packed mask that "chain_mask" or "tree_mask" of `features` names; trees are random."""
    if "chain_mask" in features:
        visible = [masks.chain(n, random.device) for n in q_lens]
    elif "tree_mask" in features:
        visible = [masks.tree(masks.random_parents(n, random)) for n in q_lens]
    else:
        return None
    return masks.pack_ragged(visible, max_q_len) if ragged else masks.pack(torch.stack(visible))


def page_table(counts: Sequence[int], order: Tensor, copies: int = 1) -> Tensor:
    """Block tables with page ids taken from `order` in turn, int32 [batch, copies, max_pages + 2].

    counts: pages of each request; later entries are invalid.
    """
    width = torch.arange(max(counts) + 2, device=order.device)
    wild = torch.tensor(WILD_PAGE_IDS, dtype=torch.int32, device=order.device)
    table = wild[width % len(wild)].repeat(len(counts), copies, 1)
    used = width < torch.tensor(counts, device=order.device).view(-1, 1, 1)
    table[used.expand(table.shape)] = order[: copies * sum(counts)].int()
    return table


def _check(problem: Problem, features: Collection[str], distribution: str) -> None:
    unknown = sorted(set(features) - set(FEATURES))
    if unknown:
        raise invalid("features", unknown, FEATURES)
    if distribution not in DISTRIBUTIONS:
        raise invalid("distribution", repr(distribution), DISTRIBUTIONS)
    if {"chain_mask", "tree_mask"} <= set(features):
        raise invalid("features", "chain_mask and tree_mask", "one of them")
    if "top_k_lens" in features and not problem.top_k:
        raise invalid("features", "top_k_lens on a dense problem", "it on a sparse one")
    dense_only = {"separate_tables", "chain_mask", "tree_mask"} & set(features)
    if problem.top_k and dense_only:
        raise invalid("features", f"{sorted(dense_only)} with top_k", "these on a dense problem")


class _Maker:
    """Draws the parts of one call from one generator."""

    def __init__(
        self, problem: Problem, seed: int, device: torch.device, distribution: str
    ) -> None:
        self.problem = problem
        self.device = device
        self.random = torch.Generator(device=device).manual_seed(seed)
        self.distribution = distribution
        # queries with heavy tails share this direction; keys along it have large scores
        direction = self.normal(problem.head_dim)
        self.direction = direction / direction.norm()

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.random, device=self.device)

    def int32(self, values: Collection[int]) -> Tensor:
        return torch.tensor(list(values), dtype=torch.int32, device=self.device)

    def query(self, ragged: bool) -> Tensor:
        p = self.problem
        query = self.normal(p.total_q, p.heads, p.head_dim)
        query += LEANS[self.distribution] * self.direction
        query = formats.pack(query, p.q_dtype)
        return query if ragged else query.unflatten(0, (p.batch, p.q_lens[0]))

    def tokens(self, length: int) -> Tensor:
        """Values of one request's cached tokens, fp32 [length, head_dim]."""
        tokens = self.normal(length, self.problem.head_dim).mul_(KV_STD)
        if self.distribution == "gauss" or not length:
            return tokens
        if self.distribution == "concentrated":
            return tokens + self.needles(length).unsqueeze(-1) * self.direction
        # with scale 1/sqrt(192) a component of 35 adds about 10 to a score: the weight of 22,000
        # others
        age = torch.arange(length - 1, -1, -1, device=self.device)
        lean = 16 * torch.exp(-age / 64)
        lean[0] = 35
        tokens[:, :: self.problem.head_dim // 4] *= 8
        return tokens + lean.unsqueeze(-1) * self.direction

    def needles(self, length: int) -> Tensor:
        """Component of a concentrated request's keys along the queries' direction, fp32 [length].
        With scale 1/sqrt(192), 56 adds about 32 to a score, so that all other tokens have weight 0.
        """
        age = torch.arange(length - 1, -1, -1, device=self.device)
        lean = 56 * torch.exp(-age / 16)
        draw = torch.rand(2, length // NEEDLE_TOKENS, generator=self.random, device=self.device)
        lean[(draw[0] * length).long()] = 50 + 10 * draw[1]
        lean[0] = 56
        return lean

    def cache(self, separate: bool, gap: int) -> tuple[Tensor, Tensor]:
        """A poisoned pool of pages in random order with every request's tokens, and its table."""
        p = self.problem
        copies = 2 if separate else 1
        counts = [formats.pages_of(n, p.page_size) for n in p.kv_lens]
        pages = copies * sum(counts) + FOREIGN_PAGES
        kv_cache = formats.poisoned_pages(
            pages, p.page_size, p.kv_format, head_dim=p.head_dim, gap=gap, device=self.device
        )
        order = torch.randperm(pages, generator=self.random, device=self.device)
        table = page_table(counts, order, copies)
        for rows, length in zip(table, p.kv_lens, strict=True):
            for copy, row in enumerate(rows):
                stored = formats.pack(self.tokens(length), p.kv_format)
                if copy == 1:  # of a page of values only the latent columns are read
                    _poison_rope(stored, p)
                formats.scatter(kv_cache, row, stored)
        return kv_cache, table if separate else table[:, 0]

    def sparse_slots(self, page_table: Tensor, ragged: bool) -> Tensor:
        """Random token slots of each query token's request; a tenth are -1, some may repeat."""
        p = self.problem
        slots = []
        for row, q_len, kv_len in zip(page_table, p.q_lens, p.kv_lens, strict=True):
            shape = (q_len, p.top_k)
            draw = torch.rand(2, *shape, generator=self.random, device=self.device)
            position = (draw[0] * kv_len).long().clamp_max(max(kv_len - 1, 0))
            slot = row[position // p.page_size] * p.page_size + position % p.page_size
            slots.append(slot.masked_fill((draw[1] < 0.1) | (kv_len == 0), -1).int())
        table = torch.cat(slots)
        return table if ragged else table.unflatten(0, (p.batch, p.q_lens[0]))

    def cut_slots(self, inputs: DecodeInputs) -> DecodeInputs:
        """The inputs with lengths of their lists of slots, and invalid slots behind them."""
        p = self.problem
        draw = torch.rand(p.total_q, generator=self.random, device=self.device)
        lens = (draw * (p.top_k + 1)).int()
        column = torch.arange(p.top_k, device=self.device)
        wild = torch.tensor(WILD_PAGE_IDS, dtype=torch.int32, device=self.device)
        unused = (column >= lens.unsqueeze(1)).view(inputs.block_tables.shape)
        slots = torch.where(unused, wild[column % len(wild)], inputs.block_tables)
        return replace(inputs, block_tables=slots, sparse_mla_top_k_lens=lens)

    def scales(self, features: Collection[str]) -> tuple[float | Tensor, float | Tensor]:
        """DeepSeek's 1/sqrt(128 + rope), and 1 or 0.7."""
        bmm1 = (128 + self.problem.rope_dim) ** -0.5
        bmm2 = 0.7 if "scales" in features else 1.0
        if "device_scales" in features:
            values = torch.tensor([bmm1, bmm2], device=self.device)
            return values[:1], values[1:]
        return bmm1, bmm2


def _poison_rope(stored: Tensor, problem: Problem) -> None:
    """Fills the rope columns of stored tokens with NaN bytes."""
    element = 2 if problem.kv_format == "fp8_656" else stored.itemsize
    stored.view(torch.uint8)[:, -problem.rope_dim * element :] = formats.POISON_BYTE
