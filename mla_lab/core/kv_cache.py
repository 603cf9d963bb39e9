"""Token formats of the cache, and the way from tokens to pages and back.

A cached token is one row of latent (512) and rope (64) values. Dense formats store it as one
dtype. The 656-byte format is FlashMLA's "FP8 with scale" (deepseek-ai/FlashMLA, README, "FP8 KV
Cache"): 512 e4m3 latent bytes, four fp32 scales (one for each 128 of them), 64 bf16 rope values.

Functions here read only the slots of their arguments, so that poisoned slots stay harmless.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .dims import FP8_656_BYTES, LATENT_DIM, ROPE_DIM
from .errors import invalid, invalid_type
from .problem import ELEMENT_BYTES, KV_FORMATS

DTYPES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "e4m3": torch.float8_e4m3fn,
    "fp32": torch.float32,
    "fp64": torch.float64,
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}

E4M3_MAX = 448.0
#: bytes of 0xff read as NaN in every dense format, and as NaN scales in the 656-byte one
POISON_BYTE = 0xFF
#: how tokens of 656 bytes may be typed; kernels take the first
BYTE_TYPES = (torch.uint8, torch.int8, torch.float8_e4m3fn)
#: latent columns that share one scale in the 656-byte format
SCALE_GROUP = 128
#: byte offsets in the 656-byte format
SCALES_BEGIN = LATENT_DIM
ROPE_BEGIN = SCALES_BEGIN + LATENT_DIM // SCALE_GROUP * 4


def token_bytes(kv_format: str, latent_dim: int = LATENT_DIM, rope_dim: int = ROPE_DIM) -> int:
    """Bytes of one cached token."""
    _check_format(kv_format)
    if kv_format == "fp8_656":
        return FP8_656_BYTES
    return (latent_dim + rope_dim) * ELEMENT_BYTES[kv_format]


def storage(kv_format: str, head_dim: int = LATENT_DIM + ROPE_DIM) -> tuple[torch.dtype, int]:
    """The dtype of a cache tensor and the size of its last dimension."""
    _check_format(kv_format)
    if kv_format == "fp8_656":
        return torch.uint8, FP8_656_BYTES
    return DTYPES[kv_format], head_dim


def is_656(kv_cache: Tensor) -> bool:
    """Whether a cache tensor can only be of 656-byte tokens: uint8, int8, or so wide in e4m3."""
    if kv_cache.dtype is torch.float8_e4m3fn:
        return kv_cache.dim() > 0 and kv_cache.shape[-1] == FP8_656_BYTES
    return kv_cache.dtype in (torch.uint8, torch.int8)


def format_of(kv_cache: Tensor) -> str:
    """Token format of a cache tensor, from its dtype and last dimension."""
    if is_656(kv_cache):
        if kv_cache.shape[-1] != FP8_656_BYTES:
            got = f"{kv_cache.dtype} with last dimension {kv_cache.shape[-1]}"
            raise invalid("kv_cache", got, f"tokens of {FP8_656_BYTES} bytes")
        return "fp8_656"
    if kv_cache.dtype not in DTYPE_NAMES:
        raise invalid_type("kv_cache", kv_cache.dtype, [*DTYPES.values(), torch.uint8, torch.int8])
    return DTYPE_NAMES[kv_cache.dtype]


def pack(tokens: Tensor, kv_format: str, *, power_of_two_scales: bool = True) -> Tensor:
    """Values [..., head_dim] -> stored tokens [..., head_dim], or uint8 [..., 656].

    e4m3 saturates at 448 (a plain cast would give NaN). The scales of the 656-byte format are
    powers of two by default, as FlashMLA packs them: e4m3 x scale is then exact in bf16.
    """
    _check_format(kv_format)
    if kv_format == "fp8_656":
        return _pack_656(tokens, power_of_two_scales)
    if kv_format == "e4m3":
        return _to_e4m3(tokens)
    return tokens.to(DTYPES[kv_format])


def unpack(stored: Tensor, dtype: torch.dtype = torch.float64) -> Tensor:
    """Stored tokens -> values [..., head_dim] in `dtype`.

    float64 is exact for every format. bf16 gives what a kernel sees that turns e4m3 or
    656-byte tokens into bf16 operands. A per-tensor scale is no part of the format: callers
    fold it into bmm1_scale and bmm2_scale.
    """
    if format_of(stored) != "fp8_656":
        return stored.to(dtype)
    latent, scales, rope = split_656(stored)
    exact = dtype if dtype is torch.float64 else torch.float32
    latent = latent.to(exact).unflatten(-1, (-1, SCALE_GROUP)) * scales.to(exact).unsqueeze(-1)
    return torch.cat([latent.flatten(-2).to(dtype), rope.to(dtype)], dim=-1)


def split_656(stored: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Views of uint8 [..., 656]: latent e4m3 [..., 512], scales fp32 [..., 4], rope bf16 [..., 64].

    They alias the storage, so writing to them packs in place.
    """
    latent = stored[..., :SCALES_BEGIN].view(torch.float8_e4m3fn)
    scales = stored[..., SCALES_BEGIN:ROPE_BEGIN].view(torch.float32)
    rope = stored[..., ROPE_BEGIN:].view(torch.bfloat16)
    return latent, scales, rope


def as_pages(kv_cache: Tensor) -> Tensor:
    """The [pages, page_size, width] view of a 3-D or 4-D ([pages, 1, page_size, width]) cache."""
    if kv_cache.dim() == 4 and kv_cache.shape[1] == 1:
        return kv_cache[:, 0]
    if kv_cache.dim() != 3:
        supported = "[pages, page_size, width] or [pages, 1, page_size, width]"
        raise invalid("kv_cache", f"shape {tuple(kv_cache.shape)}", supported)
    return kv_cache


def poisoned_pages(
    pages: int,
    page_size: int,
    kv_format: str,
    *,
    head_dim: int = LATENT_DIM + ROPE_DIM,
    gap: int = 0,
    device: torch.device | str = "cpu",
) -> Tensor:
    """A pool [pages, page_size, width] full of NaN; `gap` unused slots lie between pages."""
    dtype, width = storage(kv_format, head_dim)
    shape = (pages, page_size + gap, width * dtype.itemsize)
    raw = torch.full(shape, POISON_BYTE, dtype=torch.uint8, device=device)
    return raw.view(dtype)[:, :page_size]


def gather(kv_cache: Tensor, page_ids: Tensor, length: int) -> Tensor:
    """The first `length` tokens of one request, contiguous: [length, width], still stored.

    page_ids: one row of a block table; entries past the last needed page are not looked at.
    Slots after `length` in the last page are copied along by whole pages and cut off.
    """
    pages = as_pages(kv_cache)
    needed = page_ids[: pages_of(length, pages.shape[1])].long()
    tokens = _raw(pages).index_select(0, needed).flatten(0, 1)[:length]
    return tokens.view(kv_cache.dtype)


def gather_slots(kv_cache: Tensor, slots: Tensor) -> Tensor:
    """Tokens at `slots` (page x page_size + offset, any shape): [*slots.shape, width], stored."""
    pages = as_pages(kv_cache)
    slots = slots.long()
    page_size = pages.shape[1]
    tokens = _raw(pages)[slots // page_size, slots % page_size]
    return tokens.view(kv_cache.dtype)


def scatter(kv_cache: Tensor, page_ids: Tensor, tokens: Tensor) -> None:
    """Writes stored tokens [length, width] to the pages of one request, in place."""
    pages = as_pages(kv_cache)
    page_size = pages.shape[1]
    position = torch.arange(len(tokens), device=tokens.device)
    page = page_ids.long()[position // page_size]
    _raw(pages)[page, position % page_size] = _raw(tokens)


def pages_of(length: int, page_size: int) -> int:
    """Pages that `length` tokens occupy."""
    return -(-length // page_size)


def _check_format(kv_format: str) -> None:
    if kv_format not in KV_FORMATS:
        raise invalid("kv_format", repr(kv_format), KV_FORMATS)


def _raw(stored: Tensor) -> Tensor:
    """The same storage as bytes where the dtype has no indexing kernels on every device."""
    return stored.view(torch.uint8) if stored.dtype is torch.float8_e4m3fn else stored


def _to_e4m3(values: Tensor) -> Tensor:
    return values.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)


def _pack_656(tokens: Tensor, power_of_two_scales: bool) -> Tensor:
    if tokens.shape[-1] != LATENT_DIM + ROPE_DIM:
        got = f"tokens of {tokens.shape[-1]} values"
        raise invalid("tokens", got, f"{LATENT_DIM} + {ROPE_DIM} in the 656-byte format")
    values = tokens[..., :LATENT_DIM].float().unflatten(-1, (-1, SCALE_GROUP))
    # FlashMLA's floor of 1e-4 keeps an all-zero group from dividing by zero
    scales = (values.abs().amax(-1) / E4M3_MAX).clamp_min(1e-4)
    if power_of_two_scales:
        scales = scales.log2().ceil().exp2()
    stored = torch.empty(
        (*tokens.shape[:-1], FP8_656_BYTES), dtype=torch.uint8, device=tokens.device
    )
    latent_out, scales_out, rope_out = split_656(stored)
    latent_out.copy_(_to_e4m3((values / scales.unsqueeze(-1)).flatten(-2)))
    scales_out.copy_(scales)
    rope_out.copy_(tokens[..., LATENT_DIM:])
    return stored
