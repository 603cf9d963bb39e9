"""SGLang's MLA decode backend over our call: capability 9.0, one latent of 512 + 64 columns.

    metadata   block table and lengths are made on the device from the pool's slots; the bounds are
               the slots of a request and the number of drafts, so that nothing synchronises
    forward    decode, and the verification of a chain of drafts

Prefill is another backend's (`--prefill-attention-backend fa3`). Classes and names are those of
SGLang 0.5.23.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from sglang.srt.runtime_context import get_parallel, get_spec
from torch import Tensor

from ...core.dims import LATENT_DIM, ROPE_DIM
from ...core.errors import unsupported
from ...plan.launch_modes import PAGE_SIZES
from .step import Step, decode


class MlaLabBackend(AttentionBackend):
    """Decode and draft verification of every layer of a model runner."""

    needs_cpu_seq_lens: bool = False

    def __init__(self, model_runner: Any) -> None:
        super().__init__()
        _check(model_runner)
        self.device = model_runner.device
        self.req_to_token = model_runner.req_to_token_pool.req_to_token
        self.token_to_kv_pool = model_runner.token_to_kv_pool
        self.page_size = model_runner.page_size
        self.kv_cache_dtype = self.data_type = model_runner.kv_cache_dtype
        self.drafts = get_spec().speculative_num_draft_tokens or 0
        self.forward_metadata: Step | None = None
        self._kept: Step | None = None

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """An eager step's table, lengths and query offsets."""
        self.forward_metadata = self._step(forward_batch)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """The tensors that all captured steps read."""
        columns, rows = self._columns, self.drafts or 1
        self._kept = Step(
            block_table=torch.zeros(max_bs, columns, dtype=torch.int32, device=self.device),
            seq_lens=torch.ones(max_bs, dtype=torch.int32, device=self.device),
            query_start_loc=_offsets(max_bs, rows, self.device),
            max_seq_len=columns * self.page_size,
            max_query_len=rows,
        )

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """A captured step's tensors, renewed where they lie; no length is read on the host."""
        if self._kept is None:
            self.init_forward_metadata(forward_batch)
            return
        made, kept = self._step(forward_batch), self._kept
        batch = len(made.seq_lens)
        table, lens = kept.block_table[:batch], kept.seq_lens[:batch]
        table.copy_(made.block_table)
        lens.copy_(made.seq_lens)
        # read where requests have several query tokens: all of them have as many drafts
        starts = kept.query_start_loc[: batch + 1]
        self.forward_metadata = replace(
            made, block_table=table, seq_lens=lens, query_start_loc=starts
        )

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """The length of a padded request: its slot 0 holds a token that nobody reads."""
        return 1

    def forward_decode(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
    ) -> Tensor:
        """[tokens, heads x 512] of a step of one token a request."""
        if k is not None and save_kv_cache:
            where = KVWriteLoc.for_batch(forward_batch)
            self.token_to_kv_pool.set_kv_buffer(layer, where, k, v)
        cache = self.token_to_kv_pool.get_key_buffer(layer.layer_id)
        if cache.dtype is torch.float8_e4m3fn and layer.k_scale_float not in (None, 1.0):
            supported = "1.0 or None: the pool stores tokens that are not divided by it"
            raise unsupported("k_scale", layer.k_scale_float, supported)
        metadata = self.forward_metadata
        if metadata is None:
            raise unsupported("forward", "a layer before the step's metadata", "metadata first")
        out, _ = decode(
            metadata,
            q.reshape(-1, layer.tp_q_head_num, LATENT_DIM + ROPE_DIM),
            cache.view(-1, self.page_size, LATENT_DIM + ROPE_DIM),
            scale=layer.scaling,
            value_scale=1.0,
            out_dtype=q.dtype,
            return_lse=False,
        )
        return out.view(-1, layer.tp_q_head_num * LATENT_DIM)

    def forward_extend(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
    ) -> Tensor:
        """[tokens, heads x 512] of a chain of drafts that is verified."""
        if not forward_batch.forward_mode.is_target_verify():
            supported = "decode and draft verification: name another prefill backend"
            raise unsupported("forward_mode", forward_batch.forward_mode, supported)
        return self.forward_decode(q, k, v, layer, forward_batch, save_kv_cache)

    @property
    def _columns(self) -> int:
        """Pages of a request's slots, which are more than the model's context."""
        return -(-self.req_to_token.shape[1] // self.page_size)

    def _step(self, forward_batch: Any) -> Step:
        """Of the pool's slots: a page's first slot, by the page's size, is the page."""
        batch, mode = forward_batch.batch_size, forward_batch.forward_mode
        rows = 1
        lens = forward_batch.seq_lens[:batch]
        if mode.is_target_verify():
            rows, lens = self.drafts, lens + self.drafts
        firsts = self.req_to_token[:, :: self.page_size]
        slots = firsts.index_select(0, forward_batch.req_pool_indices[:batch].long())
        return Step(
            block_table=(slots // self.page_size).int(),
            seq_lens=lens.int(),
            query_start_loc=_offsets(batch, rows, self.device),
            max_seq_len=self._columns * self.page_size,
            max_query_len=rows,
        )


def _offsets(batch: int, rows: int, device: Any) -> Tensor:
    """int32 [batch + 1]: where each request's query tokens begin."""
    return torch.arange(0, batch * rows + 1, rows, dtype=torch.int32, device=device)


def _check(runner: Any) -> None:
    """What a model runner must be; raises Unsupported."""
    if not runner.use_mla_backend:
        raise unsupported("model", "not MLA", "MLA models")
    config = runner.model_config
    dims = (config.kv_lora_rank, config.qk_rope_head_dim)
    if dims != (LATENT_DIM, ROPE_DIM):
        raise unsupported("kv_lora_rank, qk_rope_head_dim", dims, (LATENT_DIM, ROPE_DIM))
    kinds = {config.dtype} | ({torch.float8_e4m3fn} if config.dtype is torch.bfloat16 else set())
    if runner.kv_cache_dtype not in kinds:
        got = f"{runner.kv_cache_dtype} of a model in {config.dtype}"
        raise unsupported("--kv-cache-dtype", got, "the model's dtype, or e4m3 of a model in bf16")
    if runner.page_size not in PAGE_SIZES:
        raise unsupported("--page-size", runner.page_size, PAGE_SIZES)
    if get_parallel().dcp_enabled:
        raise unsupported("--dcp-size", "several ranks", "1: engines.vllm_mla has ranks")
    mode = get_spec().speculative_attention_mode
    if get_spec().speculative_num_draft_tokens and mode != "decode":
        raise unsupported(
            "--speculative-attention-mode", mode, "decode, which verifies drafts here"
        )
    topk = get_spec().speculative_eagle_topk
    if topk is not None and topk > 1:
        raise unsupported("--speculative-eagle-topk", topk, "1: a chain of drafts")
