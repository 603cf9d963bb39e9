"""fp16 weights of keys far below the greatest: what a long tail adds to out is kept."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from mla_lab import jit
from mla_lab.core import kv_cache as formats
from mla_lab.emulate import EmulatedKernel
from mla_lab.emulate.calls import call_of, problem_for
from mla_lab.reference.inputs import make_inputs
from mla_lab.reference.tolerance import error

from .needs import needs_cxx
from .shared_builds import keep_ab

pytestmark = needs_cxx
LATENT, KV_LEN = 512, 150
#: the CTAs of the cluster exchange P, and do not search a tile's greatest scores
HI_LO_PAIR = keep_ab({"kv_format": "e4m3", "tile_rows": 128, "cluster": 2})


@pytest.mark.parametrize("octaves", [8, 18, 22, 26])
def test_a_tail_below_one_key_is_kept(octaves: int) -> None:
    """One key has nearly all of the weight and V of 0: out is what the others add, each `octaves`
    powers of two below it."""
    problem = problem_for(HI_LO_PAIR, (KV_LEN,))
    inputs = make_inputs(problem, 0, ["lse"], workspace_bytes=64)
    query = torch.zeros_like(inputs.query)
    cache = formats.unpack(inputs.kv_cache)
    cache[..., LATENT:] = 0
    first = cache[int(inputs.block_tables[0, 0])].reshape(-1, cache.shape[-1])[0]
    first[:LATENT], first[LATENT] = 0, 8
    query[..., LATENT] = octaves * math.log(2) / (8 * float(inputs.bmm1_scale))
    packed = formats.pack(cache, problem.kv_format)
    call = call_of(HI_LO_PAIR, replace(inputs, query=query, kv_cache=packed))
    EmulatedKernel.of(jit.compile(HI_LO_PAIR))(*call.args)
    assert 0 < call.expected.out.abs().max() < KV_LEN * 2.0 ** (3 - octaves)
    expected = call.expected.out.reshape(call.out.shape)
    # a weight 26 octaves below the greatest has 5 of its 11 bits
    assert error(call.out, expected).relative < (0.01 if octaves < 26 else 0.05)
