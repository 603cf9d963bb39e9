"""Planted bugs, each reported by kind, line and who; and the same code without the bug, silent."""

from __future__ import annotations

import pytest
import torch

from mla_lab.emulate import Fault, Finding, Options
from mla_lab.emulate.direct import Direct, ptx_kernel

from .test_emulate_instructions import kernel

SHARED = ".shared .align 128 .b8 s[4096];"
#: thread, warp, shared address of the thread's word
START = """.loc 1 1 0
mov.u32 %r0, %tid.x; shr.u32 %r1, %r0, 5; mov.u32 %r2, s; shl.b32 %r3, %r0, 2;
add.s32 %r4, %r2, %r3; setp.eq.s32 %p1, %r0, 0; setp.eq.s32 %p2, %r1, 0;"""
BARRIER = "add.s32 %r9, %r2, 2048;"  # an mbarrier
TWO_WARPS = Direct(block=(64, 1, 1))


def find(body: str, launch: Direct = TWO_WARPS, schedule: str = "fair") -> list[Finding]:
    """Findings of a kernel, of its checks or of the fault that ended it."""
    text = kernel(START + body, shared=SHARED) + '\n.file 1 "/x/mla_lab/cute/kernel.py"\n'
    emulated = ptx_kernel(text, "k", launch, Options(check=True, schedule=schedule))
    try:
        emulated(torch.zeros(64), torch.zeros(64))
    except Fault as fault:
        return [*emulated.run.findings, fault.finding]
    return emulated.run.findings


def kinds(body: str, launch: Direct = TWO_WARPS, schedule: str = "fair") -> list[str]:
    return [found.kind for found in find(body, launch, schedule)]


EXCHANGE = """.loc 1 10 0
st.shared.b32 [%r4], %r0; xor.b32 %r5, %r4, 128;
.loc 1 11 0
{sync}
.loc 1 12 0
ld.shared.b32 %r6, [%r5];"""


def test_an_exchange_between_warps_wants_a_barrier() -> None:
    assert kinds(EXCHANGE.format(sync="bar.sync 1, 64;")) == []
    for schedule in ("fair", "greedy", "random"):
        (found, *_) = find(EXCHANGE.format(sync=""), schedule=schedule)
        assert found.kind in ("race", "unwritten") and "shared memory" in found.text
    # whichever warp comes first, the pair of lines is named
    races = [f for f in find(EXCHANGE.format(sync="")) if f.kind == "race"]
    assert {f.place.line for f in races} | {p.line for f in races for _, p in f.others} == {10, 12}
    assert "mla_lab/cute/kernel.py:1" in str(races[0]) and "warp" in races[0].who


def test_an_exchange_inside_a_warp_wants_a_warp_barrier() -> None:
    inside = EXCHANGE.replace("128", "4")
    assert kinds(inside.format(sync="bar.warp.sync -1;")) == []
    assert kinds(inside.format(sync="")) == ["race"]


def test_overwriting_wants_a_barrier_behind_the_reads() -> None:
    again = EXCHANGE.format(sync="bar.sync 1, 64;") + "{sync} st.shared.b32 [%r4], %r6;"
    assert kinds(again.format(sync="bar.sync 2, 64;")) == []
    assert set(kinds(again.format(sync=""))) == {"race"}


def test_memory_that_nobody_wrote() -> None:
    assert kinds("ld.shared.b32 %r6, [%r4];") == ["unwritten"]


def test_shared_bounds_and_alignment() -> None:
    assert kinds("st.shared.b32 [%r4+4096], %r0;") == ["out of bounds"]
    assert kinds("st.shared.b64 [%r4], %d0;") == ["misaligned"]


PIPELINE = (
    BARRIER
    + """
@%p1 mbarrier.init.shared.b64 [%r9], {count}; {fence} bar.sync 0;
.loc 1 20 0
@!%p2 bra WAITS; st.shared.b32 [%r4], %r0;
.loc 1 21 0
{arrive} bra END;
WAITS: .loc 1 22 0
LOOP: mbarrier.try_wait.parity.shared.b64 %p3, [%r9], 0; @!%p3 bra LOOP;
.loc 1 23 0
xor.b32 %r5, %r4, 128; ld.shared.b32 %r6, [%r5];
END: mov.b32 %r7, 0;"""
)
ARRIVE = "mbarrier.arrive.shared.b64 _, [%r9];"
FENCE = "fence.mbarrier_init.release.cluster;"


def test_an_mbarrier_hands_over() -> None:
    assert kinds(PIPELINE.format(count=32, fence=FENCE, arrive=ARRIVE)) == []


def test_a_missing_arrival_is_a_deadlock_that_names_the_barrier() -> None:
    (found,) = find(PIPELINE.format(count=33, fence=FENCE, arrive=ARRIVE))
    assert found.kind == "deadlock" and found.place.line == 22 and "warp 1" in found.who
    assert "1 of 33 arrivals" in str(found)


ELECTED = PIPELINE.replace("{arrive}", "{sync} @%p1 " + ARRIVE)


@pytest.mark.parametrize("schedule", ["fair", "greedy", "random"])
def test_a_lane_that_arrives_for_its_warp_meets_it_before(schedule: str) -> None:
    """One thread's arrival says nothing of what other lanes did since the warp met."""
    met = ELECTED.format(count=1, fence=FENCE, sync="bar.warp.sync -1;")
    assert kinds(met, schedule=schedule) == []
    assert kinds(ELECTED.format(count=1, fence=FENCE, sync=""), schedule=schedule) == ["race"]
    # nothing but its own word
    own = ELECTED.replace("xor.b32 %r5, %r4, 128;", "mov.b32 %r5, s;")
    own = own.replace("st.shared.b32 [%r4]", "@%p1 st.shared.b32 [%r4]")
    assert kinds(own.format(count=1, fence=FENCE, sync=""), schedule=schedule) == []


#: an mbarrier that is new lets a wait for parity 1 through
PASSES = "W1: mbarrier.try_wait.parity.shared.b64 %p4, [%r9], 1; @!%p4 bra W1;"


@pytest.mark.parametrize("schedule", ["fair", "greedy", "random"])
def test_a_wait_of_all_lanes_is_no_meeting_of_theirs(schedule: str) -> None:
    """compute-sanitizer saw it on a card: a scheduler warp's words, a wait, one lane's arrival."""
    waited = ELECTED.format(count=1, fence=FENCE, sync=PASSES)
    assert kinds(waited, schedule=schedule) == ["race"]
    met = ELECTED.format(count=1, fence=FENCE, sync=PASSES + " bar.warp.sync -1;")
    assert kinds(met, schedule=schedule) == []


WARP_BY_MBARRIER = (
    BARRIER
    + """
@%p1 mbarrier.init.shared.b64 [%r9], {count}; fence.mbarrier_init.release.cluster; bar.sync 0;
st.shared.b32 [%r4], %r0; {who} mbarrier.arrive.shared.b64 _, [%r9];
LOOP: mbarrier.try_wait.parity.shared.b64 %p3, [%r9], 0; @!%p3 bra LOOP;
xor.b32 %r5, %r4, 4; ld.shared.b32 %r6, [%r5];"""
)


def test_lanes_that_arrive_and_wait_have_met() -> None:
    assert kinds(WARP_BY_MBARRIER.format(count=64, who="")) == []
    assert "race" in kinds(WARP_BY_MBARRIER.format(count=1, who="@%p1"))


IN_TURN = "@%p1 " + ARRIVE + "{between} @!%p1 " + ARRIVE


@pytest.mark.parametrize("schedule", ["fair", "greedy", "random"])
def test_lanes_that_arrive_in_turn_release_what_each_has_done(schedule: str) -> None:
    arrive = IN_TURN.format(between="")
    assert kinds(PIPELINE.format(count=32, fence=FENCE, arrive=arrive), schedule=schedule) == []
    late = IN_TURN.format(between="@%p1 st.shared.b32 [%r4], %r0;")
    found = kinds(PIPELINE.format(count=32, fence=FENCE, arrive=late), schedule=schedule)
    assert found == ["race"]


def test_an_arrival_in_excess() -> None:
    assert "excess arrival" in kinds(PIPELINE.format(count=31, fence=FENCE, arrive=ARRIVE))


def test_an_mbarrier_that_was_never_made() -> None:
    assert kinds(BARRIER + ARRIVE.format()) == ["barrier"]


def test_arriving_before_writing_races() -> None:
    late = PIPELINE.replace("st.shared.b32 [%r4], %r0;", ARRIVE)
    body = late.format(count=32, fence=FENCE, arrive="st.shared.b32 [%r4], %r0;")
    assert "race" in kinds(body, schedule="greedy")


def test_a_wait_that_two_phases_pass_by() -> None:
    body = """
@%p1 mbarrier.init.shared.b64 [%r9], 32; bar.sync 0;
@%p2 bra WAITS;
mov.b32 %r15, 500;
SLOW: sub.s32 %r15, %r15, 1; setp.gt.s32 %p5, %r15, 0; @%p5 bra SLOW;
ARRIVES bar.sync 1, 32; ARRIVES bra END;
WAITS: LOOP: mbarrier.try_wait.parity.shared.b64 %p3, [%r9], 0; @!%p3 bra LOOP;
END: mov.b32 %r7, 0;"""
    assert kinds(BARRIER + body.replace("ARRIVES", ARRIVE)) == ["parity alias"]


def test_named_barriers_count_threads() -> None:
    assert kinds("bar.sync 1, 96;") == ["deadlock"]
    assert kinds("bar.sync 1, 33;") == ["barrier"]


@pytest.mark.parametrize("arrive", ["bar.sync", "bar.arrive"])
@pytest.mark.parametrize("check", [True, False])
def test_warps_at_named_barriers_of_their_own(arrive: str, check: bool) -> None:
    """Warps 0 and 1 meet at barrier 1, 2 and 3 at 2, by one instruction with the number in a
    register; a thread then has its neighbour warp's word, whether a gang is a warp or all four.
    """
    body = f"""
    mov.u32 %r0, %tid.x; shr.u32 %r1, %r0, 6; add.u32 %r1, %r1, 1; mov.u32 %r2, s;
    shl.b32 %r3, %r0, 2; add.s32 %r4, %r2, %r3; st.shared.b32 [%r4], %r0;
    {arrive} %r1, 64; {"bar.sync 3, 128;" if arrive == "bar.arrive" else ""}
    xor.b32 %r5, %r4, 128; ld.shared.b32 %r6, [%r5];
    mul.wide.u32 %d2, %r0, 4; ld.param.u64 %d1, [b]; add.s64 %d1, %d1, %d2;
    st.global.b32 [%d1], %r6;"""
    out = torch.full((128,), -1, dtype=torch.int32)
    text = kernel(body, shared=SHARED)
    emulated = ptx_kernel(text, "k", Direct(block=(128, 1, 1)), Options(check=check))
    emulated(torch.zeros(128), out)
    assert emulated.run.findings == []
    assert out.tolist() == [thread ^ 32 for thread in range(128)]


def test_threads_that_part_before_an_aligned_instruction() -> None:
    body = "@%p1 bra WAITS; bar.warp.sync -1; WAITS: bar.sync 3, 128;"
    assert kinds(body) == ["deadlock"]


CLUSTER = """
mov.u32 %r11, %cluster_ctarank; setp.eq.s32 %p4, %r11, 0;
barrier.cluster.arrive; barrier.cluster.wait; @!%p4 bra SYNC;
mapa.shared::cluster.u32 %r10, %r4, 1; st.shared::cluster.b32 [%r10], %r0;
SYNC: {sync} @%p4 bra END; ld.shared.b32 %r6, [%r4]; END: mov.b32 %r7, 0;"""
PAIR = Direct((2, 1, 1), (32, 1, 1), (2, 1, 1))


def test_distributed_shared_memory_wants_a_cluster_barrier() -> None:
    assert kinds(CLUSTER.format(sync="barrier.cluster.arrive; barrier.cluster.wait;"), PAIR) == []
    assert "race" in kinds(CLUSTER.format(sync=""), PAIR)
    relaxed = "{} barrier.cluster.arrive.relaxed; barrier.cluster.wait;"
    assert kinds(CLUSTER.format(sync=relaxed.format("")), PAIR) == ["race"]
    assert kinds(CLUSTER.format(sync=relaxed.format("fence.acq_rel.cluster;")), PAIR) == []


def test_a_wait_at_the_cluster_barrier_wants_an_arrival() -> None:
    again = "barrier.cluster.arrive; barrier.cluster.wait; {} barrier.cluster.wait;"
    assert kinds(again.format(""), PAIR) == ["barrier"]
    assert kinds(again.format("barrier.cluster.arrive.relaxed;"), PAIR) == []


def test_a_cta_stays_while_others_use_its_memory() -> None:
    body = CLUSTER.replace("ld.shared.b32 %r6, [%r4]; END", "bra END; END")
    ends = "barrier.cluster.arrive{} ; barrier.cluster.wait;"
    for relaxed in ("", ".relaxed"):
        assert kinds(body.format(sync=ends.format(relaxed)), PAIR) == []
    for schedule in ("fair", "greedy", "random"):
        found = [f for f in find(body.format(sync=""), PAIR, schedule) if f.kind == "exited"]
        assert len(found) == 1 and "CTA 1,0,0" in found[0].text


CP_ASYNC = """
ld.param.u64 %d0, [a]; cp.async.ca.shared.global [%r4], [%d0], 4; {wait} bar.sync 0;
xor.b32 %r5, %r4, 128; ld.shared.b32 %r6, [%r5];"""


@pytest.mark.parametrize("schedule", ["fair", "late"])
def test_cp_async_is_waited_for_in_a_group_or_with_all(schedule: str) -> None:
    group = "cp.async.commit_group; cp.async.wait_group 0;"
    for wait in (group, "cp.async.wait_all;"):
        assert kinds(CP_ASYNC.format(wait=wait), schedule=schedule) == []
    found = kinds(CP_ASYNC.format(wait="cp.async.wait_group 0;"), schedule=schedule)
    assert ("race" in found and "open at exit" in found) or (schedule == "fair" and "race" in found)


COPY = BARRIER + """
@%p1 mbarrier.init.shared.b64 [%r9], 1; bar.sync 0;
st.shared.b32 [%r4], %r0; {fence} bar.sync 0; @!%p1 bra WAITS;
mbarrier.arrive.expect_tx.shared.b64 _, [%r9], {expect}; add.s32 %r8, %r2, 1024;
cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%r8], [%r2], 256, [%r9];
WAITS: LOOP: mbarrier.try_wait.parity.shared.b64 %p3, [%r9], 0; @!%p3 bra LOOP;
ld.shared.b32 %r6, [%r4+1024];"""  # fmt: skip


@pytest.mark.parametrize("schedule", ["fair", "late", "adverse"])
def test_asynchronous_copies_want_a_proxy_fence(schedule: str) -> None:
    good = COPY.format(fence="fence.proxy.async.shared::cta;", expect=256)
    assert kinds(good, schedule=schedule) == []
    assert kinds(COPY.format(fence="", expect=256), schedule=schedule) == ["proxy fence"]


def test_bytes_that_are_not_expected() -> None:
    body = COPY.format(fence="fence.proxy.async.shared::cta;", expect=512)
    (found,) = find(body)
    assert found.kind == "deadlock" and "256 bytes pending" in str(found)


WGMMA = """
st.shared.b32 [%r4], 0; st.shared.b32 [%r4+512], 0; st.shared.b32 [%r4+1024], 0;
st.shared.b32 [%r4+1536], 0; mov.b32 %r2, 0;
fence.proxy.async.shared::cta; bar.sync 0; and.b32 %r5, 0, 0; mov.b64 %d3, 0x100000100000;
mov.u32 %r7, s; shr.u32 %r7, %r7, 4; cvt.u64.u32 %d4, %r7; or.b64 %d3, %d3, %d4;
mov.b64 %d3, {{%r7, %r8}};
{first} wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {{%r11, %r12, %r13, %r14}},
{{%r21, %r22, %r23, %r24}}, %d3, 1, 1, 1, 0;
{commit} {wait} add.f32 %r20, %r11, %r11;"""
GROUP = Direct(block=(128, 1, 1))


def product(**parts: str) -> list[str]:
    """Kinds of findings of a product with some of its fence, commit and wait replaced."""
    given = {
        "first": "add.s32 %r11, %r0, 1; wgmma.fence.sync.aligned;",
        "commit": "wgmma.commit_group.sync.aligned;",
        "wait": "wgmma.wait_group.sync.aligned 0;",
    } | parts
    descriptor = "mov.b32 %r8, 0x00100010;"  # offsets of 256 bytes, no swizzle
    return kinds(descriptor + WGMMA.format(**given), GROUP)


def test_products_want_fence_commit_and_wait() -> None:
    assert product() == []
    assert product(first="add.s32 %r11, %r0, 1;") == ["wgmma fence"]
    assert product(wait="") == ["in flight"]
    assert "in flight" in product(commit="") and "open at exit" in product(commit="")


GLOBAL = """
ld.param.u64 %d0, [a]; ld.param.u64 %d1, [b]; mov.u32 %r10, %ctaid.x;
setp.ne.s32 %p4, %r10, 0; @%p4 bra READS;
st.global.b32 [%d0], 7; {store} [%d1], 1; bra END;
READS: {load} %r11, [%d1]; setp.eq.s32 %p5, %r11, 0; @%p5 bra READS;
ld.global.b32 %r12, [%d0]; END: mov.b32 %r7, 0;"""
TWO = Direct((2, 1, 1), (32, 1, 1))


def test_flags_in_global_memory_want_release_and_acquire() -> None:
    good = GLOBAL.format(store="st.release.gpu.global.b32", load="ld.acquire.gpu.global.b32")
    assert kinds(good, TWO) == []
    fenced = good.replace("st.release", "fence.acq_rel.gpu; st.relaxed")
    assert kinds(fenced, TWO) == []
    weak = GLOBAL.format(store="st.relaxed.gpu.global.b32", load="ld.acquire.gpu.global.b32")
    assert kinds(weak, TWO) == ["race"]
    relaxed = GLOBAL.format(store="st.release.gpu.global.b32", load="ld.relaxed.gpu.global.b32")
    assert kinds(relaxed, TWO) == ["race"]


HALF = """
mov.b32 %r5, 0; and.b32 %r6, %r0, 31; setp.lt.u32 %p3, %r6, 16; @!%p3 bra UPPER;
setp.lt.u32 %p4, %r6, {below}; vote.sync.all.pred %p5, %p4, {members}; selp.b32 %r5, 1, 0, %p5;
UPPER: bar.warp.sync -1; st.shared.b32 [%r4], %r5; ld.shared.b32 %r7, [%r4];
ld.param.u64 %d0, [b]; mul.wide.u32 %d1, %r0, 4; add.s64 %d0, %d0, %d1; st.global.b32 [%d0], %r7;"""


@pytest.mark.parametrize("below", [16, 15])
def test_half_a_warp_votes_by_its_member_mask(below: int) -> None:
    body = HALF.format(below=below, members="0xffff")
    assert kinds(body) == []
    text = kernel(START + body, shared=SHARED)
    for check in (False, True):
        out = torch.zeros(64, dtype=torch.int32)
        ptx_kernel(text, "k", TWO_WARPS, Options(check=check))(torch.zeros(64), out)
        expected = torch.tensor(([int(below == 16)] * 16 + [0] * 16) * 2, dtype=torch.int32)
        assert torch.equal(out, expected)


def test_member_masks_name_those_who_come() -> None:
    """The whole warp is waited for in vain by half of it, and half a mask takes no whole warp."""
    assert kinds(HALF.format(below=16, members="-1")) == ["deadlock"]
    assert kinds("vote.sync.all.pred %p5, %p1, 0xffff;")[-1] == "member mask"


def test_spinning_in_vain_is_reported() -> None:
    body = GLOBAL.format(store="st.release.gpu.global.b32", load="ld.acquire.gpu.global.b32")
    assert kinds(body.replace("[%d1], 1;", "[%d1], 0;"), TWO)[-1] == "livelock"


def test_a_turn_ends_where_a_poll_repeats() -> None:
    """The reader comes first, and may run 20,000 blocks in a turn."""
    body = GLOBAL.format(store="st.release.gpu.global.b32", load="ld.acquire.gpu.global.b32")
    text = kernel(START + body.replace("setp.ne.s32 %p4", "setp.eq.s32 %p4"), shared=SHARED)
    emulated = ptx_kernel(text, "k", TWO, Options(check=True, schedule="greedy"))
    emulated(torch.zeros(64), torch.zeros(64))
    assert emulated.run.findings == []
    assert emulated.run.instructions < 100 * 64


def test_threads_of_a_named_barrier_agree_on_their_count() -> None:
    body = "@%p2 bra A; bar.arrive 1, {}; bra END; A: bar.sync 1, {}; END: mov.b32 %r7, 0;"
    assert kinds(body.format(64, 64)) == []
    for counts in ((64, 96), (96, 64)):
        assert kinds(body.format(*counts)) == ["barrier"]


def test_an_mbarrier_of_a_cta_that_is_not_there() -> None:
    made = "@%p1 mbarrier.init.shared.b64 [%r9], {}; bar.sync 0; mapa.shared::cluster.u32 %r5, "
    made = BARRIER + made + "%r9, {}; mbarrier.arrive.shared::cluster.b64 _, [%r5];"
    assert kinds(made.format(64, 0)) == []
    (found,) = find(made.format(64, 1))
    assert found.kind == "out of bounds" and "CTA 1 of a cluster of 1" in found.text


def test_an_mbarrier_is_not_written_over() -> None:
    body = BARRIER + "@%p1 mbarrier.init.shared.b64 [%r9], 64; bar.sync 0; {} bar.sync 0;"
    body += "@%p1 st.shared.b32 [%r9+4], %r0;"
    assert kinds(body.format("@%p1 mbarrier.inval.shared.b64 [%r9];")) == []
    assert kinds(body.format("")) == ["barrier"]


def test_lanes_that_store_to_one_place_store_one_value() -> None:
    assert kinds("@%p2 st.shared.b32 [%r2], %r1;") == []
    assert kinds("@%p2 st.shared.b32 [%r2], %r0;") == ["race"]
    one = "ld.param.u64 %d0, [a]; @%p2 st.global.b32 [%d0], {};"
    assert kinds(one.format("%r1")) == [] and kinds(one.format("%r0")) == ["race"]


def test_a_shuffle_reads_lanes_that_execute_it() -> None:
    body = "setp.lt.u32 %p4, %r0, 16; @!%p4 bra END; shfl.sync.bfly.b32 %r5, %r0, {}, 31, 0xffff;"
    body += "END: mov.b32 %r7, 0;"
    one_warp = Direct()
    assert kinds(body.format(8), one_warp) == []
    (found,) = find(body.format(16), one_warp)
    assert found.kind == "member mask" and "lane 0 reads lane 16" in found.text


def test_products_that_were_waited_for_stay_so() -> None:
    commit = "wgmma.commit_group.sync.aligned;"
    second = "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%r11, %r12, %r13, %r14}, "
    second += "{%r21, %r22, %r23, %r24}, %d3, 1, 1, 1, 0;"
    wait = "wgmma.wait_group.sync.aligned 0; {} bar.sync 2, 128; st.shared.b32 [%r4], 0;"
    for more in ("", "wgmma.wait_group.sync.aligned 1;"):
        assert product(commit=commit + second + commit, wait=wait.format(more)) == []


def test_lanes_that_pass_a_wait_leave_it_to_the_others() -> None:
    """Lanes 16 to 31 pass at another mbarrier; their next wait is no wait for two phases."""
    body = """
@%p1 mbarrier.init.shared.b64 [%r9], 32; @%p1 mbarrier.init.shared.b64 [%r9+8], 32; bar.sync 0;
@!%p2 bra ARRIVES;
setp.ge.u32 %p4, %r0, 16; selp.b32 %r10, 1, 0, %p4; shl.b32 %r11, %r10, 3; add.s32 %r11, %r9, %r11;
FIRST: mbarrier.try_wait.parity.shared.b64 %p3, [%r11], %r10; @!%p3 bra FIRST;
bar.warp.sync -1; bar.sync 1, 64;
SECOND: mbarrier.try_wait.parity.shared.b64 %p3, [%r9], 1; @!%p3 bra SECOND; bra END;
ARRIVES: mov.b32 %r15, 500;
SLOW: sub.s32 %r15, %r15, 1; setp.gt.s32 %p5, %r15, 0; @%p5 bra SLOW;
ARRIVE bar.sync 1, 64; ARRIVE END: mov.b32 %r7, 0;"""
    assert kinds(BARRIER + body.replace("ARRIVE ", ARRIVE)) == []


def test_a_poll_of_an_mbarrier_is_no_wait_for_it() -> None:
    poll = "mbarrier.test_wait.parity.shared.b64 %p3, [%r9], {};"
    arrive = "@!%p2 " + ARRIVE + " bar.sync 1, 64;"
    body = BARRIER + "@%p1 mbarrier.init.shared.b64 [%r9], 32; bar.sync 0;" + poll.format(0)
    assert kinds(f"{body} bar.sync 2, 64; {arrive} {arrive} {poll.format(1)}") == []


def test_a_relaxed_wait_orders_nothing() -> None:
    body = PIPELINE.format(count=32, fence=FENCE, arrive=ARRIVE)
    for order, found in ((".acquire.cta", []), (".relaxed.cta", ["race"])):
        assert kinds(body.replace(".parity", ".parity" + order)) == found


def test_an_mbarrier_lies_in_shared_memory_of_its_own() -> None:
    init = "@%p1 mbarrier.init.shared.b64 [%r2+{}], 1;"
    for at, found in ((4088, []), (4092, ["out of bounds"]), (4, ["misaligned"])):
        assert kinds(init.format(at)) == found
    over = "setp.eq.s32 %p1, %r0, 32; @%p2 st.shared.b32 [%r4], %r0; {} " + init.format(64)
    assert kinds(over.format("bar.sync 0;")) == []
    assert kinds(over.format("")) == ["race"]
    assert kinds(over.format("bar.sync 0;") + "@%p1 ld.shared.b32 %r5, [%r2+64];") == ["unwritten"]


@pytest.mark.parametrize("wait", ["try_wait", "test_wait"])
@pytest.mark.parametrize("taken", ["", "selp.b32 %r10, 1, 0, %p3; and.b32 %r11, %r10, 1;"])
def test_a_wait_whose_answer_is_not_taken_orders_nothing(wait: str, taken: str) -> None:
    body = PIPELINE.format(count=32, fence=FENCE, arrive=ARRIVE)
    ignored = body.replace("@!%p3 bra LOOP;", taken).replace("try_wait", wait)
    for schedule in ("fair", "greedy", "random"):
        assert kinds(ignored, schedule=schedule)[-1] in ("race", "unwritten")
    if taken:
        heeded = body.replace("@!%p3", f"{taken} setp.ne.s32 %p4, %r11, 0; @!%p4")
        assert kinds(heeded) == []
