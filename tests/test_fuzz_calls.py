"""Seeded calls with one to three arguments changed at random: right, or refused with a reason.

A changed call either raises one of the package's errors or gives the oracle's result, and leaves
what it only reads as it was. And whatever a replay launches, the full checks accept.
Each test changes the same calls on every machine; `MLA_LAB_FUZZ_SECONDS=3600` gives each an hour
of further ones.
"""

from __future__ import annotations

import math
import os
import random
import re
from collections.abc import Callable, Iterator
from fractions import Fraction
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from mla_lab.api import replay
from mla_lab.api.contract import trtllm_batch_decode_with_kv_cache_mla as call
from mla_lab.call.bind import bind
from mla_lab.call.checks import form_of
from mla_lab.call.decode_args import PARAMETERS, DecodeArgs, native_args
from mla_lab.core.errors import MlaLabError
from mla_lab.reference.mla import decode_reference
from mla_lab.reference.tolerance import rel_error

from .contract_errors import arguments
from .fuzzing import ODD_SHAPES, result_of, seeds

#: calls that a test changes in any case
CALLS = 4000 if "MLA_LAB_LONG" in os.environ else 2000
KINDS = ("dense", "masked", "ragged", "separate", "sparse", "packed", "e4m3")
#: arguments whose values a replay does not read
VALUES = re.compile("seq_lens|block_tables")
WRITTEN = {p.name for p in PARAMETERS if p.arg.written}

ODD_VALUES: list[Callable[[], Any]] = [
    *(lambda v=v: v for v in (None, True, False, 0, 1, -1, 2, 7, 64, 512, 1 << 40, 10**400)),
    *(
        lambda v=v: v
        for v in (0.0, 1.0, -0.05, 0.3, 1e300, math.nan, math.inf, "auto", "base2", "")
    ),
    *(lambda v=v: v for v in (np.float32(0.1), np.float32("nan"), np.int64(3), Fraction(1, 20))),
    *(lambda v=v: v for v in ("torch", "cute", "xqa", "modular", b"bytes", object())),
    list,
    lambda: [torch.zeros(4)],
    lambda: torch.zeros(4),
    lambda: torch.full((1,), 0.07),
    lambda: torch.zeros(3, dtype=torch.int32),
    lambda: torch.ones(2, 2, 2).to(torch.uint16),
    lambda: torch.empty(0, dtype=torch.uint8),
]
ODD_TENSORS: list[Callable[[Tensor], Tensor]] = [
    *ODD_SHAPES,
    lambda t: t.to("meta"),
    lambda t: t.float(),
    lambda t: t.half(),
    lambda t: t.int(),
    lambda t: t.expand(2, *t.shape)[0],
    lambda t: t.view(torch.uint8) if t.element_size() == 1 else t.view(torch.int16),
]


#: values that are right in most calls
USUAL: dict[str, list[Any]] = {
    "qk_nope_head_dim": [0, 128, np.int64(64)],
    "max_seq_len": [100, 128, 4096, 1 << 20],
    "bmm1_scale": [0.05, 1, np.float32(0.1), Fraction(1, 20), -0.1, 0.0],
    "bmm2_scale": [0.7, -2.0, 0.0, np.float64(1.5)],
    "skip_softmax_threshold_scale_factor": [None, 0.0],
    "enable_pdl": [None, False],
    "backend": ["auto", "torch", "trtllm-gen"],
    "is_var_seq": [True, False],
    "return_lse": [True, False],
    "return_lse_base": [None, "basee", "base2"],
    "cute_dsl_impl": ["auto", "monolithic"],
    "use_fp16_softmax": [None, False],
    "batch_invariant": [True, False],
    "causal_seqlens_kv_global": [None],
    "sinks": [None, torch.linspace(-1, 1, 4), [torch.zeros(4)]],
    "cp_world": [1],
    "cp_rank": [0],
    "out": [None],
    "lse": [None],
}


def mutations(draw: random.Random, named: dict[str, Any]) -> Iterator[str]:
    """Change `named` in place; gives what was changed."""
    rows = named["query"].shape[:-1]
    for _ in range(draw.choice((1, 1, 2, 3))):
        name = draw.choice([p.name for p in PARAMETERS if p.public])
        value, kind = named.get(name), draw.random()
        if draw.random() < 0.6:
            name = draw.choice(sorted(USUAL))
            which = draw.randrange(len(USUAL[name]))
            named[name] = USUAL[name][which]
            yield f"{name}: usual {which}"
        elif isinstance(value, Tensor) and kind < 0.5:
            which = draw.randrange(len(ODD_TENSORS))
            named[name] = ODD_TENSORS[which](value)
            yield f"{name}: tensor {which}"
        elif kind < 0.65:  # another argument's value, memory and all
            other = draw.choice(sorted(named))
            named[name] = named[other]
            yield f"{name}: that of {other}"
        elif kind < 0.75 and name in WRITTEN:
            source = draw.choice([v for v in named.values() if isinstance(v, Tensor)])
            shape = (*rows, 512) if name == "out" else (4096,)
            wanted = torch.bfloat16 if name == "out" else torch.uint8
            raw = bits(source)
            size = math.prod(shape) * wanted.itemsize
            if raw.numel() >= size:
                named[name] = raw[:size].view(wanted).view(shape)
            yield f"{name}: memory of another"
        else:
            which = draw.randrange(len(ODD_VALUES))
            named[name] = ODD_VALUES[which]()
            yield f"{name}: value {which}"


@cache
def right(kind: str) -> dict[str, Any]:
    """A right call, whose tensors all calls of its kind share."""
    return arguments(kind)


def mutated(seed: int) -> tuple[dict[str, Any], dict[str, Any], str]:
    """A right call, the same with changes, and what they are."""
    draw = random.Random(seed)
    good = right(draw.choice(KINDS))
    named = dict(good)
    told: list[str] = []
    try:
        told.extend(mutations(draw, named))
    except (RuntimeError, IndexError, ValueError, TypeError):
        told.append("a change that torch refuses")
    return good, named, f"seed {seed}: {', '.join(told)}"


def bits(value: Tensor) -> Tensor:
    return value.reshape(-1).clone(memory_format=torch.contiguous_format).view(torch.uint8)


def examine(named: dict[str, Any], told: str) -> bool:
    """Whether the call ran. Fails where it was wrong, or where it was refused without a reason."""
    read = {
        k: v
        for k, v in named.items()
        if isinstance(v, Tensor) and k not in WRITTEN and not v.is_meta
    }
    before = {name: bits(value) for name, value in read.items()}
    result = result_of(call, named, told)
    if result is None:
        return False
    assert all(torch.equal(bits(read[name]), old) for name, old in before.items()), told
    out = result[0] if isinstance(result, tuple) else result
    expected = decode_reference(native_args(**named)).out
    limit = 0.05 if torch.float8_e4m3fn in (out.dtype, named["query"].dtype) else 8e-3
    if not named.get("skip_softmax_threshold_scale_factor"):
        assert rel_error(out.double(), expected.view(out.shape).double()) < limit, told
    return True


@pytest.mark.filterwarnings("ignore")
def test_changed_calls_are_right_or_refused() -> None:
    ran = [examine(*mutated(seed)[1:]) for seed in seeds(CALLS)]
    assert 0.05 < sum(ran) / len(ran) < 0.95
    for kind in KINDS:  # what calls share is as it was, so that a seed alone does the same
        for name, value in arguments(kind).items():
            if isinstance(value, Tensor) and name not in WRITTEN:
                assert torch.equal(bits(value), bits(right(kind)[name])), f"{kind}: {name}"


def entry(first: DecodeArgs) -> Callable[..., None]:
    """A launch that refuses what a kernel's entry does: rank, dtype, device, layout, alignment."""

    def facts(value: Tensor) -> tuple[Any, ...]:
        layout = value.stride(-1) if value.dim() and value.shape[-1] > 1 else 1
        return value.dim(), value.dtype, value.device, layout, value.shape[-1:]

    def launch(args: DecodeArgs, *_: Any) -> None:
        for p in PARAMETERS:
            one, other = getattr(first, p.name), getattr(args, p.name)
            if not isinstance(one, Tensor) or p.name == "workspace_buffer":
                continue
            if not isinstance(other, Tensor) or facts(one) != facts(other):
                raise ValueError(p.name)
            inner = slice(1, None) if p.name in ("kv_cache", "block_tables") else slice(None)
            if one.stride()[inner] != other.stride()[inner] or other.data_ptr() % p.arg.alignment:
                raise ValueError(p.name)

    return launch


def refusal(args: DecodeArgs) -> str:
    """Why the full checks refuse a call; empty where they do not."""
    try:
        bind(args, form_of(args), reads_lengths=False, debug=False)
    except MlaLabError as error:
        return str(error)
    return ""


@pytest.mark.filterwarnings("ignore")
def test_what_is_replayed_would_pass_the_checks() -> None:
    replayed = 0
    for seed in seeds(CALLS):
        good, named, told = mutated(seed)
        args = native_args(**good)
        form = form_of(args)
        planned: Any = SimpleNamespace(workspace=SimpleNamespace(nbytes=seed % 2))
        replay.clear()
        bound = bind(args, form, reads_lengths=False, debug=False)
        replay.record(bound, planned, entry(args))
        changed = native_args(**named)
        if replay.replay(changed) is not None:
            replayed += 1
            # what lengths and tables hold is the full checks' alone, as is the workspace's memory
            error = refusal(changed)
            inside = error.startswith("workspace_buffer: got bytes that are")
            assert not error or inside or VALUES.search(error), told
    replay.clear()
    assert replayed > 3
