"""cute/q_m in e4m3 on a machine without a GPU: registers, shared memory, who has which token, what
it compiles to."""

from __future__ import annotations

import re
import shutil
from dataclasses import replace

import pytest

from mla_lab import jit
from mla_lab.errors import Unsupported
from mla_lab.plan.config import KernelConfig

pytest.importorskip("cutlass")
from mla_lab.cute import q_m
from mla_lab.cute.q_m import transposed
from mla_lab.cute.q_m.transposed import storage

EIGHT = KernelConfig("cute/q_m", q_dtype="e4m3", kv_format="e4m3", tile_rows=128, cluster=2)


def test_registers_of_all_roles_are_those_of_the_card() -> None:
    roles = (
        2 * transposed.ACCUMULATE_REGISTERS
        + transposed.ATTEND_REGISTERS
        + transposed.LOAD_REGISTERS
    )
    assert roles * 128 <= 65536
    assert transposed.THREADS == 4 * 128


def test_what_eight_bits_do_not_go_with() -> None:
    for changed in (
        {"kv_format": "bf16"},
        {"tile_rows": 64, "cluster": 1, "options": (("skip", 1),)},
        {"q_dtype": "bf16", "kv_format": "bf16", "out_dtype": "e4m3"},
        {"tile_rows": 32, "cluster": 1},
    ):
        with pytest.raises(Unsupported):
            q_m.static_facts(replace(EIGHT, **changed))


def test_weights_stay_below_what_saturates() -> None:
    facts = q_m.static_facts(EIGHT)
    assert 2 ** (storage.WEIGHT_LOG2 + facts.lazy_log2) < 448
    # row sums of sixteen weights pass through fp16
    assert 16 * 448 < 65504


def test_tokens_of_a_word_of_weights() -> None:
    """The picture in the docstring of `transposed.attend`: what a quad holds of 16 tokens, and what
    the bytes of V^T's k-step are (tests of kv_m: 0 8 1 9 2 10 .. 7 15)."""
    order = [t for g in range(8) for t in (g, g + 8)]
    for q in range(4):
        # accumulators 8 i + e and 8 i + 4 + e are tokens 2q + e and 2q + 8 + e of 16
        token = {0: 2 * q, 4: 2 * q + 8, 1: 2 * q + 1, 5: 2 * q + 9}
        assert [token[x] for x in (0, 4, 1, 5)] == order[4 * q : 4 * q + 4]


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
@pytest.mark.parametrize("features", [(), (("features", 1),)], ids=["plain", "sinks"])
def test_compiles_without_spills(features: tuple[tuple[str, int], ...]) -> None:
    config = replace(EIGHT, options=features)
    made = jit.compile(config, "sm_90a")
    (kernel,) = made.resources
    assert kernel.stack == 0
    assert tuple(kernel.block or ()) == (transposed.THREADS, 1, 1)
    assert kernel.shared <= 232_448
    products = re.findall(r"wgmma\.mma_async\.sync\.aligned\.(\S+)", made.ptx.read_text())
    assert {p.partition(".")[2] for p in products} == {"f32.e4m3.e4m3"}
