"""The layers of `engine_steps`: vLLM's with a metadata builder, or our step alone."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from ..interop.engines.step import Step, decode

#: channels of a head: key without and with rope, value
NOPE, ROPE, VALUE, LATENT = 128, 64, 128, 512
Attend = Callable[[Tensor, Tensor, Any], Tensor]


@dataclass(frozen=True)
class Shape:
    """A step: DeepSeek V3's layers on one card, by default."""

    layers: int = 61
    heads: int = 128
    batch: int = 16
    kv_len: int = 4096
    max_len: int = 8192
    page_size: int = 64

    @property
    def pages(self) -> int:
        """Of each request."""
        return -(-self.max_len // self.page_size)

    @property
    def scale(self) -> float:
        """Of the scores."""
        return float((NOPE + ROPE) ** -0.5)


def weight(shape: Shape, index: int, device: torch.device) -> Tensor:
    """A layer's up-projection of keys and values, bf16 [heads x 256, latent]."""
    draw = torch.Generator(device=device).manual_seed(index)
    made = torch.randn(shape.heads * (NOPE + VALUE), LATENT, generator=draw, device=device)
    return (made * LATENT**-0.5).bfloat16()


def absorbed_query(query: Tensor, key: Tensor) -> Tensor:
    """[tokens, heads, 576] of a query [tokens, heads, 192]; key: W_UK_T [heads, 128, 512]."""
    absorbed = query.new_empty(*query.shape[:2], LATENT + ROPE)
    nope = query[..., :NOPE].transpose(0, 1)
    absorbed[..., :LATENT] = torch.bmm(nope, key).transpose(0, 1)
    absorbed[..., LATENT:] = query[..., NOPE:]
    return absorbed


class StepLayers:
    """`engines.step` between the two products that surround it in an engine's layer."""

    def __init__(self, backend: str, shape: Shape, device: torch.device) -> None:
        self._shape = shape
        self._offsets = torch.arange(shape.batch + 1, dtype=torch.int32, device=device)
        self.layers = [AbsorbedLayer(shape, i, device, self._decode) for i in range(shape.layers)]

    def build(self, lens: Tensor, block_table: Tensor, slots: Tensor, capture: bool) -> Step:
        """The metadata of a step."""
        return Step(block_table, lens, self._offsets, self._shape.max_len, 1)

    def _decode(self, query: Tensor, cache: Tensor, step: Step) -> Tensor:
        return decode(
            step,
            query,
            cache,
            scale=self._shape.scale,
            value_scale=1.0,
            out_dtype=query.dtype,
            return_lse=False,
        )[0]


class AbsorbedLayer:
    """Absorption, an engine's attention, value projection; `attend` returns [tokens, heads, latent]
    of absorbed queries, the layer's cache and a step's metadata."""

    def __init__(self, shape: Shape, index: int, device: torch.device, attend: Attend) -> None:
        projection = weight(shape, index, device)
        split = projection.T.view(LATENT, shape.heads, NOPE + VALUE).split((NOPE, VALUE), -1)
        self.W_UK_T, self.W_UV = split[0].permute(1, 2, 0), split[1].transpose(0, 1)
        self._attend = attend

    def forward_impl(
        self, query: Tensor, latent: Tensor, rope: Tensor, cache: Tensor, metadata: Any, out: Tensor
    ) -> None:
        """Values of the step's tokens into `out`."""
        mixed = self._attend(absorbed_query(query, self.W_UK_T), cache, metadata)
        into = out.view(len(out), -1, VALUE).transpose(0, 1)
        torch.bmm(mixed.transpose(0, 1), self.W_UV, out=into)


class VllmLayers:
    """vLLM's `MLAAttention` layers over a registered backend, and that backend's builder."""

    def __init__(self, backend: str, shape: Shape, device: torch.device) -> None:
        _without_compiled_operators(device)
        from vllm.config import DeviceConfig, VllmConfig, set_current_vllm_config
        from vllm.v1.attention.backends.registry import AttentionBackendEnum

        from ..interop.engines import vllm_plugin

        vllm_plugin.register()
        found = AttentionBackendEnum[backend].get_class()
        config = VllmConfig(device_config=DeviceConfig(device=device.type))
        config.model_config = _model(shape)
        config.cache_config.block_size = shape.page_size
        with set_current_vllm_config(config):
            self.layers = [_layer(config, found, shape, i, device) for i in range(shape.layers)]
            names = [layer.layer_name for layer in self.layers]
            spec = SimpleNamespace(block_size=shape.page_size)
            self._builder = found.get_builder_cls()(spec, names, config, device)
        self._shape = shape
        self._offsets = torch.arange(shape.batch + 1, dtype=torch.int32, device=device)
        self._offsets_on_host = torch.arange(shape.batch + 1, dtype=torch.int32)

    def build(self, lens: Tensor, block_table: Tensor, slots: Tensor, capture: bool) -> Any:
        """The metadata of a step by vLLM's builder of the backend."""
        from vllm.v1.attention.backend import CommonAttentionMetadata

        shape = self._shape
        common = CommonAttentionMetadata(
            query_start_loc=self._offsets,
            query_start_loc_cpu=self._offsets_on_host,
            seq_lens=lens,
            num_reqs=shape.batch,
            num_actual_tokens=shape.batch,
            max_query_len=1,
            max_seq_len=shape.max_len,
            block_table_tensor=block_table,
            slot_mapping=slots,
        )
        if capture:
            return self._builder.build_for_cudagraph_capture(common)
        return self._builder.build(0, common)


class _NoPrefill:
    """In place of a prefill backend, which no step here calls."""

    def __init__(self, **unused: Any) -> None:
        pass

    def clone(self) -> _NoPrefill:
        """Itself: it has no state."""
        return self


def _model(shape: Shape) -> SimpleNamespace:
    """What layers and builders read of a model's configuration."""
    return SimpleNamespace(
        dtype=torch.bfloat16,
        max_model_len=shape.max_len,
        get_head_size=lambda: LATENT + ROPE,
        get_num_attention_heads=lambda parallel: shape.heads,
    )


def _layer(config: Any, backend: Any, shape: Shape, index: int, device: torch.device) -> Any:
    from vllm.model_executor.layers.attention.mla_attention import MLAAttention

    projection: Any = torch.nn.Module()
    projection.weight = torch.nn.Parameter(weight(shape, index, device), requires_grad=False)
    projection.quant_method = None
    layer = MLAAttention(
        shape.heads,
        shape.scale,
        NOPE,
        ROPE,
        VALUE,
        1536,
        LATENT,
        projection,
        cache_config=config.cache_config,
        prefix=f"layers.{index}",
        attn_backend=backend,
        prefill_backend_cls=_NoPrefill,
    ).to(device)
    layer.process_weights_after_loading(torch.bfloat16)
    return layer


def _without_compiled_operators(device: torch.device) -> None:
    """Where vLLM's compiled operators are missing: its unspecified platform, of this device."""
    if importlib.util.find_spec("vllm._C_stable_libtorch") is not None:
        return
    import vllm.platforms
    from vllm.platforms.interface import UnspecifiedPlatform

    # unset, it would be found by importing the operators
    if vllm.platforms._current_platform is None:
        vllm.platforms._current_platform = UnspecifiedPlatform()
    platform = vllm.platforms.current_platform
    units = 1
    if device.type == "cuda":
        units = torch.cuda.get_device_properties(device).multi_processor_count
    platform.device_type = device.type
    platform.num_compute_units = lambda device_id=0: units
