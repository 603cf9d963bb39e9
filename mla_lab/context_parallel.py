"""Decode context parallel on one machine: one call dealt to ranks, and its merge.

Token i of a request lives on rank i mod world. Each rank attends its own tokens and returns
out and lse; `reference.merge_partials` over the ranks gives the undivided result, sinks
entering there (a rank's call has none).
"""

from __future__ import annotations

from dataclasses import replace

import torch

from . import kv_cache as formats
from .errors import invalid, unsupported
from .inputs import DecodeInputs, page_table


def shard(inputs: DecodeInputs, world: int) -> list[DecodeInputs]:
    """The call of each of `world` ranks: its own pool and table, without sinks, with lse.

    Raises Unsupported for sparse calls and separate tables.
    """
    if world < 1:
        raise invalid("world", world, "1 or more")
    if inputs.sparse or not inputs.uses_shared_paged_kv_idx:
        raise unsupported("inputs", "a sparse call or separate tables", "one table of dense pages")
    return [_of_rank(inputs, world, rank) for rank in range(world)]


def _of_rank(inputs: DecodeInputs, world: int, rank: int) -> DecodeInputs:
    problem = inputs.problem
    lengths = tuple(len(range(rank, n, world)) for n in problem.kv_lens)
    counts = [formats.pages_of(n, problem.page_size) for n in lengths]
    device = inputs.query.device
    kv_cache = formats.poisoned_pages(
        sum(counts) + 1,
        problem.page_size,
        problem.kv_format,
        head_dim=problem.head_dim,
        device=device,
    )
    # pages from the last to the first: any order is as good, and this one is not the identity
    table = page_table(counts, torch.arange(sum(counts), -1, -1, device=device))[:, 0]
    for row, full_row, kv_len in zip(table, inputs.block_tables, problem.kv_lens, strict=True):
        tokens = formats.gather(inputs.kv_cache, full_row, kv_len)
        formats.scatter(kv_cache, row, tokens[rank::world])
    return replace(
        inputs,
        problem=replace(problem, kv_lens=lengths),
        kv_cache=kv_cache,
        block_tables=table,
        seq_lens=torch.tensor(lengths, dtype=torch.int32, device=device),
        max_seq_len=max(lengths),
        sinks=None,
        return_lse=True,
        enable_dcp=True,
        cp_world=world,
        cp_rank=rank,
        causal_seqlens_kv_global=inputs.seq_lens,
    )
