"""Inputs for a definition. This file is copied into each definition: torch alone."""

from typing import Any

import torch
from torch import Generator, Tensor

DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
    "float64": torch.float64,
    "float8_e4m3fn": torch.float8_e4m3fn,
    "int16": torch.int16,
    "int32": torch.int32,
    "int8": torch.int8,
}


def make(
    inputs: dict[str, tuple[list[str] | None, str]],
    sizes: dict[str, int],
    scalars: dict[str, Any],
    device: str,
    seed: int,
) -> dict[str, Any]:
    """Values of `inputs` (name: axes or None, dtype) for the axes' `sizes`, by name.

    Lengths are the longest that tables and pool allow, pages follow each other, query tokens are
    distributed evenly, as far as a mask's words allow, draft masks are causal.
    """
    random = torch.Generator(device=device).manual_seed(seed)
    made: dict[str, Any] = {}
    for name, (axes, dtype) in inputs.items():
        if axes is None:
            made[name] = scalars[name]
            continue
        shape = [sizes[axis] for axis in axes]
        values = VALUES.get(name, normal)(shape, sizes, random, device)
        # bytes stay what they are
        bits = values.dtype is torch.int8
        made[name] = values.view(DTYPES[dtype]) if bits else values.to(DTYPES[dtype])
    if "max_seq_len" in made:
        made["max_seq_len"] = int(made["seq_lens"].max())
    if "max_q_len" in made:
        most = int(made["cum_seq_lens_q"].diff().max())
        made["max_q_len"] = max(most, least_of_mask(sizes))
    return made


def normal(shape: list[int], sizes: dict[str, int], random: Generator, device: str) -> Tensor:
    """Standard normal."""
    return torch.randn(shape, generator=random, device=device)


def cache(shape: list[int], sizes: dict[str, int], random: Generator, device: str) -> Tensor:
    """Cached tokens; 656 wide they are bytes."""
    if shape[-1] != 656:
        return normal(shape, sizes, random, device) / 2
    latent = normal([*shape[:-1], 512], sizes, random, device).to(torch.float8_e4m3fn)
    scales = torch.full([*shape[:-1], 4], 0.5, device=device)
    rope = normal([*shape[:-1], 64], sizes, random, device).bfloat16()
    return torch.cat([part.view(torch.int8) for part in (latent, scales, rope)], -1)


def workspace(shape: list[int], sizes: dict[str, int], random: Generator, device: str) -> Tensor:
    """Zeros."""
    return torch.zeros(shape, dtype=torch.int8, device=device)


def tables(shape: list[int], sizes: dict[str, int], random: Generator, device: str) -> Tensor:
    """Page ids in turn, or for a sparse call random token slots."""
    if "sparse_mla_top_k" in sizes:
        slots = sizes["num_pages"] * sizes["page_size"]
        return torch.randint(slots, shape, generator=random, device=device)
    count = torch.Size(shape).numel()
    return (torch.arange(count, device=device) % sizes["num_pages"]).view(shape)


def lengths(shape: list[int], sizes: dict[str, int], random: Generator, device: str) -> Tensor:
    """The most tokens that a table row can name."""
    pages = sizes.get("max_pages_per_seq", sizes["num_pages"])
    return torch.full(shape, pages * sizes["page_size"], device=device)


def sums(shape: list[int], sizes: dict[str, int], random: Generator, device: str) -> Tensor:
    """Query tokens dealt out evenly; where a mask has words for more, behind a first request of
    as many as need them."""
    batch, tokens = shape[0] - 1, sizes["num_tokens"]
    even = torch.arange(batch + 1, device=device) * tokens // batch
    first = min(least_of_mask(sizes), tokens)
    if batch == 0 or first <= -(-tokens // batch):
        return even
    others = torch.arange(batch, device=device) * (tokens - first) // max(1, batch - 1)
    return torch.cat([even[:1], first + others])


def least_of_mask(sizes: dict[str, int]) -> int:
    """The fewest query tokens of a request that need as many words of a mask row as it has; 0
    without a mask."""
    words = sizes.get("mask_words", 0)
    return 16 * (words - 2) + 1 if words else 0


def chain(shape: list[int], sizes: dict[str, int], random: Generator, device: str) -> Tensor:
    """Each draft sees itself and those before: bits 0 to its row, within its request."""
    tokens = torch.Size(shape[:-1]).numel()
    row = torch.arange(tokens, device=device)
    if len(shape) == 3:
        row = row % shape[1]
    else:
        begins = sums([sizes["batch_size"] + 1], sizes, random, device)
        row = row - begins[torch.searchsorted(begins, row, right=True) - 1]
    bit = torch.arange(16 * shape[-1], device=device)
    bits = (bit <= row.unsqueeze(-1)).view(tokens, shape[-1], 16).int()
    words = (bits << torch.arange(16, device=device)).sum(-1)
    return words.to(torch.int16).view(shape)


VALUES = {
    "kv_cache": cache,
    "workspace_buffer": workspace,
    "block_tables": tables,
    "seq_lens": lengths,
    "cum_seq_lens_q": sums,
    "mask": chain,
}
