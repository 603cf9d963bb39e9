"""Our kernels on the 396 configurations of FlashInfer's pull request 2743.

2 query and cache dtypes, pages of 32 and 64, 11 batch sizes from 1 to 1024, 3 lengths, 1, 2 and 4
query tokens, 128 heads. Every element is compared with float32 attention on the same card, and of
each configuration two requests of that reference with the float64 oracle. The bound for e4m3 is
twice the error of torch with e4m3 weights on these two.

Source: github.com/flashinfer-ai/flashinfer/pull/2743, description, "Functionality".
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor

from ..api import replay
from ..api.contract import trtllm_batch_decode_with_kv_cache_mla
from ..bench.checks import LIMITS, ROW_FACTOR, compare
from ..call.decode_args import DecodeArgs, native_args
from ..core import kv_cache as formats
from ..core.dims import LATENT_DIM, ROPE_DIM
from ..core.errors import MlaLabError
from ..reference.inputs import KV_STD, WILD_PAGE_IDS
from ..reference.mla import Result, decode_reference
from .check import Outcome
from .limits import TOPS, twice_torch

DTYPES = ("bf16", "e4m3")
PAGE_SIZES = (32, 64)
BATCHES = (1, 2, 4, 16, 32, 64, 128, 256, 512, 768, 1024)
KV_LENS = (1024, 4096, 8192)
Q_LENS = (1, 2, 4)
HEADS = 128
SCALE = 192**-0.5
#: backends that may run a configuration, without torch
KERNELS = ("cute", "cuda")

#: pages of no request, full of NaN
FOREIGN_TOKENS = 4096
#: bound on the error of the float32 reference against the oracle
REFERENCE_LIMIT = 1e-5
#: bytes of gathered float32 keys at a time
CHUNK_BYTES = 600 << 20


class Configuration(NamedTuple):
    """One row of the published list."""

    dtype: str
    page_size: int
    batch: int
    kv_len: int
    q_len: int

    @property
    def name(self) -> str:
        return f"{self.dtype}_p{self.page_size}_b{self.batch}_kv{self.kv_len}_q{self.q_len}"


def configurations() -> list[Configuration]:
    """All 396."""
    return [Configuration(*c) for c in product(DTYPES, PAGE_SIZES, BATCHES, KV_LENS, Q_LENS)]


class Pool:
    """Random tokens for any configuration of one dtype, and NaN pages behind them."""

    def __init__(self, dtype: str, tokens: int, device: torch.device | str, seed: int = 0) -> None:
        self.dtype, self.tokens = dtype, tokens
        self.random = torch.Generator(device=device).manual_seed(seed)
        width = LATENT_DIM + ROPE_DIM
        stored = formats.DTYPES[dtype]
        self.kv = torch.empty(tokens + FOREIGN_TOKENS, width, dtype=stored, device=device)
        for part in self.kv.split(1 << 18):
            values = torch.randn(part.shape, generator=self.random, device=device)
            part.copy_(formats.pack(values.mul_(KV_STD), dtype))
        self.kv.view(torch.uint8)[tokens:] = formats.POISON_BYTE

    def call(self, c: Configuration) -> DecodeArgs:
        """Random queries over random pages of the pool; unused table columns are out of range."""
        pages = c.kv_len // c.page_size
        device, own = self.kv.device, self.tokens // c.page_size
        order = torch.randperm(own, generator=self.random, device=device)[: c.batch * pages]
        table = torch.full((c.batch, pages + 2), WILD_PAGE_IDS[0], dtype=torch.int32, device=device)
        table[:, pages] = own  # a page of NaN
        table[:, :pages] = order.view(c.batch, pages)
        shape = (c.batch, c.q_len, HEADS, LATENT_DIM + ROPE_DIM)
        query = torch.randn(shape, generator=self.random, device=device)
        return native_args(
            query=formats.pack(query, c.dtype),
            kv_cache=self.kv.view(-1, c.page_size, self.kv.shape[-1]),
            block_tables=table,
            seq_lens=torch.full((c.batch,), c.kv_len, dtype=torch.int32, device=device),
            bmm1_scale=SCALE,
        )


def run(
    c: Configuration, pool: Pool, workspace: Tensor, backends: Sequence[str] = KERNELS
) -> Outcome:
    """Run one configuration on the first of the named backends that accepts it."""
    call = pool.call(c)
    shape = (*call.query.shape[:-1], LATENT_DIM)
    out = torch.full(shape, torch.nan, dtype=torch.bfloat16, device=pool.kv.device)
    replay.clear()
    reasons = []
    for backend in backends:
        try:
            trtllm_batch_decode_with_kv_cache_mla(
                call.query,
                call.kv_cache,
                workspace,
                128,
                LATENT_DIM,
                ROPE_DIM,
                call.block_tables,
                call.seq_lens,
                c.kv_len,
                out=out,
                bmm1_scale=SCALE,
                is_var_seq=False,
                backend=backend,
            )
        except MlaLabError as error:
            reasons.append(str(error))
        else:
            return _judge(c, call, out, backend)
    return Outcome("refused", reason="; ".join(reasons))


def _judge(c: Configuration, call: DecodeArgs, out: Tensor, backend: str) -> Outcome:
    limit, reason = LIMITS[c.dtype], ""

    def pairs() -> Iterator[tuple[Tensor, Tensor]]:
        nonlocal limit, reason
        for part, expected in references(call):
            if part.start == 0:
                some, oracle = _ends(call, part)
                reason = _objection_to(expected, oracle)
                if c.dtype == "e4m3":
                    limit = twice_torch(some, oracle, "bf16", "e4m3", TOPS[:1]).rel_error
            yield out[part], expected

    found = compare(pairs())
    if found.nonfinite:
        reason = f"{found.nonfinite} elements are not finite"
    elif not found.rel_error <= limit:
        reason = f"relative error {found.rel_error:.1e}, limit {limit:.1e}"
    elif not found.worst_row <= ROW_FACTOR * limit:
        reason = f"error of a row {found.worst_row:.1e}, limit {ROW_FACTOR * limit:.1e}"
    status = "wrong" if reason else "ok"
    return Outcome(status, backend, reason, found.rel_error, found.worst_row, allowed=limit)


def references(call: DecodeArgs) -> Iterator[tuple[slice, Tensor]]:
    """Attention of equal requests in float32: parts of the batch, [n, q_len, heads, latent]."""
    batch, q_len = call.query.shape[:2]
    kv_len = int(call.seq_lens[0])
    pages = kv_len // call.kv_cache.shape[1]
    step = max(1, CHUNK_BYTES // (kv_len * call.query.shape[-1] * 4))
    token = torch.arange(q_len, device=call.query.device).repeat_interleave(call.query.shape[2])
    position = torch.arange(kv_len, device=call.query.device)
    hidden = position > (kv_len - q_len + token).unsqueeze(1)
    for first in range(0, batch, step):
        part = slice(first, min(first + step, batch))
        ids = call.block_tables[part, :pages].long()
        keys = call.kv_cache[ids].flatten(1, 2).float()
        query = call.query[part].flatten(1, 2).float()
        scores = torch.bmm(query, keys.mT).mul_(float(call.bmm1_scale))
        weights = scores.masked_fill_(hidden, -math.inf).softmax(-1)
        values = torch.bmm(weights, keys[..., : call.kv_lora_rank])
        yield part, values.unflatten(1, (q_len, -1))


def _ends(call: DecodeArgs, part: slice) -> tuple[DecodeArgs, Result]:
    """The call on the first and last request of a part alone, and the oracle's result for it."""
    some = [part.start, part.stop - 1]
    ends = replace(
        call,
        query=call.query[some],
        block_tables=call.block_tables[some],
        seq_lens=call.seq_lens[some],
    )
    return ends, decode_reference(ends)


def _objection_to(reference: Tensor, oracle: Result) -> str:
    """An objection to the float32 reference itself, from the first and last request of a part."""
    error = compare([(reference[[0, -1]], oracle.out)]).rel_error
    return "" if error <= REFERENCE_LIMIT else f"the float32 reference is {error:.1e} off"
