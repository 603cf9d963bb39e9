"""vLLM's MLA decode backend over our call: capability 9.0, one latent of 512 + 64 columns.

    builder   block table, lengths and query offsets of the decode requests stay on the device; the
              bounds are the host's, so that nothing synchronises and full CUDA graphs replay
    layer     q and cache -> `step.decode`; the engine merges the lse of decode context parallel

Prefill is vLLM's own. Classes and names are those of vLLM 0.33.0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.model_executor.layers.attention.mla_attention import (
    MLACommonBackend,
    MLACommonDecodeMetadata,
    MLACommonImpl,
    MLACommonMetadata,
    MLACommonMetadataBuilder,
    QueryLenSupport,
)
from vllm.v1.attention.backend import AttentionCGSupport, AttentionType, MultipleOf

from ...core.dims import LATENT_DIM, ROPE_DIM
from ...core.errors import unsupported
from .step import Ranks, Step, decode


@dataclass
class DecodeMetadata(MLACommonDecodeMetadata):
    """vLLM's decode metadata, with the query offsets of drafts."""

    query_start_loc: Tensor | None = None
    max_query_len: int = 1


class MlaLabMetadataBuilder(MLACommonMetadataBuilder):
    """Metadata of a step; reads no tensor of the device."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH
    query_len_support: ClassVar[QueryLenSupport] = QueryLenSupport.VARLEN

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device
    ) -> None:
        parallel = vllm_config.parallel_config
        interleave = parallel.cp_kv_cache_interleave_size
        if parallel.decode_context_parallel_size > 1 and interleave != 1:
            raise unsupported("cp_kv_cache_interleave_size", interleave, 1)
        super().__init__(
            kv_cache_spec,
            layer_names,
            vllm_config,
            device,
            MLACommonMetadata,
            supports_dcp_with_varlen=True,
        )

    def _build_decode(
        self,
        block_table_tensor: Tensor,
        seq_lens_device: Tensor,
        query_start_loc_device: Tensor,
        max_query_len: int,
        dcp_tot_seq_lens_device: Tensor | None,
        **unused: Any,
    ) -> DecodeMetadata:
        return DecodeMetadata(
            block_table=block_table_tensor,
            seq_lens=seq_lens_device,
            dcp_tot_seq_lens=dcp_tot_seq_lens_device,
            query_start_loc=query_start_loc_device,
            max_query_len=max_query_len,
        )


class MlaLabImpl(MLACommonImpl):
    """A layer: decode by our call."""

    can_return_lse_for_decode: bool = True
    supports_dcp: bool = True
    lse_base_on_e: bool = True

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        names = ("alibi_slopes", "sliding_window", "logits_soft_cap")
        places = dict(zip(names, (args[4:6] + args[7:8]) or (None,) * 3, strict=False))
        for name in names:
            value = named.get(name, places.get(name))
            if value:
                raise unsupported(name, value, "None")
        kind = named.get("attn_type", args[8] if len(args) > 8 else AttentionType.DECODER)
        if kind != AttentionType.DECODER:
            raise unsupported("attn_type", kind, AttentionType.DECODER)

    def forward_mqa(
        self,
        q: Tensor | tuple[Tensor, Tensor],
        kv_c_and_k_pe_cache: Tensor,
        attn_metadata: MLACommonMetadata,
        layer: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """out [tokens, heads, 512], and lse where ranks are merged."""
        of_decode = attn_metadata.decode
        query = torch.cat(q, -1) if isinstance(q, tuple) else q.contiguous()
        cache, scale, value_scale = kv_c_and_k_pe_cache, self.scale, 1.0
        if self.kv_cache_dtype.startswith("fp8"):
            cache = cache.view(torch.float8_e4m3fn)
            value_scale = float(layer._k_scale_float)
            scale *= value_scale
            if query.dtype is torch.float8_e4m3fn:
                scale *= float(layer._q_scale_float)
        ranks = None
        if self.dcp_world_size > 1:
            ranks = Ranks(self.dcp_world_size, self.dcp_rank, of_decode.dcp_tot_seq_lens)
        step = Step(
            block_table=of_decode.block_table,
            seq_lens=of_decode.seq_lens,
            query_start_loc=of_decode.query_start_loc,
            max_seq_len=attn_metadata.max_seq_len,
            max_query_len=of_decode.max_query_len,
            ranks=ranks,
        )
        eight_bits = query.dtype is torch.float8_e4m3fn
        return decode(
            step,
            query,
            cache,
            scale=scale,
            value_scale=value_scale,
            out_dtype=torch.bfloat16 if eight_bits else query.dtype,
            return_lse=bool(self.need_to_return_lse_for_decode),
        )


class MlaLabBackend(MLACommonBackend):
    """The registered class: what it supports, its builder and its layer."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16]
    supported_kv_cache_dtypes: ClassVar[list[str]] = [
        "auto",
        "float16",
        "bfloat16",
        "fp8",
        "fp8_e4m3",
    ]

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        """Pages of a multiple of 16 tokens."""
        return [MultipleOf(16)]

    @staticmethod
    def get_name() -> str:
        """The name in vLLM's registry and logs."""
        return "MLA_LAB"

    @staticmethod
    def get_impl_cls() -> type[MlaLabImpl]:
        """The layer."""
        return MlaLabImpl

    @staticmethod
    def get_builder_cls() -> type[MlaLabMetadataBuilder]:
        """The metadata builder."""
        return MlaLabMetadataBuilder

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        """512 latent and 64 rope columns."""
        return [LATENT_DIM + ROPE_DIM]

    @classmethod
    def supports_combination(
        cls, head_size: int, dtype: torch.dtype, kv_cache_dtype: str | None, *_: Any, **__: Any
    ) -> str | None:
        """None, or why not: no query in fp16 is over e4m3."""
        eight_bits = (kv_cache_dtype or "").startswith("fp8")
        return "an e4m3 cache of a model in fp16" if eight_bits and dtype is torch.float16 else None

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        """Hopper."""
        return bool(capability.major == 9)
