"""FlashMLA (github.com/deepseek-ai/FlashMLA) on SM90: dense decode, and sparse over 656 bytes and
bf16."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from ...reference.inputs import DecodeInputs
from ..cases import Case
from ..rotation import Rotation
from ..timers import Launch
from .base import PeerBase, Prepared, refuse_beyond_plain, refuse_unequal_queries

PAGE_SIZE = 64
#: heads that its sparse kernels take; a query of fewer is padded with zeros
SPARSE_HEADS = (64, 128)
#: the sparse kernel over bf16 takes lists of a multiple of so many slots
SPARSE_SLOTS = 128
#: query and cache of its sparse kernels
SPARSE_FORMATS = (("bf16", "fp8_656"), ("bf16", "bf16"))
#: relative error that its sparse kernels have beyond that of torch: they round scales to bf16, and
#: their products with bf16 numbers again
ROUNDED_SCALES = 4e-3


class FlashMla(PeerBase):
    """`flash_mla_with_kvcache`; the scheduler's metadata is the plan of a step. Sparse over bf16
    `flash_mla_sparse_fwd`, which has none."""

    module = "flash_mla"
    name = "flashmla"

    def refuses(self, case: Case) -> str | None:
        problem = case.problem
        if problem.top_k:
            return _refuse_sparse(case) or refuse_unequal_queries(case)
        if problem.page_size != PAGE_SIZE:
            return f"page_size: got {problem.page_size}, supported: {PAGE_SIZE}"
        return refuse_beyond_plain(case) or refuse_unequal_queries(case)

    def prepare(self, rotation: Rotation) -> Prepared:
        """As `Peer.prepare`. The first call of a metadata object fills it."""
        import flash_mla

        problem = rotation.case.problem
        if problem.top_k and problem.kv_format == "bf16":
            return Prepared(tuple(_sparse_launch(copy) for copy in rotation.copies))
        shared = flash_mla.get_mla_metadata()[0]
        _launch(rotation.copies[0], shared)()
        sparse = problem.top_k > 0
        return Prepared(
            tuple(_launch(copy, shared) for copy in rotation.copies),
            planned_launches=tuple(_launch(copy, None) for copy in rotation.copies),
            notes={"scales": "rounded to bf16"} if sparse else {},
            allowance=ROUNDED_SCALES if sparse else 0.0,
        )


def _refuse_sparse(case: Case) -> str | None:
    problem = case.problem
    formats = (problem.q_dtype, problem.kv_format)
    if formats not in SPARSE_FORMATS:
        taken = ", ".join(f"{query} over {cache}" for query, cache in SPARSE_FORMATS)
        return f"sparse: got {formats[0]} over {formats[1]}, supported: {taken}"
    if problem.kv_format == "bf16" and problem.top_k % SPARSE_SLOTS:
        return f"top_k: got {problem.top_k}, supported: multiples of {SPARSE_SLOTS}"
    if problem.heads > max(SPARSE_HEADS):
        return f"heads: got {problem.heads}, supported: up to {max(SPARSE_HEADS)}"
    beyond = sorted(set(case.features) - {"lse"})
    if beyond or case.batch_invariant:
        return f"features: got {', '.join(beyond) or 'batch_invariant'}, supported: none of them"
    return None


def _padded(query: Tensor) -> Tensor:
    """A query [..., heads, head_dim] of as many heads as a sparse kernel takes."""
    heads = query.shape[-2]
    return pad(query, (0, 0, 0, min(n for n in SPARSE_HEADS if n >= heads) - heads))


def _sparse_launch(copy: DecodeInputs) -> Launch:
    """Over bf16 tokens, each query token with a list of its own."""
    import flash_mla

    heads, head_dim = copy.problem.heads, copy.problem.head_dim
    query = _padded(copy.query.reshape(-1, heads, head_dim))
    tokens = copy.kv_cache.reshape(-1, 1, head_dim)
    indices = copy.block_tables.reshape(len(query), 1, -1).contiguous()

    def launch() -> Tensor:
        out: Tensor = flash_mla.flash_mla_sparse_fwd(
            query, tokens, indices, copy.bmm1_scale, copy.problem.latent_dim
        )[0]
        return out[:, :heads]

    return launch


def _launch(copy: DecodeInputs, metadata: object | None) -> Launch:
    """metadata: None makes it anew in every call."""
    import flash_mla

    problem = copy.problem
    heads = problem.heads
    query = copy.query.reshape(problem.batch, problem.q_lens[0], heads, -1)
    kv_cache = copy.kv_cache.unsqueeze(2)
    named: dict[str, Any] = {"softmax_scale": copy.bmm1_scale}
    table: Tensor | None = copy.block_tables
    lengths: Tensor | None = copy.seq_lens
    if problem.top_k:
        query = _padded(query)
        kv_cache = kv_cache.view(torch.uint8)
        indices = copy.block_tables.reshape(problem.batch, problem.q_lens[0], -1)
        named |= {"is_fp8_kvcache": True, "indices": indices}
        table = lengths = None
    else:
        named["causal"] = problem.q_lens[0] > 1

    def launch() -> Tensor:
        out: Tensor = flash_mla.flash_mla_with_kvcache(
            query,
            kv_cache,
            table,
            lengths,
            problem.latent_dim,
            flash_mla.get_mla_metadata()[0] if metadata is None else metadata,
            **named,
        )[0]
        return out[:, :, :heads]

    return launch
