"""The dual build of keep_ab in the emulator: either mainloop by the gate, from one kernel."""

from __future__ import annotations

import pytest

from mla_lab import jit
from mla_lab.core.errors import InvalidInput, Unsupported
from mla_lab.cute.keep_ab_sm90 import static_facts
from mla_lab.emulate import EmulatedKernel, Options
from mla_lab.emulate.calls import DUAL_WORKERS, NAMES, is_right, make_call, problem_for
from mla_lab.plan.config import KernelConfig
from mla_lab.plan.gate import dual_gate

from .needs import needs_cxx

CONFIG = KernelConfig("cute/keep_ab_sm90", options=(("dual", 1), ("shaped", 1)))
HEADS = 64
GATE = dual_gate(1, HEADS, DUAL_WORKERS)


@pytest.fixture(scope="module")
def kernel() -> EmulatedKernel:
    return EmulatedKernel.of(jit.compile(CONFIG), Options(check=True))


@needs_cxx
@pytest.mark.parametrize("kv_len", [0, 1, 64 * 4, 64 * GATE - 64, 64 * GATE - 63, 64 * GATE + 700])
def test_lengths_on_both_sides_of_the_gate(kernel: EmulatedKernel, kv_len: int) -> None:
    call = make_call(CONFIG, problem_for(CONFIG, (kv_len,), HEADS), splits=0)
    kernel(*call.args)
    assert is_right(call), call.errors()
    assert kernel.run.findings == []
    ll_partials, counters = call.args[12], call.args[6]
    assert not ll_partials.any()
    assert not counters.any()


@needs_cxx
def test_a_launch_takes_the_mainloop_of_its_length_whatever_was_before(
    kernel: EmulatedKernel,
) -> None:
    kept = None
    for kv_len in (300, 64 * GATE, 300, 0, 64 * GATE + 64):
        call = make_call(CONFIG, problem_for(CONFIG, (kv_len,), HEADS), splits=0)
        args = list(call.args)
        args[11] = args[11] if kept is None else kept
        kernel(*args)
        assert is_right(call), (kv_len, call.errors())
        kept = args[11]


@needs_cxx
@pytest.mark.parametrize("length", [64 * 4 + 1, 64 * GATE + 1, 2**31 - 64, 2**31 - 1])
def test_a_request_longer_than_its_row_of_the_table_is_nan(
    kernel: EmulatedKernel, length: int
) -> None:
    """By either mainloop, and the next launch in the same workspace is right."""
    call = make_call(CONFIG, problem_for(CONFIG, (250,), HEADS), splits=0)
    args = list(call.args)
    table, lens = NAMES.index("block_tables"), NAMES.index("seq_lens")
    args[table] = args[table][:, :4]
    args[lens][0] = length
    kernel(*args)
    assert kernel.run.findings == []
    assert bool(call.out.isnan().all()) and bool(call.lse.isnan().all())
    args[lens][0] = 250
    kernel(*args)
    assert is_right(call), call.errors()


@pytest.mark.parametrize(
    "changes",
    [
        {"options": (("dual", 3),)},
        {"options": (("dual", 1), ("features", 1))},
        {"options": (("dual", 1), ("stages", 2))},
        {"tile_rows": 128, "cluster": 2},
        {"mask": "tree"},
        {"q_dtype": "e4m3", "kv_format": "e4m3"},
    ],
)
def test_what_is_not_compiled_beside_swap_ab_is_refused(changes: dict) -> None:
    fields = {"options": CONFIG.options, **changes}
    with pytest.raises(Unsupported):
        static_facts(KernelConfig("cute/keep_ab_sm90", **fields))


@pytest.mark.parametrize(
    ("kv_lens", "splits", "words"),
    [((300,), 3, "splits: got 3; supported: 0"), ((300, 40), 0, "batch: got 2; supported: 1")],
)
def test_the_emulator_s_call_takes_neither_a_plan_nor_several_requests(
    kv_lens: tuple[int, ...], splits: int, words: str
) -> None:
    with pytest.raises(InvalidInput, match=words):
        make_call(CONFIG, problem_for(CONFIG, kv_lens), splits)
