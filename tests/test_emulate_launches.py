"""Launches and arguments that no card takes, arguments that share memory, and threads that are
long in what they do."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mla_lab.core.errors import InvalidInput, Unsupported
from mla_lab.emulate import Options
from mla_lab.emulate.debugger import Debugger
from mla_lab.emulate.direct import Direct, ptx_kernel

from .test_emulate_checks import SHARED, START, find, kinds
from .test_emulate_instructions import kernel


@pytest.mark.parametrize(
    ("launch", "error", "name"),
    [
        ({"block": (2048, 1, 1)}, InvalidInput, "block"),
        ({"block": (48, 1, 1)}, Unsupported, "block"),
        ({"shared_bytes": 227 * 1024 + 1}, InvalidInput, "shared memory"),
        ({"grid": (3, 1, 1), "cluster": (2, 1, 1)}, InvalidInput, "grid"),
        ({"grid": (32, 1, 1), "cluster": (32, 1, 1)}, InvalidInput, "grid"),
    ],
)
def test_launches_that_are_refused(launch: dict[str, Any], error: type, name: str) -> None:
    with pytest.raises(error, match=name):
        ptx_kernel(kernel("mov.b32 %r1, 1;"), "k", Direct(**launch))(torch.zeros(1), torch.zeros(1))


@pytest.mark.parametrize("given", [torch.zeros(4), 1 << 40, "one"])
def test_an_argument_fits_its_parameter(given: Any) -> None:
    text = kernel("ld.param.u32 %r1, [n];", params=".param .u32 n, .param .u64 b")
    with pytest.raises(InvalidInput, match="argument 0"):
        ptx_kernel(text, "k", Direct())(given, torch.zeros(4))


ADDS_100 = """
mov.u32 %r0, %tid.x; mul.wide.u32 %d2, %r0, 4; ld.param.u64 %d0, [b]; add.s64 %d0, %d0, %d2;
ld.global.b32 %r1, [%d0]; add.s32 %r1, %r1, 100;
ld.param.u64 %d1, [a]; add.s64 %d1, %d1, %d2; st.global.b32 [%d1], %r1;"""


def test_arguments_that_share_memory() -> None:
    """What is written through one of them is there, and is not written over by the other."""
    whole = torch.arange(32, dtype=torch.int32)
    ptx_kernel(kernel(ADDS_100), "k", Direct())(whole, whole)
    assert whole.tolist() == list(range(100, 132))
    both = torch.arange(64, dtype=torch.int32)
    ptx_kernel(kernel(ADDS_100.replace("[b]", "[a]")), "k", Direct())(both, both[8:40])
    assert both.tolist() == [*range(100, 132), *range(32, 64)]
    inside = torch.arange(64, dtype=torch.int32)
    ptx_kernel(kernel(ADDS_100.replace("[a]", "[b]")), "k", Direct())(inside, inside[8:40])
    assert inside.tolist() == [*range(8), *range(108, 140), *range(40, 64)]
    apart = torch.arange(64, dtype=torch.int32)
    ptx_kernel(kernel(ADDS_100), "k", Direct())(apart[:32], apart[8:40])
    assert apart.tolist() == [*range(108, 140), *range(32, 64)]
    rows = torch.arange(64, dtype=torch.int32).view(2, 2, 16)
    ptx_kernel(kernel(ADDS_100), "k", Direct(block=(32, 1, 1)))(rows[:, 0], rows[:, 1])
    assert rows.flatten().tolist() == [*range(116, 148), *range(32, 64)]


def test_threads_that_compute_for_long_do_not_spin() -> None:
    counts = "L: sub.s32 %r15, %r15, 1; setp.gt.s32 %p5, %r15, 0; @%p5 bra L;"
    assert kinds("mov.b32 %r15, 60000;" + counts, Direct()) == []


def debugged(body: str, options: Options | None = None) -> Debugger:
    """A debugger of one warp with 4096 bytes of shared memory."""
    text = kernel(body, shared=SHARED)
    return ptx_kernel(text, "k", Direct(), options).debug(torch.zeros(1), torch.zeros(1))


def test_a_debugger_steps_through_what_runs() -> None:
    """With a card's numbers a product and its sum are one instruction."""
    body = "mul.f32 %r3, %r1, %r1; add.f32 %r2, %r3, %r1;"
    for numbers, joined in (("card", True), ("exact", False)):
        code = debugged(body, Options(numbers=numbers)).gangs[0].cta.program.kernel.code
        assert any(s.opcode == "fma.rn.f32" for s in code) is joined


def test_a_debugger_shows_what_is_there() -> None:
    debugger = debugged("mov.b32 %r1, 1;")
    assert debugger.tile(4096 - 64, (1, 32), span=0).shape == (1, 32)
    for offset, shape in ((4096, (1, 8)), (-16, (1, 8)), (1, (1, 8)), (0, (0, 8))):
        with pytest.raises(InvalidInput, match="offset, shape"):
            debugger.tile(offset, shape)
    for ask in (lambda: debugger.warp(0, 1), lambda: debugger.barriers(-1)):
        with pytest.raises(InvalidInput, match="cta"):
            ask()


@pytest.mark.parametrize("schedule", ["fair", "greedy", "random"])
def test_lanes_that_poll_let_others_of_their_warp_go_on(schedule: str) -> None:
    body = """ld.param.u64 %d0, [a]; @%p1 bra OPENS;
    L: ld.acquire.gpu.global.b32 %r5, [%d0]; setp.eq.s32 %p5, %r5, 0; @%p5 bra L; bra END;
    OPENS: st.release.gpu.global.b32 [%d0], 1; END: mov.b32 %r7, 0;"""
    assert kinds(body, Direct(), schedule) == []
    never = body.replace("[%d0], 1;", "[%d0], 0;")
    assert kinds(never, Direct(), schedule) == ["livelock"]


#: CTA 0 opens a flag after a while; CTA 1 spins, and stores while it does
STORES_AND_SPINS = """
ld.param.u64 %d0, [a]; ld.param.u64 %d1, [b]; mov.u32 %r10, %ctaid.x; mov.b32 %r15, {after};
setp.ne.s32 %p4, %r10, 0; @%p4 bra SPINS;
L: sub.s32 %r15, %r15, 1; setp.gt.s32 %p5, %r15, 0; @%p5 bra L;
st.release.gpu.global.b32 [%d1], {opens}; bra END;
SPINS: {time} st.shared.b32 [%r4], %r0; st.global.b32 [%d0], 7;
ld.acquire.gpu.global.b32 %r11, [%d1]; setp.eq.s32 %p5, %r11, 0; @%p5 bra SPINS;
END: mov.b32 %r7, 0;"""
TWO = Direct((2, 1, 1), (32, 1, 1))
LATE = Options(check=True, schedule="late")


@pytest.mark.parametrize("schedule", ["fair", "greedy", "random", "late", "adverse"])
def test_a_spin_that_stores_is_reported(schedule: str) -> None:
    never = STORES_AND_SPINS.format(after=10, opens=0, time="")
    (found,) = find(never, TWO, schedule)
    assert found.kind == "livelock" and "all is as it was" in found.text
    assert kinds(STORES_AND_SPINS.format(after=10, opens=1, time=""), TWO, schedule) == []


@pytest.mark.parametrize("schedule", ["fair", "random"])
def test_a_spin_that_stores_and_ends_late_is_none(schedule: str) -> None:
    body = STORES_AND_SPINS.format(after=60000, opens=1, time="")
    assert kinds(body, TWO, schedule) == []


def test_a_spin_that_stores_until_a_time_is_none() -> None:
    timed = "mov.u64 %d5, %globaltimer; setp.gt.u64 %p6, %d5, 300; @%p6 bra END;"
    assert kinds(STORES_AND_SPINS.format(after=10, opens=0, time=timed), TWO) == []


def test_copies_land_for_a_spin_that_stores() -> None:
    """Under a late schedule, when nothing else changes, one after the other."""
    copy = """mbarrier.arrive.expect_tx.shared.b64 _, [%r9], 4;
    st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%r10+{}], %r0, [%r9];"""
    copies = " ".join(copy.format(4 * i) for i in range(7))
    spin = f"""add.s32 %r9, %r2, 2048; add.s32 %r10, %r2, 3072;
    @%p1 mbarrier.init.shared.b64 [%r9], 7; fence.mbarrier_init.release.cluster; bar.sync 0;
    @!%p1 bra SPINS; st.shared.b32 [%r4+256], %r0; {copies}
    SPINS: st.shared.b32 [%r4], %r0; mbarrier.test_wait.parity.shared.b64 %p3, [%r9], 0;
    @!%p3 bra SPINS;"""
    emulated = ptx_kernel(kernel(START + spin, shared=SHARED), "k", Direct(), LATE)
    emulated(torch.zeros(64), torch.zeros(64))
    assert emulated.run.findings == [] and emulated.run.rounds < 1000


@pytest.mark.parametrize("schedule", ["fair", "greedy", "late"])
def test_a_bit_that_a_barrier_holds_is_part_of_the_state(schedule: str) -> None:
    """Two warps pass a bit on by bar.red, and have it in no register where rounds end. They count
    to 512 and begin at 0 again; the first time they set the bit, the second time they end."""
    body = """
    mov.b32 %r11, -288; mov.b32 %r12, 1; setp.ne.s32 %p3, %r0, %r0;
    L: bar.red.or.pred %p5, 1, 64, %p3; add.s32 %r11, %r11, 1; setp.ne.s32 %p6, %r11, 512;
    @%p6 bra ON; mov.b32 %r11, 0; @%p5 bra END; setp.eq.s32 %p5, %r0, %r0;
    ON: xor.b32 %r12, %r12, 1; setp.eq.s32 %p7, %r12, %r1; and.pred %p3, %p5, %p7;
    setp.ne.s32 %p5, %r0, %r0; bra L; END: mov.b32 %r7, 0;"""
    assert kinds(body, schedule=schedule) == []
