"""Launches of kernels/xqa from seeded inputs, and what they are compared with."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from mla_lab import jit
from mla_lab.core.errors import BuildError
from mla_lab.plan.config import KernelConfig
from mla_lab.reference.gqa import decode_gqa_reference
from mla_lab.reference.inputs import DecodeInputs
from mla_lab.reference.inputs_gqa import GqaInputs
from mla_lab.reference.mla import Result, decode_reference
from mla_lab.reference.tolerance import error, lse_error, sdpa_error
from mla_lab.verify.limits import TOPS, rounded

TYPES = {"bf16": 0, "fp16": 1, "e4m3": 2}
#: fp32 lse of scores that were summed over 576 products in fp32
LSE_TOLERANCE = 2e-5
#: relative error; weights in 16 bits and out in bf16, and e4m3 weights (mma8)
TOLERANCE, TOLERANCE_8 = 4e-3, 4e-2
Pieces = tuple[int, int]
Inputs = DecodeInputs | GqaInputs


def config(query: str, cache: str, head_dim: int = 576, **options: int) -> KernelConfig:
    """The configuration for query and cache dtypes; a type at its default is not named."""
    types = {"q_type": TYPES[query], "kv_type": TYPES[cache]}
    named = {name: value for name, value in types.items() if value} | options
    if head_dim != 576:
        named |= {"qk_dim": head_dim, "v_dim": head_dim}
    return KernelConfig("cuda/xqa", options=tuple(named.items()))


def built(wanted: KernelConfig) -> jit.Kernel:
    """Configurations that do not ship want the compiler on the GPU's own host."""
    try:
        return jit.kernel(wanted, jit.device_arch())
    except BuildError as missing:
        pytest.skip(str(missing))


def _none(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(0, dtype=dtype, device="cuda")


def _given(tensor: Tensor | None, dtype: torch.dtype = torch.float32) -> Tensor:
    return _none(dtype) if tensor is None else tensor


class Launch:
    """One launch of `kernel` on `inputs`, cut in at most pieces[0] pieces of pieces[1] keys.

    out and lse are full of NaN before the first launch; partials too.
    """

    def __init__(
        self,
        kernel: jit.Kernel,
        inputs: Inputs,
        pieces: Pieces = (1, 1 << 20),
        out_dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        self.kernel, self.inputs, self.pieces = kernel, inputs, pieces
        keys, values, kv_heads, nhd = _caches(inputs)
        query = inputs.query
        self.heads = query.shape[-2]
        width = 512 if isinstance(inputs, DecodeInputs) else query.shape[-1]
        q_len = _q_len(inputs)
        tile_rows = int(kernel.function("tile_rows")())
        row_tiles = -(-q_len * (self.heads // kv_heads) // tile_rows)
        groups = inputs.seq_lens.numel() * kv_heads * row_tiles if pieces[0] > 1 else 0
        slots = groups * pieces[0]
        nan: dict[str, Any] = {"fill_value": math.nan, "device": "cuda"}
        self.out = torch.full((*query.shape[:-1], width), **nan).to(out_dtype)
        self.lse = torch.full(query.shape[:-1], **nan)
        self.partials = (
            torch.full((slots, tile_rows, width), **nan),
            torch.full((slots, tile_rows), **nan),
        )
        self.counters = torch.zeros(groups, dtype=torch.int32, device="cuda")
        self.caches, self.nhd, self.q_len = (keys, values), nhd, q_len

    def __call__(self) -> None:
        given = self.inputs
        scales = (given.bmm1_scale, given.bmm2_scale)
        tensors = [s if isinstance(s, Tensor) else _none() for s in scales]
        numbers = [0.0 if isinstance(s, Tensor) else float(s) for s in scales]
        sinks = given.sinks if isinstance(given.sinks, Tensor) else _none()
        self.kernel.launch(
            given.query,
            *self.caches,
            self.out,
            self.lse,
            *self.partials,
            self.counters,
            given.block_tables,
            given.seq_lens,
            _given(given.cum_seq_lens_q, torch.int32),
            _given(given.mask, torch.uint16),
            sinks,
            *tensors,
            *numbers,
            1.0,
            self.q_len,
            getattr(given, "window_left", -1),
            *self.pieces,
            self.nhd,
            False,
        )


def _caches(inputs: Inputs) -> tuple[Tensor, Tensor, int, bool]:
    """Keys, values, KV heads, and whether the layout is NHD."""
    if isinstance(inputs, DecodeInputs):
        return inputs.kv_cache, inputs.kv_cache, 1, False
    both = inputs.kv_cache
    keys, values = both.unbind(1) if isinstance(both, Tensor) else both
    nhd = inputs.kv_layout == "NHD"
    return keys, values, keys.shape[2 if nhd else 1], nhd


def _q_len(inputs: Inputs) -> int:
    if isinstance(inputs, GqaInputs):
        return inputs.q_len_per_req
    if inputs.query.dim() == 4:
        return inputs.query.shape[1]
    return inputs.max_q_len or max(inputs.problem.q_lens)


def oracle(inputs: Inputs) -> Result:
    if isinstance(inputs, DecodeInputs):
        return decode_reference(inputs)
    return decode_gqa_reference(inputs)


def check(kernel: jit.Kernel, inputs: Inputs, pieces: Pieces, tolerance: float = TOLERANCE) -> None:
    """Right in every element, equal bits when repeated, counters at zero afterwards."""
    launch = Launch(kernel, inputs, pieces)
    launch()
    first = launch.out.clone(), launch.lse.clone()
    launch()
    assert torch.equal(first[0].view(torch.int16), launch.out.view(torch.int16))
    assert torch.equal(*(lse.view(torch.int32) for lse in (first[1], launch.lse)))
    assert not launch.counters.any()
    expected = oracle(inputs)
    found = error(launch.out, expected.out.reshape(launch.out.shape))
    assert found.relative < tolerance
    assert lse_error(launch.lse, expected.lse) < LSE_TOLERANCE * tolerance / TOLERANCE


def check_beside_torch(kernel: jit.Kernel, inputs: DecodeInputs, weights: str) -> None:
    """At most twice the error of torch that rounds its weights the same way."""
    launch = Launch(kernel, inputs)
    launch()
    ref = decode_reference(inputs)
    theirs = sdpa_error(inputs, ref)
    if weights != "bf16":
        top = TOPS[0] if weights == "e4m3" else 1.0
        theirs = error(rounded(inputs, weights, top).out.bfloat16().reshape(ref.out.shape), ref.out)
    assert error(launch.out, ref.out).within(theirs)
