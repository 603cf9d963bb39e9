"""FlashInfer (github.com/flashinfer-ai/flashinfer): its MLA wrapper's Hopper backend, "fa3"."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...reference.inputs import DecodeInputs
from ..rotation import Rotation, page_lists
from ..timers import Launch
from .base import PeerBase, Prepared, refuse_beyond_plain

#: the size that its documentation recommends
WORKSPACE_BYTES = 128 << 20


class FlashInferFa3(PeerBase):
    """`BatchMLAPagedAttentionWrapper`; it plans on the host and keeps partials in 16 bits."""

    module = "flashinfer.mla"
    name = "flashinfer-fa3"
    refusals = (refuse_beyond_plain,)

    def prepare(self, rotation: Rotation) -> Prepared:
        """As `Peer.prepare`: one plan, since the copies share their pages."""
        workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=rotation.device)
        wrapper, plan = _plan(rotation.copies[0], workspace)
        return Prepared(tuple(_launch(copy, wrapper) for copy in rotation.copies), plan=plan)


def _plan(copy: DecodeInputs, workspace: Tensor) -> tuple[Any, Callable[[], None]]:
    """A planned wrapper, and the call that plans it again."""
    from flashinfer.mla import BatchMLAPagedAttentionWrapper

    problem = copy.problem
    wrapper = BatchMLAPagedAttentionWrapper(workspace, backend="fa3")
    kv_indptr, kv_indices = page_lists(copy)
    starts = [0, *itertools.accumulate(problem.q_lens)]
    qo_indptr = torch.tensor(starts, dtype=torch.int32, device=copy.query.device)

    def plan() -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            wrapper.plan(
                qo_indptr=qo_indptr,
                kv_indptr=kv_indptr,
                kv_indices=kv_indices,
                kv_len_arr=copy.seq_lens,
                num_heads=problem.heads,
                head_dim_ckv=problem.latent_dim,
                head_dim_kpe=problem.rope_dim,
                page_size=problem.page_size,
                causal=max(problem.q_lens) > 1,
                sm_scale=copy.bmm1_scale,
                q_data_type=copy.query.dtype,
                kv_data_type=copy.kv_cache.dtype,
            )

    plan()
    return wrapper, plan


def _launch(copy: DecodeInputs, wrapper: Any) -> Launch:
    problem = copy.problem
    query = copy.query.reshape(problem.total_q, problem.heads, -1)
    latent = problem.latent_dim
    out = torch.empty_like(query[..., :latent], memory_format=torch.contiguous_format)

    def launch() -> Tensor:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            wrapper.run(
                q_nope=query[..., :latent],
                q_pe=query[..., latent:],
                ckv_cache=copy.kv_cache[..., :latent],
                kpe_cache=copy.kv_cache[..., latent:],
                out=out,
            )
        return out

    return launch
