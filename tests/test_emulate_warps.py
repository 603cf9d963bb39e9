"""Instructions of a whole warp under guards, with member masks, and of some of its lanes."""

from __future__ import annotations

import pytest
import torch

from mla_lab.core.errors import Unsupported
from mla_lab.emulate import Options
from mla_lab.emulate.direct import Direct, ptx_kernel

from .test_emulate_checks import (
    ARRIVE,
    BARRIER,
    COPY,
    ELECTED,
    EXCHANGE,
    FENCE,
    HALF,
    SHARED,
    START,
    find,
    kinds,
)
from .test_emulate_instructions import WHOLE, kernel, per_thread

ONE_WARP = Direct()


@pytest.mark.parametrize(
    "guarded",
    [
        "bar.warp.sync -1;",
        "vote.sync.ballot.b32 %r5, %p1, -1;",
        "redux.sync.add.s32 %r5, %r0, -1;",
        "elect.sync _|%p4, -1;",
        "shfl.sync.idx.b32 %r5, %r0, 0, 31, -1;",
        "ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r6}, [%r2];",
        "wgmma.commit_group.sync.aligned;",
    ],
)
def test_a_guard_keeps_no_lane_from_what_its_warp_executes(guarded: str) -> None:
    written = "st.shared.b32 [%r4], %r0; bar.warp.sync -1;"
    assert kinds(f"{written} @%p1 {guarded}", ONE_WARP) == ["member mask"]
    every = f"{written} setp.ge.s32 %p3, %r0, 0; @%p3 {guarded} @!%p3 {guarded}"
    assert kinds(every, ONE_WARP) == []


def test_a_guarded_warp_barrier_is_no_meeting() -> None:
    inside = EXCHANGE.replace("128", "4").format(sync="@%p1 bar.warp.sync -1;")
    assert kinds(inside, ONE_WARP) == ["member mask"]


#: lanes below 16 store and meet; then lanes read the word of the lane `by` bytes away
SOME_MEET = """
st.shared.b32 [%r4], %r0; setp.lt.u32 %p3, %r0, 16; @!%p3 bra ON; bar.warp.sync 0xffff;
ON: bar.sync 1, 32; st.shared.b32 [%r4], %r0; @!%p3 bra UPPER; bar.warp.sync 0xffff;
@%p3 bra {lower}; UPPER: @%p3 bra END;
READ: xor.b32 %r5, %r4, {by}; ld.shared.b32 %r6, [%r5]; END: mov.b32 %r7, 0;"""


def test_some_lanes_meet_each_other_alone() -> None:
    assert kinds(SOME_MEET.format(lower="READ", by=4), ONE_WARP) == ["race"]
    lower = SOME_MEET.format(lower="READ", by=4).replace("UPPER: @%p3 bra", "UPPER: bra")
    assert kinds(lower, ONE_WARP) == []
    across = SOME_MEET.format(lower="END", by=64)
    assert kinds(across, ONE_WARP) == ["race"]


def test_lanes_that_met_arrive_by_one_of_them() -> None:
    """Of 16 lanes that write and meet, one arrives for all."""
    body = ELECTED.replace("st.shared", "setp.lt.u32 %p4, %r0, 16; @!%p4 bra END; st.shared")
    body = body.replace("xor.b32 %r5, %r4, 128;", "mov.b32 %r5, s;")
    for sync, found in (("bar.warp.sync 0xffff;", []), ("", ["race"])):
        assert kinds(body.format(count=1, fence=FENCE, sync=sync)) == found
    assert "@%p1 " + ARRIVE in body


@pytest.mark.parametrize("check", [False, True])
def test_a_member_mask_in_a_register(check: bool) -> None:
    """One that holds a number is that number; others are refused: lanes may differ in them."""
    body = HALF.format(below=16, members="%r10")
    named = body.replace("mov.b32 %r5, 0;", "mov.b32 %r5, 0; mov.b32 %r10, 0xffff;")
    out = torch.zeros(64, dtype=torch.int32)
    text = kernel(START + named, shared=SHARED)
    emulated = ptx_kernel(text, "k", Direct(block=(64, 1, 1)), Options(check=check))
    emulated(torch.zeros(64), out)
    assert out.tolist() == ([1] * 16 + [0] * 16) * 2
    halves = "and.b32 %r3, %r0, 16; shl.b32 %r4, 0xffff, %r3; setp.ge.s32 %p1, %r1, 0; "
    with pytest.raises(Unsupported, match="member mask"):
        per_thread(halves + "vote.sync.ballot.b32 %r2, %p1, %r4;", WHOLE)


def test_halves_of_a_word_may_be_of_two_lanes() -> None:
    halves = "shl.b32 %r5, %r0, 1; add.s32 %r5, %r5, %r2; cvt.u16.u32 %h1, %r0; "
    halves += "st.shared.b16 [%r5], %h1; {} ld.shared.b16 %h2, [%r5];"
    assert kinds(halves.format(""), ONE_WARP) == []
    other = "xor.b32 %r5, %r5, 4;"
    assert kinds(halves.format("bar.warp.sync -1; " + other), ONE_WARP) == []


@pytest.mark.parametrize(("step", "found"), [(2, []), (1, ["race"])])
def test_halves_of_a_word_of_global_memory_may_be_of_two_ctas(step: int, found: list[str]) -> None:
    """CTA 1 writes the half behind that of CTA 0, or a byte of it."""
    body = f"""
    ld.param.u64 %d0, [a]; mov.u32 %r5, %ctaid.x; mul.wide.u32 %d1, %r5, {step};
    add.s64 %d0, %d0, %d1; cvt.u16.u32 %h1, %r5; setp.eq.s32 %p4, %r5, 0;
    @%p4 st.global.b16 [%d0], %h1; @!%p4 st.global.b8 [%d0], %h1;"""
    assert kinds(body, Direct((2, 1, 1))) == found


#: address of a part of word `lane`, warp 1's `step` bytes behind warp 0's
HALVES = """
and.b32 %r6, %r0, 31; mul.lo.u32 %r6, %r6, 4; mul.lo.u32 %r7, %r1, {step};
add.s32 %r6, %r6, %r7; add.s32 %r6, %r6, %r2; cvt.u16.u32 %h1, %r0;
"""


@pytest.mark.parametrize("size", ["b16", "b8"])
@pytest.mark.parametrize("schedule", ["fair", "greedy", "random"])
def test_parts_of_a_word_may_be_of_two_warps(size: str, schedule: str) -> None:
    """Two warps write, or one writes and one reads, parts of the same words."""
    step = {"b16": 2, "b8": 1}[size]
    write = HALVES + f"st.shared.{size} [%r6], %h1;"
    read = "bar.sync 0; @%p2 bra READS; {}; bra END; READS: {}; END: mov.b32 %r7, 0;"
    read = read.format(f"st.shared.{size} [%r6], %h1", f"ld.shared.{size} %h2, [%r6+{{at}}]")
    for by, found in ((step, []), (0, ["race"])):
        assert kinds(write.format(step=by), schedule=schedule) == found
    for at, found in ((0, []), (step, ["race"])):
        body = write.format(step=step) + read.format(at=at)
        assert kinds(body, schedule=schedule) == found


@pytest.mark.parametrize(("at", "found"), [(1, []), (0, ["race"])])
@pytest.mark.parametrize("reader", ["", "!"])
def test_a_part_that_is_read_is_no_other(reader: str, at: int, found: list[str]) -> None:
    """One warp reads a byte of a word that was whole, another writes one, whichever comes first."""
    writer = "!" if not reader else ""
    body = f"""st.shared.b32 [%r4], %r0; bar.sync 0;
    @{reader}%p2 ld.shared.b8 %h1, [%r2]; @{writer}%p2 st.shared.b8 [%r2+{at}], %h2;"""
    assert kinds(body) == found


def test_parts_of_a_word_are_not_forgotten() -> None:
    """A copy of whole words behind writes of their parts, one of which it is not behind."""
    write = HALVES.format(step=2) + "st.shared.b16 [%r6], %h1;"
    whole = "bar.sync {}, 32; and.b32 %r7, %r6, -4; @!%p2 ld.shared.b32 %r8, [%r7];"
    assert kinds(write + "bar.sync 0;" + whole.format(1).replace("bar.sync 1, 32;", "")) == []
    found = kinds(write + "@%p2 bra END; " + whole.format(1) + "END: mov.b32 %r7, 0;")
    assert set(found) <= {"race", "unwritten"} and found


def test_a_byte_in_a_report_is_the_byte() -> None:
    body = "setp.eq.s32 %p4, %r0, 32; @%p1 st.shared.b8 [%r2+41], %h1;"
    body += "@%p4 st.shared.b8 [%r2+{}], %h1;"
    assert find(body.format(42)) == []
    (found,) = find(body.format(41))
    assert found.kind == "race" and "byte 41 of shared memory" in found.text


SHOWS = "fence.proxy.async.shared::cta;"


@pytest.mark.parametrize("schedule", ["fair", "random", "adverse"])
@pytest.mark.parametrize(
    ("fence", "found"),
    [
        (f"@%p1 {SHOWS}", ["proxy fence"]),
        (f"@%p1 {SHOWS} @!%p1 {SHOWS}", []),
        (f"bar.warp.sync -1; @%p1 {SHOWS}", []),
        (f"@%p1 {SHOWS} bar.warp.sync -1;", ["proxy fence"]),
        (f"@%p1 bra ON; {SHOWS} ON: mov.b32 %r7, 0;", ["proxy fence"]),
        (f"@%p1 bra ON; {SHOWS} ON: @%p1 {SHOWS}", []),
    ],
)
def test_a_lane_s_proxy_fence_shows_what_lies_before_the_lane(
    fence: str, found: list[str], schedule: str
) -> None:
    body = COPY.replace("256,", "128,").format(fence=fence, expect=128)
    assert kinds(body, ONE_WARP, schedule) == found


@pytest.mark.parametrize(
    ("before", "behind", "found"), [("", SHOWS, []), (SHOWS, "", ["proxy fence"])]
)
def test_a_lane_shows_what_it_has_written_itself(
    before: str, behind: str, found: list[str]
) -> None:
    """It copies 16 bytes of its own; what other lanes have written elsewhere has no fence."""
    own = f"st.shared.b32 [%r4+512], %r0; @!%p1 bra WAITS; {before}"
    own += f"st.shared.v4.b32 [%r2], {{%r0, %r0, %r0, %r0}}; {behind}"
    body = COPY.replace("256,", "16,").format(fence="", expect=16)
    body = body.replace("st.shared.b32 [%r4], %r0;  bar.sync 0; @!%p1 bra WAITS;", own)
    assert own in body
    assert kinds(body.split("ld.shared.b32 %r6")[0], ONE_WARP) == found


#: lane 0 of warp 0 writes 16 bytes, of which a copy by warp 1 has all, and `others` of its warp
HANDED = (
    BARRIER
    + """
@%p1 mbarrier.init.shared.b64 [%r9], 1; bar.sync 0;
@!%p2 bra ON; {others} @%p1 st.shared.v4.b32 [%r2], {{%r0, %r0, %r0, %r0}}; {fence}
ON: bar.sync 0; setp.eq.s32 %p4, %r0, 32; @!%p4 bra END;
mbarrier.arrive.expect_tx.shared.b64 _, [%r9], {bytes}; add.s32 %r8, %r2, 1024;
cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%r8], [%r2], {bytes}, [%r9];
LOOP: mbarrier.try_wait.parity.shared.b64 %p3, [%r9], 0; @!%p3 bra LOOP;
END: mov.b32 %r7, 0;"""
)
ELSEWHERE, BEHIND = "st.shared.b32 [%r4+512], %r0;", "@!%p1 st.shared.b32 [%r4+12], %r0;"
#: lanes 4 to 7 meet, and lane 4 meets lane 0
MEET = """setp.lt.u32 %p5, %r0, 8; setp.gt.u32 %p6, %r0, 3; and.pred %p6, %p5, %p6;
@!%p6 bra A; bar.warp.sync 0xf0; A: setp.eq.s32 %p7, %r0, 4; or.pred %p7, %p7, %p1;
@!%p7 bra B; bar.warp.sync 0x11; B:"""
FOUR = "@!%p1 st.shared.b32 [%r4], %r0;"


@pytest.mark.parametrize("schedule", ["fair", "greedy", "random"])
@pytest.mark.parametrize(
    ("others", "fence", "nbytes", "found"),
    [
        (ELSEWHERE, f"@%p1 {SHOWS}", 16, []),
        (ELSEWHERE, f"@!%p1 {SHOWS}", 16, ["proxy fence"]),
        (ELSEWHERE, "", 16, ["proxy fence"]),
        (BEHIND, f"@%p1 {SHOWS}", 16, []),
        (BEHIND, f"@%p1 {SHOWS}", 32, ["proxy fence"]),
        (FOUR, f"{MEET} @%p1 {SHOWS}", 32, []),
        (FOUR, f"{MEET} @%p1 {SHOWS}", 48, ["proxy fence"]),
        (FOUR, f"@%p1 {SHOWS} {MEET}", 32, ["proxy fence"]),
    ],
)
def test_another_warp_copies_what_a_lane_has_shown(
    others: str, fence: str, nbytes: int, found: list[str], schedule: str
) -> None:
    """Though other lanes have written elsewhere, and not met it."""
    body = HANDED.format(others=others, fence=fence, bytes=nbytes)
    assert kinds(body, schedule=schedule) == found


def test_a_fence_counts_for_those_who_have_seen_it() -> None:
    """Warp 1 copies what lane 0 wrote before the barrier, and showed only behind it."""
    body = HANDED.format(others=ELSEWHERE, fence="", bytes=16)
    late = body.replace("ON: bar.sync 0;", f"ON: bar.sync 0; @%p1 {SHOWS}")
    for schedule in ("fair", "greedy", "random", "late"):
        assert kinds(late, schedule=schedule) == ["proxy fence"]
