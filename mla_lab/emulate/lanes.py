"""Operations across the threads of a warp, and mma.sync."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from .findings import fault
from .gang import Gang, Mask, member_lanes
from .tiles import a_fragment, accumulator, accumulator_registers, b_fragment
from .writer import ALL_LANES

Row = np.ndarray


def shfl(
    g: Gang,
    out: Row,
    valid: Row | None,
    operands: tuple[Row, Row, Row],
    mode: str,
    m: Mask,
    pc: int,
) -> None:
    """shfl.sync: thread l reads a of another thread of its warp; c holds segment and clamp."""
    a, b, c = operands
    source, inside = _sources(mode, g.n, b.astype(np.int64).tobytes(), c.astype(np.int64).tobytes())
    if m is not True and g.machine.checker:
        absent = (m & ~m[source]).nonzero()[0]
        if len(absent):
            reader, other = absent[0] % 32, source[absent[0]] % 32
            text = f"lane {reader} reads lane {other}, which does not execute it"
            g.machine.checker.note(g, pc, "member mask", text)
    np.copyto(out, a[source], where=m)
    if valid is not None:
        np.copyto(valid, inside, where=m)


@lru_cache(maxsize=512)
def _sources(mode: str, n: int, b: bytes, c: bytes) -> tuple[Row, Row]:
    """Thread that each of `n` threads reads, and whether that is inside its segment."""
    lane, other = np.arange(n) % 32, np.frombuffer(b, np.int64) & 31
    limits = np.frombuffer(c, np.int64)
    clamp, segment = limits & 31, limits >> 8 & 31
    least = lane & segment
    most = least | clamp & ~segment
    if mode == "idx":
        source = least | other & ~segment
    elif mode == "bfly":
        source = lane ^ other
    else:
        source = lane + other if mode == "down" else lane - other
    inside = source >= most if mode == "up" else source <= most
    return np.arange(n) - lane + np.where(inside, source, lane), inside


def _live(g: Gang, members: int = ALL_LANES) -> Row:
    """Live threads of a member mask, warp by warp."""
    every = np.ones(g.n, bool) if g.live is True else g.live
    return every.reshape(-1, 32) & member_lanes(members)


def only_members(g: Gang, members: int, m: Mask, pc: int) -> None:
    """Raises Fault where a thread executes an instruction whose member mask it is not in."""
    every = np.ones(g.n, bool) if m is True else m
    others = (every & ~member_lanes(members)[g.lane]).nonzero()[0]
    if len(others):
        text = f"lane {others[0] % 32} executes it, and is not in the member mask {members:#x}"
        raise fault(g, pc, "member mask", text)


def every_member(g: Gang, members: int, m: Mask, pc: int) -> None:
    """Raises Fault where a guard keeps a lane of a member mask from what its warp executes."""
    if m is not True:
        by_warp = m.reshape(-1, 32)
        kept = (_live(g, members) & ~by_warp & by_warp.any(1)[:, None]).reshape(-1).nonzero()[0]
        if len(kept):
            text = f"lane {kept[0] % 32} of the member mask {members:#x} does not execute it"
            raise fault(g, pc, "member mask", text)


def vote(g: Gang, out: Row, flags: Row, mode: str, members: int, m: Mask) -> None:
    """vote.sync.any, .all, .ballot."""
    by_warp = (flags if flags.size == g.n else np.repeat(flags, g.n)).reshape(-1, 32)
    live = _live(g, members)
    if mode == "any":
        result: Any = (by_warp & live).any(1)
    elif mode == "all":
        result = (by_warp | ~live).all(1)
    else:
        bits = (by_warp & live).astype(np.uint32) << np.arange(32, dtype=np.uint32)
        result = bits.sum(1, dtype=np.uint32)
    np.copyto(out, np.repeat(result, 32), where=m)


def elect(g: Gang, leader: Row | None, elected: Row, members: int, m: Mask) -> None:
    """elect.sync: the lowest live thread of the member mask, in each warp."""
    first = _live(g, members).argmax(1)
    np.copyto(elected, g.lane == np.repeat(first, 32), where=m)
    if leader is not None:
        np.copyto(leader, np.repeat(first, 32).astype(np.uint32), where=m)


def redux(g: Gang, out: Row, a: Row, function: Any, members: int, m: Mask) -> None:
    """redux.sync over the threads of the member mask, in each warp."""
    live = _live(g, members)
    if g.live is True:
        result = function.reduce(a.reshape(-1, 32)[:, live[0]], axis=1)
    else:  # threads that have exited take no part
        rows = zip(a.reshape(-1, 32), live, strict=True)
        found = [function.reduce(row[lanes]) if lanes.any() else 0 for row, lanes in rows]
        result = np.array(found)
    np.copyto(out, np.repeat(result, 32).astype(out.dtype), where=m)


def movmatrix(g: Gang, out: Row, a: Row, m: Mask) -> None:
    """An 8 x 8 matrix of 16-bit elements, transposed among the threads of a warp."""
    lane, result = g.lane, np.zeros(g.n, np.uint32)
    for element in (0, 1):
        source = (2 * (lane % 4) + element) * 4 + lane // 8
        half = a[g.warp_begin + source] >> (16 * (lane // 4 % 2)).astype(np.uint32)
        result |= (half & np.uint32(0xFFFF)) << np.uint32(16 * element)
    np.copyto(out, result, where=m)


def mma(
    g: Gang, d: list[Row], a: list[Row], b: list[Row], c: list[Row], kind: str, m: Mask
) -> None:
    """mma.sync.m16n8: one matrix a warp."""
    warps = g.n // 32
    left = a_fragment(np.stack(a), kind).reshape(warps, 16, -1).astype(np.float64)
    right = b_fragment(np.stack(b), kind).astype(np.float64)
    added = accumulator(np.stack(c)).reshape(warps, 16, 8)
    product = (left @ right.transpose(0, 2, 1) + added).astype(np.float32)
    for row, value in zip(d, accumulator_registers(product.reshape(-1, 8)), strict=True):
        np.copyto(row, value, where=m)
