"""Profile events of a build with the option `stamps`: times of steps of CTAs and of KV tiles."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr

from ..common.ptx_sm90 import ptx
from .params import Config, Globals

#: events of a CTA, one row of int64 per CTA: nanoseconds of the global timer
CTA_EVENTS = (
    "start",
    "set up",
    "first P",
    "last PV",
    "partial written",
    "partials there",
    "end",
    "merge weights",
)
#: events of a KV tile of CTA 0 (stamps 2): SM clocks, the last one nanoseconds. The rows lie behind
#: those of the CTAs; row i is the tile with i more to come in its work tile (option pieces: in its
#: piece, and the last of a work tile's pieces stays; of "first P" too)
TILE_EVENTS = (
    "load: stage free",
    "load: issued",
    "QK issued",
    "QK done",
    "P stored",
    "PV begun",
    "PV done",
    "PV done, ns",
)
#: KV tiles that have a row
ROUNDS = 48


@cute.jit
def profile_event(cfg: cutlass.Constexpr[Config], g: Globals, event: cutlass.Constexpr[str]):
    """Record the time of one of `CTA_EVENTS`, by thread 0."""
    if const_expr(cfg.profile):
        tid, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        if tid == 0:
            g.profile[cta, CTA_EVENTS.index(event)] = Int64(cute.arch.globaltimer())


@cute.jit
def profile_tile(
    cfg: cutlass.Constexpr[Config], g: Globals, left: Int32, event: cutlass.Constexpr[str]
):
    """Record the time of one of `TILE_EVENTS` in CTA 0, for the tile with which `left` tiles remain
    in the work tile. Each warp of a role writes, the last one's time stays. One block of PTX,
    because the QK-softmax warp group has no registers for addresses."""
    if const_expr(cfg.profile == 2):
        word = TILE_EVENTS.index(event)
        now = cute.arch.globaltimer() if event == TILE_EVENTS[-1] else cute.arch.clock64()
        ptx(
            "{ .reg .pred p; .reg .b32 row; .reg .b64 to;"
            f"setp.eq.u32 p, {{$r2}}, 0; setp.le.and.s32 p, {{$r1}}, {ROUNDS}, p;"
            "add.u32 row, {$r3}, {$r1}; mad.wide.s32 to, row, 64, {$r0};"
            f"@p st.global.b64 [to + {8 * (word - len(TILE_EVENTS))}], {{$r4}}; }}",
            g.profile.iterator,
            left,
            cute.arch.block_idx()[0],
            cute.arch.grid_dim()[0],
            now,
        )
