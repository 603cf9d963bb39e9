"""Seeded GQA calls with one to three arguments changed at random: right, or refused with a reason.

`MLA_LAB_FUZZ_SECONDS=3600` gives an hour of further ones.
"""

from __future__ import annotations

import math
import random
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from mla_lab.api.contract_gqa import trtllm_batch_decode_with_kv_cache as call
from mla_lab.call.gqa_args import GQA_PARAMETERS, GqaArgs
from mla_lab.reference.gqa import decode_gqa_reference
from mla_lab.reference.inputs_gqa import GqaShape, make_gqa_inputs
from mla_lab.reference.tolerance import rel_error

from .fuzzing import ODD_SHAPES, result_of, seeds

CALLS = 1500
GOOD: list[tuple[GqaShape, tuple[str, ...]]] = [
    (GqaShape((1, 1), (70, 9), 8, 2, head_dim=64), ("sinks",)),
    (GqaShape((3, 3), (40, 6), 4, 1, head_dim=64, kv_layout="NHD", page_size=16), ("tree_mask",)),
    (GqaShape((3, 0, 2), (35, 10, 4), 6, 3, head_dim=64, window_left=20), ("lse",)),
    (GqaShape((1,), (33,), 4, 2, head_dim=64, q_dtype="e4m3", kv_format="e4m3"), ()),
    (GqaShape((1, 1), (20, 70), 4, 2, head_dim=64), ("separate_tables", "device_scales")),
]
#: values that are right in most calls
USUAL: dict[str, list[Any]] = {
    "max_seq_len": [70, 128, 4096, 1 << 20],
    "bmm1_scale": [0.05, 1, np.float32(0.1), Fraction(1, 20), -0.1, 0.0],
    "bmm2_scale": [0.7, -2.0, 0.0, np.float64(1.5)],
    "window_left": [-1, 0, 5, np.int64(70), 2**31 - 1],
    "skip_softmax_threshold_scale_factor": [None, 0.0, 0],
    "o_scale": [None, 1.0, 3],
    "enable_pdl": [None, False],
    "backend": ["auto", "torch", "trtllm-gen"],
    "return_lse": [True, False],
    "batch_invariant": [True, False],
    "sinks": [None],
    "out": [None],
    "lse": [None],
    "workspace_buffer": [None],
}
ODD: list[Any] = [
    *(None, True, False, 0, 1, -1, 2, 7, 64, 1 << 40, 10**400, -(10**400)),
    *(0.0, -0.05, 1e300, math.nan, math.inf, "auto", "", b"bytes", np.float32("nan")),
    *(Fraction(1, 20), [], [torch.zeros(4)], torch.zeros(4), torch.zeros(3, dtype=torch.int32)),
    *(torch.ones(2, 2, 2).to(torch.uint16), torch.empty(0, dtype=torch.uint8)),
]
CHANGES = (
    *ODD_SHAPES,
    lambda t: t.float(),
    lambda t: t.int(),
    lambda t: t.roll(1, 0),
    lambda t: t + 1,
    lambda t: -t,
)


def mutated(good: list[dict[str, Any]], seed: int) -> tuple[dict[str, Any], str]:
    """A right call with changes, and what they are."""
    draw = random.Random(seed)
    named, told = dict(draw.choice(good)), []
    for _ in range(draw.choice((1, 1, 2, 3))):
        name = draw.choice([p.name for p in GQA_PARAMETERS if p.public])
        value, kind = named.get(name), draw.random()
        if kind < 0.5:
            name = draw.choice(sorted(USUAL))
            named[name] = draw.choice(USUAL[name])
            told.append(f"{name}: usual {named[name]!r}")
        elif isinstance(value, Tensor) and kind < 0.8:
            which = draw.randrange(len(CHANGES))
            try:
                named[name] = CHANGES[which](value)
            except (RuntimeError, IndexError, NotImplementedError):
                told.append("a change that torch refuses")
            told.append(f"{name}: tensor {which}")
        elif kind < 0.9:
            other = draw.choice(sorted(named))
            named[name] = named[other]
            told.append(f"{name}: that of {other}")
        else:
            which = draw.randrange(len(ODD))
            named[name] = ODD[which]
            told.append(f"{name}: odd {which}")
    return named, f"seed {seed}: {', '.join(told)}"


def examine(named: dict[str, Any], told: str) -> bool:
    """Whether the call ran. Fails where it was wrong, or where it was refused without a reason."""
    result = result_of(call, named, told)
    if result is None:
        return False
    eight_bits = named["query"].dtype is torch.float8_e4m3fn
    out = result[0] if isinstance(result, tuple) else result
    expected = decode_gqa_reference(GqaArgs(**named)).out.view(out.shape)
    out = out.double()
    limit = 0.06 if eight_bits else 8e-3
    # another page than its own may hold NaN
    assert torch.equal(out.isnan(), expected.isnan()), told
    assert rel_error(out.nan_to_num(), expected.nan_to_num()) < limit, told
    return True


@pytest.mark.filterwarnings("ignore")
def test_changed_gqa_calls_are_right_or_refused() -> None:
    good = [
        make_gqa_inputs(shape, 1, features, workspace_bytes=1 << 20).contract_args()
        for shape, features in GOOD
    ]
    ran = [examine(*mutated(good, seed)) for seed in seeds(CALLS)]
    assert 0.05 < sum(ran) / len(ran) < 0.95
