"""Bugs of memory and barriers as models of a few lines, planted and mended; see `planted`."""

from __future__ import annotations

from ..emulate.direct import Direct
from .museum_models import TWO_WARPS, Model

PAIR = Direct((2, 1, 1), (32, 1, 1), (2, 1, 1))
CLUSTER = "barrier.cluster.arrive; barrier.cluster.wait;"
#: a word for each thread of two warps
OWN = "mov.u32 %r5, %tid.x; shl.b32 %r5, %r5, 2; add.s32 %r6, %r2, %r5; xor.b32 %r7, %r6, 128;"


def _pair(sentence: str, text: str, broken: str, mended: str, launch: Direct = TWO_WARPS) -> Model:
    return Model(text.format(broken), text.format(mended), launch, sentence)


_GLOBAL = """ld.param.u64 %d0, [a]; mul.wide.u32 %d1, %r0, 4; add.s64 %d2, %d0, %d1;
{}"""
_PEER = f"""mov.u32 %r11, %cluster_ctarank; setp.eq.s32 %p4, %r11, 0;
st.shared.b32 [%r4], %r0; {CLUSTER}
@%p4 bra NEAR;
bra GONE;
NEAR: mov.b32 %r15, 4000;
SLOW: sub.s32 %r15, %r15, 1; nanosleep.u32 20; setp.gt.s32 %p5, %r15, 0; @%p5 bra SLOW;
mapa.shared::cluster.u32 %r10, %r4, 1;
ld.shared::cluster.b32 %r12, [%r10];
GONE: {{}}"""
_EXCHANGE = f"""mov.u32 %r11, %cluster_ctarank; xor.b32 %r12, %r11, 1;
mapa.shared::cluster.u32 %r10, %r4, %r12; {CLUSTER}
st.shared::cluster.b32 [%r10], %r0;
{{}}
ld.shared.b32 %r8, [%r4];
{CLUSTER}"""
_WAIT = """@%p1 mbarrier.init.shared.b64 [%r9], {};
fence.mbarrier_init.release.cluster; bar.sync 0;
@!%p2 bra READER;
st.shared.b32 [%r4], %r0;
mbarrier.arrive.shared.b64 _, [%r9];
bra END;
READER: mbarrier.try_wait.parity.shared.b64 %p3, [%r9], 0; @!%p3 bra READER;
ld.shared.b32 %r8, [%r4];
END:"""
MORE = {
    "no barrier between warps": _pair(
        "Two warps exchange words of shared memory, and no barrier stands between.",
        OWN + "\nst.shared.b32 [%r6], %r0;\n{}\nld.shared.b32 %r8, [%r7];",
        "",
        "bar.sync 1, 64;",
    ),
    "no barrier inside a warp": _pair(
        "Lanes of a warp exchange words of shared memory, and no bar.warp.sync stands between.",
        OWN + "\nxor.b32 %r7, %r6, 4; st.shared.b32 [%r6], %r0;\n{}\nld.shared.b32 %r8, [%r7];",
        "",
        "bar.warp.sync -1;",
    ),
    "a store behind shared memory": _pair(
        "A thread stores behind the last byte of shared memory.",
        OWN + "\nst.shared.b32 [%r6+{}], %r0;",
        "4096",
        "1024",
    ),
    "a misaligned load": _pair(
        "Eight bytes are loaded from an address that is a multiple of four.",
        "shr.u32 %r5, %r0, 2; ld.param.u64 %d0, [a]; mul.wide.u32 %d1, %r5, 8;\n"
        "add.s64 %d2, %d0, %d1;\nld.global.b64 %d3, [%d2+{}]; mov.b64 {{%r8, %r12}}, %d3;\n"
        "add.s32 %r39, %r8, %r12;",
        "4",
        "0",
    ),
    "shared memory that nobody wrote": _pair(
        "A word of shared memory is read before any store.",
        OWN + "\n{}\nld.shared.b32 %r8, [%r6];",
        "",
        "st.shared.b32 [%r6], %r0;",
    ),
    "global memory that nobody wrote": Model(
        _GLOBAL.format("ld.global.b32 %r8, [%d2];"),
        _GLOBAL.format("ld.global.b32 %r8, [%d2];"),
        sentence="A word of global memory is read that neither host nor kernel wrote.",
        unwritten=True,
    ),
    "a barrier of fewer threads": _pair(
        "A barrier counts 96 threads, and 64 come.", "bar.sync 1, {};", "96", "64"
    ),
    "half a warp at an aligned barrier": _pair(
        "Lanes of a warp part, and meet at two different aligned barriers of the CTA.",
        OWN + " and.b32 %r5, %r0, 16; setp.eq.s32 %p4, %r5, 0;\n{}\n"
        "HALF: st.shared.b32 [%r6], %r0;",
        "@%p4 bra LOW;\nbar.sync 1, 64;\nbra HALF;\nLOW: bar.sync 2, 64;",
        "bar.sync 1, 64;",
    ),
    "an mbarrier that waits for one more": _pair(
        "An mbarrier expects 33 arrivals, and 32 come.", _WAIT, "33", "32"
    ),
    "no cluster barrier": _pair(
        "CTAs of a pair exchange words of shared memory, and no cluster barrier stands between.",
        _EXCHANGE,
        "",
        CLUSTER,
        PAIR,
    ),
    "a peer that has exited": _pair(
        "A CTA reads the shared memory of its peer, which does not wait for it and exits.",
        _PEER,
        "",
        CLUSTER,
        PAIR,
    ),
}
