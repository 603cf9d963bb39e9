"""Bugs as PTX of a dozen lines: what is at fault, and nothing else, as a kernel that runs here.

A model is run with all checks; line n of a finding is line n of the listing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..emulate import EmulatedKernel, Fault, Finding, Options
from ..emulate.direct import Direct, ptx_kernel

#: bytes of a model's shared memory, and where its mbarriers begin
SHARED, BARRIERS = 4096, 2048
START = f"""mov.u32 %r0, %tid.x; shr.u32 %r1, %r0, 5; mov.u32 %r2, s;   // thread, warp, memory
shl.b32 %r3, %r0, 2; and.b32 %r3, %r3, 127; add.s32 %r4, %r2, %r3; // a word for each lane
setp.eq.s32 %p1, %r0, 0; setp.eq.s32 %p2, %r1, 0; add.s32 %r9, %r2, {BARRIERS};"""
TWO_WARPS, TWO_CTAS = Direct(block=(64, 1, 1)), Direct((2, 1, 1), (32, 1, 1))
#: request offsets of two requests, with a third number behind them
Q_BEGIN = (0, 1, 2)


@dataclass(frozen=True)
class Model:
    """PTX with a bug, the same without it, and how both are launched."""

    broken: str
    mended: str
    launch: Direct = TWO_WARPS
    #: the bug in words, or where it has them
    sentence: str = "notebook 55"
    #: the first tensor of the bug is not initialised
    unwritten: bool = False


def listing(text: str) -> list[str]:
    """The lines of a model as its findings number them."""
    return f"{START}\n{text.strip()}\nret;".splitlines()


def module(
    lines: Sequence[str], params: Sequence[str], file: str, before: str = "", behind: str = ""
) -> str:
    """PTX of a kernel `k` with these pointers as parameters; `lines[n - 1]` is line n of `file`."""
    pointers = ", ".join(f".param .u64 {name}" for name in params)
    body = "\n".join(f".loc 1 {n} 0\n{line}" for n, line in enumerate(lines, 1))
    return f""".version 9.0\n.target sm_90a\n.address_size 64
.shared .align 128 .b8 s[{SHARED}];
.visible .entry k({pointers})
{{
.reg .pred %p<9>; .reg .b16 %h<9>; .reg .b32 %r<40>; .reg .b64 %d<12>;
{before}
{body}
{behind}
}}
.file 1 "{file}"
"""


def findings(kernel: EmulatedKernel, *args: Any) -> list[Finding]:
    """What the checks say of a call, and the fault that ended it."""
    try:
        kernel(*args)
    except Fault as fault:
        return [*kernel.run.findings, fault.finding]
    return kernel.run.findings


def run(text: str, model: Model, name: str) -> list[Finding]:
    """Findings of a model's text, of its checks and of the fault that ended it."""
    ptx = module(listing(text), "ab", f"{name}.ptx")
    kernel = ptx_kernel(ptx, "k", model.launch, Options(check=True))
    kernel.names = ("data", "q_begin")
    return findings(kernel, torch.zeros(64), torch.tensor(Q_BEGIN, dtype=torch.int32))


_WAIT = "{0}: mbarrier.try_wait.parity.shared.b64 %p3, [%r9+{1}], {2}; @!%p3 bra {0};"
_SLOW = "mov.b32 %r15, 500;\nSLOW: sub.s32 %r15, %r15, 1; setp.gt.s32 %p5, %r15, 0; @%p5 bra SLOW;"


def _init(*counts: int) -> str:
    parts = [f"@%p1 mbarrier.init.shared.b64 [%r9+{8 * i}], {n};" for i, n in enumerate(counts)]
    return "\n".join([*parts, "fence.mbarrier_init.release.cluster; bar.sync 0;"])


def _lapped(second: int) -> str:
    """Warp 0 announces two tiles, the second at barrier `second`; warp 1 waits for the first."""
    arrive = "mbarrier.arrive.shared.b64 _, [%r9+{}];"
    return f"""{_init(32, 32)}
@!%p2 bra READER;
{_SLOW}
{arrive.format(0)}  // the first tile's weights
bar.sync 1, 32;
{arrive.format(8 * second)}  // the second tile's
bra END;
READER: {_WAIT.format("W1", 0, 0)}
END:"""


def _exchange(buffers: int) -> str:
    """Two warps exchange their maxima, tile by tile, with one barrier a tile."""
    lines = []
    for tile in range(4):
        at = 256 * (tile % buffers)
        lines += [
            f"mov.u32 %r6, %tid.x; shl.b32 %r6, %r6, 2; add.s32 %r6, %r6, %r2; // tile {tile}",
            f"st.shared.b32 [%r6+{at}], %r0; xor.b32 %r7, %r6, 128;",
            "bar.sync 1, 64;",
            f"ld.shared.b32 %r8, [%r7+{at}];",
        ]
    return "\n".join(lines)


def _units(slots: int) -> str:
    """A ring of three stages whose unit lies in one of `slots` words, by the tile's number."""
    arrive = "mbarrier.arrive.shared.b64 _, [%r9+{}];"
    lines = [_init(*[32] * 6), "@!%p2 bra READER;"]
    for tile in range(5):
        stage, turn = tile % 3, tile // 3 % 2
        lines += [
            _WAIT.format(f"E{tile}", 24 + 8 * stage, 1 - turn),
            f"st.shared.b32 [%r4+{128 * (tile % slots)}], %r0;  // the unit of tile {tile}",
            arrive.format(8 * stage),
        ]
    lines.append("bra END;\nREADER: mov.b32 %r7, 0;")
    for tile in range(5):
        stage, turn = tile % 3, tile // 3 % 2
        lines += [
            _WAIT.format(f"F{tile}", 8 * stage, turn),
            f"ld.shared.b32 %r8, [%r4+{128 * (tile % slots)}];",
            arrive.format(24 + 8 * stage),
        ]
    return "\n".join([*lines, "END:"])


def _flag(order: str) -> str:
    """CTA 0 stores a partial and raises a flag; CTA 1 waits for the flag and reads."""
    return f"""ld.param.u64 %d0, [a]; add.s64 %d1, %d0, 128; mov.u32 %r10, %ctaid.x;
setp.ne.s32 %p4, %r10, 0; @%p4 bra READS;
st.global.b32 [%d0], 7;
st.{order}.gpu.global.b32 [%d1], 1;
bra END;
READS: ld.acquire.gpu.global.b32 %r11, [%d1]; setp.eq.s32 %p5, %r11, 0; @%p5 bra READS;
ld.global.b32 %r12, [%d0];
END:"""


def _next_item(guard: str) -> str:
    """The worker behind the last request looks for the next one that has rows."""
    return f"""ld.param.u64 %d0, [b]; mov.b32 %r10, 1;  // the last request of two
NEXT: add.s32 %r10, %r10, 1;
{guard}mul.wide.u32 %d1, %r10, 4; add.s64 %d2, %d0, %d1;
ld.global.b32 %r11, [%d2+4];
setp.le.s32 %p5, %r11, 0; @%p5 bra NEXT;
END:"""


MODELS = {
    "a phase lapped": Model(_lapped(0), _lapped(1)),
    "one buffer, one barrier a tile": Model(_exchange(1), _exchange(2)),
    "a unit outside its stage": Model(_units(2), _units(3)),
    "a flag before its data": Model(_flag("relaxed"), _flag("release"), TWO_CTAS),
    "a worker behind the last item": Model(
        _next_item(""), _next_item("setp.ge.s32 %p4, %r10, 2; @%p4 bra END; ")
    ),
}
