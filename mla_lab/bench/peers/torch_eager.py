"""Attention in plain torch: gather the pages, two batched products, a softmax."""

from __future__ import annotations

import torch
from torch import Tensor

from ...reference.inputs import DecodeInputs
from ..rotation import Rotation
from ..timers import Launch
from .base import PeerBase, Prepared, refuse_beyond_plain, refuse_unequal_queries


class TorchEager(PeerBase):
    """Batched matmul and softmax over padded requests, in the dtype of the inputs."""

    name = "torch-eager"
    refusals = (refuse_beyond_plain, refuse_unequal_queries)

    def version(self) -> str | None:
        return str(torch.__version__)

    def prepare(self, rotation: Rotation) -> Prepared:
        """As `Peer.prepare`: the mask is what the layers of a step share."""
        problem = rotation.case.problem
        visible = _visible(rotation.copies[0], problem.q_lens[0])
        return Prepared(tuple(_launch(copy, visible) for copy in rotation.copies))


def _visible(copy: DecodeInputs, q_len: int) -> Tensor:
    """Causal, bottom-right: bool [batch, q_len, 1, longest]."""
    longest = max(copy.problem.kv_lens)
    position = torch.arange(longest, device=copy.seq_lens.device)
    token = torch.arange(q_len, device=position.device)
    last = copy.seq_lens[:, None] - q_len + token
    return (position <= last[..., None]).unsqueeze(2)


def _launch(copy: DecodeInputs, visible: Tensor) -> Launch:
    problem = copy.problem
    pages = -(-max(problem.kv_lens) // problem.page_size)
    query = copy.query.reshape(problem.batch, problem.q_lens[0], problem.heads, -1)
    kept = visible.any(1).squeeze(1).unsqueeze(-1)

    def launch() -> Tensor:
        table = copy.block_tables[:, :pages].clamp(0, copy.kv_cache.shape[0] - 1)
        keys = copy.kv_cache[table].flatten(1, 2)[:, : visible.shape[-1]]
        keys = torch.where(kept, keys, 0)  # unread slots may hold NaN
        scores = torch.einsum("bqhd,bkd->bqhk", query, keys).float() * copy.bmm1_scale
        weights = scores.masked_fill(~visible, float("-inf")).softmax(-1)
        weights = torch.where(visible, weights, 0.0).to(keys.dtype)  # a row may see no key
        return torch.einsum("bqhk,bkd->bqhd", weights, keys[..., : problem.latent_dim])

    return launch
