"""Error of e4m3 decode by KV length, scale of P, and granularity of the cache's scales.

Torch repeats the steps of a kernel: tiles of 64 keys, softmax weights relative to the running row
max, each tile's weights rounded, row sums over the rounded weights, the result rounded to bf16. Two
errors a row:

- `error`: against exact attention over the cache before quantisation, the model's error;
- `arithmetic`: against exact attention over the dequantised cache, the kernel's own error.

Scales of the cache: one for the tensor, one for each token, or the 656-byte format's, one for each
128 latent columns of a token, with the rope in bf16. Weights: bf16, as under a bf16 query, or e4m3
times a constant: with 1, weights below 2^-10 of the row max round to 0; 448 uses the full range,
and 256 is the largest power of two below it. Heavy-tailed caches have a sink token, and columns of
eight times the size; concentrated ones have their weight on a few tokens (`inputs`).

    python -m mla_lab.verify.eight_bit_error > data/runtime/quantised.jsonl
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator

import torch
from torch import Tensor

from ..core.dims import LATENT_DIM
from ..core.kv_cache import E4M3_MAX, pack, unpack
from ..core.problem import Problem
from ..reference.inputs import DISTRIBUTIONS, make_inputs
from ..reference.operands import operands
from ..reference.tolerance import rel_error

KV_LENS = (128, 1024, 8192, 32768)
#: "none": the cache stays bf16, "128": the 656-byte format
GRANULARITIES = ("none", "tensor", "token", "128")
#: factors of e4m3 weights; 0: weights in bf16
WEIGHT_SCALES = (0, 1, 256, 448)
TILE = 64
HEADS, BATCH, SEED = 16, 2, 1


def dequantised(tokens: Tensor, granularity: str) -> Tensor:
    """Tokens [kv, 576] quantised and dequantised, in float64."""
    if granularity == "none":
        return tokens.double()
    if granularity == "128":
        return unpack(pack(tokens.float(), "fp8_656"))
    top = tokens.abs().amax(-1, keepdim=True) if granularity == "token" else tokens.abs().amax()
    scale = (top.float() / E4M3_MAX).clamp_min(1e-12)
    return unpack(pack(tokens.float() / scale, "e4m3")) * scale.double()


def exact(query: Tensor, keys: Tensor, scale: float) -> Tensor:
    """Attention in float64: query [heads, 576], keys [kv, 576] -> [heads, 512]."""
    weights = torch.softmax(scale * (query.double() @ keys.T), -1)
    return weights @ keys[:, :LATENT_DIM]


def by_tiles(query: Tensor, keys: Tensor, scale: float, weight_scale: int) -> Tensor:
    """The same with a kernel's roundings of weights (`weight_scale` of WEIGHT_SCALES) and result.

    Products and sums stay in float64, so that the error is of those roundings alone. Padded to
    whole tiles by masked keys.
    """
    scores = scale * (query.double() @ keys.T)
    short = -len(keys) % TILE
    scores = torch.nn.functional.pad(scores, (0, short), value=-torch.inf)
    values = torch.nn.functional.pad(keys[:, :LATENT_DIM], (0, 0, 0, short))
    tiles = scores.unflatten(-1, (-1, TILE))
    running = tiles.amax(-1).cummax(-1).values
    weights = torch.exp(tiles - running.unsqueeze(-1))
    if weight_scale:
        weights = unpack(pack((weights * weight_scale).float(), "e4m3"))
    else:
        weights = weights.bfloat16().double()
    weights = weights * torch.exp(running - running[:, -1:]).unsqueeze(-1)
    weights = weights.flatten(-2)
    return ((weights @ values) / weights.sum(-1, keepdim=True)).bfloat16().double()


def rows(distribution: str, kv_len: int) -> Iterator[dict[str, object]]:
    """A row for each granularity and way to round weights, on one batch of requests."""
    problem = Problem.uniform(BATCH, 1, kv_len, HEADS)
    inputs = make_inputs(problem, SEED, (), distribution=distribution)
    scale = float(inputs.bmm1_scale)
    requests = [(one.query[0], one.keys[0]) for one in operands(inputs)]
    wanted = torch.stack([exact(query, keys, scale) for query, keys in requests])
    for granularity in GRANULARITIES:
        stored = [(query, dequantised(keys, granularity)) for query, keys in requests]
        held = torch.stack([exact(query, keys, scale) for query, keys in stored])
        for weight_scale in WEIGHT_SCALES:
            found = torch.stack([by_tiles(q, keys, scale, weight_scale) for q, keys in stored])
            yield {
                "inputs": distribution,
                "kv_len": kv_len,
                "scales": granularity,
                "weights": f"e4m3 x {weight_scale}" if weight_scale else "bf16",
                "error": float(f"{rel_error(found, wanted):.3e}"),
                "arithmetic": float(f"{rel_error(found, held):.3e}"),
            }


def main() -> None:
    """All rows, as JSON lines."""
    for distribution in DISTRIBUTIONS:
        for kv_len in KV_LENS:
            for row in rows(distribution, kv_len):
                sys.stdout.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
