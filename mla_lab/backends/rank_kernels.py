"""The small kernels of decode context parallel on a Hopper card: where they run, their launches.

`cute.rank_merge` merges the results of all ranks; `cute.rank_mask` makes the mask by which a kernel
sees a rank's tokens. Each takes the place of some fifteen to forty kernels of PyTorch.
`cute.rank_exchange` is the merge and the gather ahead of it, through peer memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from .. import jit
from ..call.decode_args import DecodeArgs
from ..core import masks
from ..core.dims import LATENT_DIM
from ..cute.rank_memory import SMS
from ..jit import toolchain
from ..jit.arch import CAPABILITIES
from ..plan.config import KernelConfig
from .base import current, refuse_capture

ARCH = "sm_90a"
#: what `cute.rank_merge` and `cute.rank_exchange` are written for: a build for each dtype of outs,
#: and the most ranks
MERGES, EXCHANGES = (
    {
        dtype: KernelConfig(kernel, out_dtype=name)
        for dtype, name in ((torch.bfloat16, "bf16"), (torch.float16, "fp16"))
    }
    for kernel in ("cute/rank_merge", "cute/rank_exchange")
)
MOST_RANKS = 32
#: natural logarithms to log2 units, and back
NATURAL, BASE_2 = (1 / math.log(2), math.log(2)), (1.0, 1.0)
MASK = KernelConfig("cute/rank_mask")


def can_merge(outs: Tensor, lses: Tensor, sinks: Tensor | None = None) -> bool:
    """Whether a kernel merges outs [ranks, rows, heads, latent] by lses [ranks, rows, heads]:
    contiguous, outs at a multiple of 16 bytes, and nothing that a derivative is taken of."""
    if outs.dtype not in MERGES or lses.dtype is not torch.float32:
        return False
    fits = outs.shape[-1] == LATENT_DIM and len(outs) <= MOST_RANKS and outs.numel() > 0
    packed = outs.is_contiguous() and lses.is_contiguous()
    derived = any(is_derived(given) for given in (outs, lses, sinks) if given is not None)
    return fits and packed and not derived and _can_run(MERGES[outs.dtype], outs, 16)


def is_derived(tensor: Tensor) -> bool:
    """Whether autograd follows a tensor, backward or forward."""
    backward = tensor.requires_grad and torch.is_grad_enabled()
    return backward or forward_ad.unpack_dual(tensor).tangent is not None


def merged(
    outs: Tensor, lses: Tensor, sinks: Tensor | None, *, base2: bool = False
) -> tuple[Tensor, Tensor]:
    """out [rows, heads, latent] and lse [rows, heads] of what `can_merge` takes, in one launch.

    sinks: fp32 [heads], in natural units; lses are in log2 units if `base2`. Raises InvalidInput
    for the first use of the kernel in a CUDA graph's capture.
    """
    ranks, rows, heads, latent = outs.shape
    out, lse = torch.empty_like(outs[0]), torch.empty_like(lses[0])
    with current(outs.device):
        _kernel(MERGES[outs.dtype], outs.device, "merge")(
            outs.view(ranks, rows * heads, latent),
            lses.view(ranks, rows * heads),
            lses.view(-1) if sinks is None else sinks.contiguous(),
            out.view(rows * heads, latent),
            lse.view(-1),
            0 if sinks is None else heads,
            *(BASE_2 if base2 else NATURAL),
        )
    return out, lse


@dataclass(frozen=True)
class Peers:
    """What `cute.rank_exchange` takes of a rank: where the memory of each rank begins, int64
    [ranks]; the calls so far, int32 [2]; its own number, and the rows of a buffer
    (`rank_memory.buffer_rows`)."""

    bases: Tensor
    state: Tensor
    rank: int
    rows: int


def can_exchange(device: torch.device) -> bool:
    """Whether the kernels are here for a device, which holds all CTAs of a launch at once."""
    if device.type != "cuda" or not all(_is_here(c, device) for c in EXCHANGES.values()):
        return False
    return torch.cuda.get_device_properties(device).multi_processor_count >= SMS


def exchanged(
    peers: Peers, out: Tensor, lse: Tensor, sinks: Tensor | None, *, base2: bool = False
) -> tuple[Tensor, Tensor]:
    """`merged` of this rank's out [rows, heads, latent], bf16 or fp16 at a multiple of 16 bytes,
    and lse fp32 [rows, heads], contiguous, with those of all others, which call it with as many
    rows: of all heads as many as a buffer holds, at least one.

    Raises InvalidInput for the first use of the kernel in a CUDA graph's capture.
    """
    rows, heads, latent = out.shape
    result, result_lse = torch.empty_like(out), torch.empty_like(lse)
    with current(out.device):
        _kernel(EXCHANGES[out.dtype], out.device, "peers")(
            peers.bases,
            out.view(rows * heads, latent),
            lse.view(-1),
            lse.view(-1) if sinks is None else sinks.contiguous(),
            result.view(rows * heads, latent),
            result_lse.view(-1),
            peers.state,
            peers.rank,
            peers.rows,
            0 if sinks is None else heads,
            *(BASE_2 if base2 else NATURAL),
        )
    return result, result_lse


def can_mask(args: DecodeArgs) -> bool:
    """Whether a kernel makes the mask of a context parallel call."""
    given = (args.seq_lens, args.causal_seqlens_kv_global, args.cum_seq_lens_q, args.mask)
    tensors = [tensor for tensor in given if tensor is not None]
    packed = all(tensor.is_contiguous() for tensor in tensors)
    return packed and all(_can_run(MASK, tensor, 4) for tensor in tensors)


def mask_of(
    args: DecodeArgs, q_len: int | None, total_q: int, columns: int
) -> tuple[Tensor, Tensor]:
    """What `backends.rank_mask` makes of a call that `can_mask` takes, in one launch: lengths int32
    [batch], and words uint16 [total_q, words].

    q_len: of each request; None where `cum_seq_lens_q` holds them. Raises InvalidInput for the
    first use of the kernel in a CUDA graph's capture.
    """
    lengths, of_all, begins = args.seq_lens, args.causal_seqlens_kv_global, args.cum_seq_lens_q
    device, halves = lengths.device, masks.words_per_row(columns)
    held = torch.empty_like(lengths)
    # a word of the kernel is two of the mask
    words = torch.empty(total_q, halves // 2, dtype=torch.int32, device=device)
    drafts = None if args.mask is None else args.mask.view(total_q, -1)
    with current(device):
        _kernel(MASK, device, "enable_dcp")(
            of_all,
            lengths,
            lengths if q_len is not None else begins,
            lengths if drafts is None else drafts.view(torch.int32).view(-1),
            held,
            words,
            args.cp_world,
            args.cp_rank,
            q_len or 0,
            0 if drafts is None else drafts.shape[1] // 2,
            columns,
        )
    return held, words.view(torch.uint16)


def _can_run(config: KernelConfig, tensor: Tensor, alignment: int) -> bool:
    """Whether the kernel is here for tensors like this one, which lies at such an address."""
    if torch.compiler.is_compiling() or not tensor.is_cuda:
        return False
    return tensor.data_ptr() % alignment == 0 and _is_here(config, tensor.device)


@cache
def _is_here(config: KernelConfig, device: torch.device) -> bool:
    """Whether the device is one that the kernel is written for, and its build can be had."""
    if torch.cuda.get_device_capability(device) != CAPABILITIES[ARCH]:
        return False
    return jit.find(config, ARCH) is not None or toolchain.missing(config.kernel) is None


@cache
def _kernel(config: KernelConfig, device: torch.device, wanted_by: str) -> Callable[..., Any]:
    """The tvm-ffi function on a device, compiled at its first use, for a name of the caller's."""
    refuse_capture(wanted_by, f"the first use of {config.name()}", device)
    return jit.kernel(config, ARCH).launch
