"""The layers of `engine_steps` over SGLang: its `RadixAttention`, its pool and a decode backend.

SGLang's configuration is published as a server does it, from a model's `config.json` without
weights. Its model runner is not made: what a backend reads of it stands in its place. Backends are
SGLANG_MLA_LAB, by `engines.sglang_plugin`, and SGLang's own SGLANG_TRITON and SGLANG_TORCH_NATIVE
(a CPU too). Names are those of SGLang 0.5.23.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from .engine_layers import LATENT, NOPE, ROPE, VALUE, AbsorbedLayer, Attend, Shape

PREFIX = "SGLANG_"
#: of DeepSeek V3's configuration what SGLang reads before it makes a model
MODEL = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "torch_dtype": "bfloat16",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "kv_lora_rank": LATENT,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": NOPE,
    "qk_rope_head_dim": ROPE,
    "v_head_dim": VALUE,
    "vocab_size": 129280,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048,
    "first_k_dense_replace": 3,
}


class SglangLayers:
    """One backend of SGLang for all layers, with its metadata of a step."""

    def __init__(self, backend: str, shape: Shape, device: torch.device) -> None:
        from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS

        from ..interop.engines import sglang_plugin

        sglang_plugin.register()
        self._shape, self._device = shape, device
        self._runner = _runner(shape, device)
        self._backend = ATTENTION_BACKENDS[backend.removeprefix(PREFIX).lower()](self._runner)
        if device.type == "cuda":
            self._backend.init_cuda_graph_state(shape.batch, shape.batch)
        self.layers = [
            AbsorbedLayer(shape, i, device, self._attention(i)) for i in range(shape.layers)
        ]
        self._requests = torch.arange(shape.batch, device=device)
        self._slots_made = False

    def build(self, lens: Tensor, block_table: Tensor, slots: Tensor, capture: bool) -> Any:
        """The batch of a step, after the backend has made its metadata."""
        from sglang.srt.model_executor.forward_batch_info import ForwardMode

        if not self._slots_made:
            self._keep_slots(block_table)
        batch = SimpleNamespace(
            batch_size=self._shape.batch,
            forward_mode=ForwardMode.DECODE,
            seq_lens=lens.long(),
            seq_lens_sum=self._shape.batch * self._shape.kv_len,
            req_pool_indices=self._requests,
            out_cache_loc=slots,
            spec_info=None,
            encoder_lens=None,
            kv_loc_plan=None,
        )
        if capture:
            self._backend.init_forward_metadata_out_graph(batch, in_capture=True)
        else:
            self._backend.init_forward_metadata(batch)
        return batch

    def _keep_slots(self, block_table: Tensor) -> None:
        """The pool's slot of each token of each request."""
        page = self._shape.page_size
        at = torch.arange(page, dtype=torch.int32, device=self._device)
        slots = (block_table.unsqueeze(-1) * page + at).flatten(1)
        table = self._runner.req_to_token_pool.req_to_token
        table.copy_(slots[:, : table.shape[1]])
        self._slots_made = True

    def _attention(self, index: int) -> Attend:
        """SGLang's attention of a layer, whose cache takes its place in the pool."""
        from sglang.srt.layers.radix_attention import RadixAttention

        heads, scale = self._shape.heads, self._shape.scale
        layer = RadixAttention(heads, LATENT + ROPE, scale, 1, index, v_head_dim=LATENT)

        def attend(query: Tensor, cache: Tensor, batch: Any) -> Tensor:
            self._runner.token_to_kv_pool.kv_buffer[index] = cache.view(-1, 1, LATENT + ROPE)
            q = query.flatten(1)
            out = self._backend.forward(q, None, None, layer, batch, save_kv_cache=False)
            return out.view(len(query), -1, LATENT)

        return attend


def _runner(shape: Shape, device: torch.device) -> Any:
    """What backends read of a model runner: configuration, pool, slots of requests."""
    from sglang.srt.mem_cache.kv_index_translator import KVIndexTranslator
    from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool

    config = _publish(shape, device)
    place = str(device)
    # pages of its own it does not need: each layer gives it that layer's cache
    pool = MLATokenToKVPool(
        shape.page_size, shape.page_size, torch.bfloat16, LATENT, ROPE, shape.layers, place, False
    )
    slots = torch.zeros(shape.batch, shape.max_len, dtype=torch.int32, device=device)
    translator = KVIndexTranslator(
        req_to_token=slots,
        token_to_kv_pool_allocator=None,
        token_to_kv_pool=pool,
        page_size=shape.page_size,
        device=place,
    )
    return SimpleNamespace(
        use_mla_backend=True,
        device=place,
        gpu_id=device.index or 0,
        page_size=shape.page_size,
        kv_cache_dtype=torch.bfloat16,
        model_config=config,
        sliding_window_size=None,
        token_to_kv_pool=pool,
        token_to_kv_pool_allocator=None,
        kv_index_translator=translator,
        req_to_token_pool=SimpleNamespace(size=shape.batch, req_to_token=slots),
        is_draft_worker=False,
        decode_num_tokens_per_req=lambda: 1,
    )


def _publish(shape: Shape, device: torch.device) -> Any:
    """SGLang's configuration of this process, as its scheduler publishes it; the model's."""
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.runtime_context import SpawnRanks, publish
    from sglang.srt.server_args import ServerArgs

    sizes = {
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.heads,
        "max_position_embeddings": shape.max_len,
    }
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(MODEL | sizes))
        args = ServerArgs(
            model_path=folder,
            skip_tokenizer_init=True,
            load_format="dummy",
            device=device.type,
            page_size=shape.page_size,
            context_length=shape.max_len,
            attention_backend="triton" if device.type == "cuda" else "torch_native",
            mem_fraction_static=0.5,
        )
        publish(args, role="scheduler", ranks=SpawnRanks(world_rank=0, gpu_id=device.index or 0))
        return ModelConfig.from_server_args(args)
