"""Copies, fences by scope, and atomics: what checks report, and what they let pass."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from mla_lab.emulate import Options
from mla_lab.emulate import kernel as emulated
from mla_lab.emulate.direct import Direct, ptx_kernel
from mla_lab.emulate.kernel import MOST_PROGRAMS, programs
from mla_lab.emulate.races import Checker

from .test_emulate_checks import BARRIER, COPY, GLOBAL, PAIR, SHARED, TWO, kinds
from .test_emulate_instructions import kernel


def test_copies_of_other_lanes_want_a_warp_barrier() -> None:
    """A thread waits for its own cp.async copies alone."""
    body = """
    ld.param.u64 %d0, [a]; mul.wide.u32 %d1, %r0, 4; add.s64 %d0, %d0, %d1;
    cp.async.ca.shared.global [%r4], [%d0], 4; cp.async.wait_all; {}
    xor.b32 %r5, %r4, {}; ld.shared.b32 %r6, [%r5];"""
    assert kinds(body.format("bar.warp.sync -1;", 4)) == []
    assert kinds(body.format("", 0)) == []
    assert kinds(body.format("", 4)) == ["race"]


@pytest.mark.parametrize(
    ("copy", "kind"),
    [
        ("cp.async.cg.shared.global [%r2], [%d0+16], 16;", None),
        ("cp.async.cg.shared.global [%r2], [%d0+4], 16;", "misaligned"),
        ("cp.async.cg.shared.global [%r2], [%d0], 16, 20;", "out of bounds"),
    ],
)
def test_sources_of_cp_async(copy: str, kind: str | None) -> None:
    body = f"@!%p1 bra END; ld.param.u64 %d0, [a]; {copy} cp.async.wait_all; END: mov.b32 %r7, 0;"
    assert kinds(body) == ([kind] if kind else [])


@pytest.mark.parametrize("group", ["x1", "x2", "x4"])
def test_rows_of_ldmatrix_want_a_warp_barrier(group: str) -> None:
    """A lane reads what others wrote, whichever lane names the row."""
    words = ", ".join(f"%r{10 + i}" for i in range(int(group[1])))
    body = "shl.b32 %r5, %r0, 4; add.s32 %r5, %r5, %r2; st.shared.v4.b32 [%r5], {{%r0, %r0, %r0, "
    body += (
        "%r0}}; {} xor.b32 %r5, %r5, 16; ldmatrix.sync.aligned.m8n8.{}.shared.b16 {{{}}}, [%r5];"
    )
    assert kinds(body.format("bar.warp.sync -1;", group, words), Direct()) == []
    assert kinds(body.format("", group, words), Direct()) == ["race"]


def test_cp_async_reads_what_was_written_before() -> None:
    body = """
    ld.param.u64 %d0, [a]; ld.param.u64 %d1, [b]; mov.u32 %r10, %ctaid.x; setp.ne.s32 %p4, %r10, 0;
    @%p4 bra READS; @%p1 st.global.b32 [%d0], 7; {} st.release.gpu.global.b32 [%d1], 1; bra END;
    READS: ld.acquire.gpu.global.b32 %r11, [%d1]; setp.eq.s32 %p5, %r11, 0; {}
    @%p1 cp.async.ca.shared.global [%r2], [%d0], 4; cp.async.wait_all; END: mov.b32 %r7, 0;"""
    assert kinds(body.format("bar.warp.sync -1;", "@%p5 bra READS;"), TWO) == []
    weak = body.replace("st.release.gpu", "st.relaxed.gpu").format("", "@%p5 bra READS;")
    assert kinds(weak, TWO) == ["race"]


@pytest.mark.parametrize(("sync", "found"), [("bar.warp.sync -1;", []), ("", ["race"])])
def test_a_lane_copies_what_its_warp_has_written_behind_a_warp_barrier(
    sync: str, found: list[str]
) -> None:
    writes = "st.shared.b32 [%r4], %r0; {fence} bar.sync 0;"
    body = COPY.replace(writes, "bar.sync 0; st.shared.b32 [%r4], %r0; {fence} {sync}")
    body = body.replace("256,", "128,").format(fence="fence.proxy.async;", sync=sync, expect=128)
    assert kinds(body, Direct()) == found


PEER_COPY = BARRIER + """
@%p1 mbarrier.init.shared.b64 [%r9], 1; fence.mbarrier_init.release.cluster;
st.shared.b32 [%r4], %r0; fence.proxy.async.shared::cta;
barrier.cluster.arrive; barrier.cluster.wait;
mov.u32 %r11, %cluster_ctarank; xor.b32 %r12, %r11, 1; add.s32 %r8, %r2, 1024;
mapa.shared::cluster.u32 %r13, %r8, %r12; mapa.shared::cluster.u32 %r14, %r9, {rank};
@!%p1 bra WAITS; mbarrier.arrive.expect_tx.shared.b64 _, [%r9], {nbytes}; {copy}
WAITS: LOOP: mbarrier.try_wait.parity.shared.b64 %p3, [%r9], 0; @!%p3 bra LOOP;
barrier.cluster.arrive; barrier.cluster.wait;"""  # fmt: skip
BULK = "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes"
BULK += " [%r13], [%r2], {nbytes}, [%r14];"
STORE = "st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%r13], %r0, [%r14];"


@pytest.mark.parametrize(("copy", "nbytes"), [(BULK, 64), (STORE, 4)])
def test_the_mbarrier_of_a_copy_lies_where_it_goes(copy: str, nbytes: int) -> None:
    body = PEER_COPY.replace("{copy}", copy)
    assert kinds(body.format(rank="%r12", nbytes=nbytes), PAIR) == []
    assert kinds(body.format(rank="%r11", nbytes=nbytes), PAIR) == ["barrier"]


def test_bulk_copies_have_multiples_of_16_bytes() -> None:
    body = PEER_COPY.replace("{copy}", BULK).format(rank="%r12", nbytes=60)
    assert kinds(body, PAIR) == ["misaligned"]


def test_a_proxy_fence_of_global_memory_shows_nothing_of_shared_memory() -> None:
    for fence, found in (("", []), (".shared::cta", []), (".global", ["proxy fence"])):
        assert kinds(COPY.format(fence=f"fence.proxy.async{fence};", expect=256)) == found


@pytest.mark.parametrize(
    ("fence", "launch", "found"),
    [
        ("fence.acq_rel.gpu", TWO, []),
        ("membar.gl", TWO, []),
        ("fence.acq_rel.cta", TWO, ["race"]),
        ("fence.sc.cta", TWO, ["race"]),
        ("membar.cta", TWO, ["race"]),
        ("fence.acq_rel.cluster", TWO, ["race"]),
        ("fence.acq_rel.cluster", PAIR, []),
    ],
)
def test_a_fence_orders_what_its_scope_reaches(
    fence: str, launch: Direct, found: list[str]
) -> None:
    stores = GLOBAL.format(
        store=f"{fence}; st.relaxed.gpu.global.b32", load="ld.acquire.gpu.global.b32"
    )
    assert kinds(stores, launch) == found
    loads = GLOBAL.format(store="st.release.gpu.global.b32", load="ld.relaxed.gpu.global.b32")
    loads = loads.replace("ld.global.b32 %r12", f"{fence}; ld.global.b32 %r12")
    assert kinds(loads, launch) == found


def test_both_words_of_an_atomic_of_64_bits_are_followed() -> None:
    body = """
    ld.param.u64 %d0, [a]; mov.u32 %r10, %ctaid.x; setp.ne.s32 %p4, %r10, 0; @%p4 bra READS;
    mov.b64 %d3, 5; atom.global.exch.b64 %d4, [%d0], %d3; bra END;
    READS: ld.global.b32 %r12, [%d0+{}]; END: mov.b32 %r7, 0;"""
    for at, found in ((0, ["race"]), (4, ["race"]), (8, [])):
        assert kinds(body.format(at), TWO) == found


@pytest.mark.parametrize(
    ("fence", "found"), [("fence.mbarrier_init.release.cluster;", []), ("", ["proxy fence"])]
)
def test_a_copy_wants_a_fence_behind_the_initialisation(fence: str, found: list[str]) -> None:
    body = COPY.replace("@%p1 mbarrier.init.shared.b64 [%r9], 1; bar.sync 0;", "")
    body = body.replace("{fence} bar.sync 0;", "{fence} bar.sync 0; {init} bar.sync 0;")
    init = f"@%p1 mbarrier.init.shared.b64 [%r9], 1; {fence}"
    assert kinds(body.format(fence="fence.proxy.async;", expect=256, init=init)) == found


@pytest.mark.parametrize("schedule", ["fair", "late"])
def test_cp_async_fills_with_zeros_behind_its_source(schedule: str) -> None:
    body = """
    mov.u32 %r0, %tid.x; shl.b32 %r1, %r0, 4; mov.u32 %r2, s; add.s32 %r2, %r2, %r1;
    mov.b32 %r3, -1; st.shared.v4.b32 [%r2], {%r3, %r3, %r3, %r3};
    mul.wide.u32 %d2, %r0, 16; ld.param.u64 %d0, [a]; add.s64 %d0, %d0, %d2;
    cp.async.cg.shared.global [%r2], [%d0], 16, 8; cp.async.wait_all;
    ld.shared.v4.b32 {%r4, %r5, %r6, %r7}, [%r2];
    ld.param.u64 %d1, [b]; add.s64 %d1, %d1, %d2;
    st.global.v4.b32 [%d1], {%r4, %r5, %r6, %r7};"""
    given = torch.arange(1, 129, dtype=torch.int32).view(32, 4)
    out = torch.empty_like(given)
    emulated = ptx_kernel(
        kernel(body, shared=SHARED), "k", Direct(), Options(check=True, schedule=schedule)
    )
    emulated(given, out)
    assert emulated.run.findings == []
    assert torch.equal(out, given * torch.tensor([1, 1, 0, 0], dtype=torch.int32))


def test_few_translations_are_kept() -> None:
    texts = [kernel(f"mov.b32 %r1, {i};") for i in range(MOST_PROGRAMS + 1)]
    first = weakref.ref(programs(texts[0])["k"])
    assert programs(texts[0])["k"] is first()
    for text in texts[1:]:
        programs(text)
    gc.collect()
    assert first() is None


def test_a_store_to_global_memory_is_ordered_behind_loads_of_the_word() -> None:
    """CTA 1, or both CTAs, load a word that CTA 0 stores, behind a flag or not."""
    body = """
ld.param.u64 %d0, [a]; ld.param.u64 %d1, [b]; mov.u32 %r10, %ctaid.x;
setp.ne.s32 %p4, %r10, 0; {both} @!%p4 bra WRITES;
ld.global.b32 %r12, [%d0]; {release} [%d1], 1; bra END;
WRITES: {acquire} %r11, [%d1]; setp.eq.s32 %p5, %r11, 0; @%p5 bra WRITES;
{store}.b32 [%d0], 7; END: mov.b32 %r7, 0;"""
    release, acquire = "st.release.gpu.global.b32", "ld.acquire.gpu.global.b32"
    for both in ("", "ld.global.b32 %r13, [%d0];"):
        for store in ("st.global", "st.relaxed.gpu.global", "atom.global.add"):
            given = {"both": both, "store": store.replace("atom", "red")}
            right = body.format(release=release, acquire=acquire, **given)
            wrong = body.format(release="st.relaxed.gpu.global.b32", acquire=acquire, **given)
            assert kinds(right.replace("add.b32", "add.u32"), TWO) == []
            assert kinds(wrong.replace("add.b32", "add.u32"), TWO) == ["race"]


@pytest.mark.parametrize("ends", ["", "mbarrier.arrive.shared.b64 _, [%r9];"])
def test_clocks_of_a_launch_end_with_it(monkeypatch: pytest.MonkeyPatch, ends: str) -> None:
    """Without the garbage collector, and where a fault ends the launch."""
    made: list[weakref.ref[Checker]] = []

    def noted(*options: bool) -> Checker:
        checker = Checker(*options)
        made.append(weakref.ref(checker))
        return checker

    monkeypatch.setattr(emulated, "Checker", noted)
    body = BARRIER + "@%p1 mbarrier.init.shared.b64 [%r9], 1; bar.sync 0;" + ends
    gc.disable()
    try:
        assert bool(kinds(body)) == bool(ends)
        assert [checker() for checker in made] == [None]
    finally:
        gc.enable()
