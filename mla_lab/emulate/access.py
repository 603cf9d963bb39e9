"""Loads, stores and atomics of threads, on shared and global memory."""

from __future__ import annotations

from typing import Any

import numpy as np

from .arithmetic import some
from .findings import fault
from .gang import Gang, Mask
from .memory import BASE, RESERVED
from .parts import CtaLike
from .shadow import expand

#: bytes that a discard names
LINE = 128
#: of a shared address, the offset in its CTA
_OFFSET = 0xFFFFFF
BITWISE = {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}

Row = np.ndarray


def places(
    g: Gang, address: Row, nbytes: int, m: Mask, pc: int
) -> tuple[CtaLike, Row, Row | slice]:
    """The CTA whose shared memory is meant, offsets of the active threads, and which they are."""
    active: Row | slice = slice(None) if m is True else m.nonzero()[0]
    at = address[active].astype(np.int64)
    cta = g.cta
    if len(cta.peers) > 1:
        ranks = at >> 24
        if some(ranks != cta.rank):
            if some(ranks != ranks[0]) or ranks[0] >= len(cta.peers):
                raise fault(g, pc, "out of bounds", f"shared memory of CTAs {set(ranks.tolist())}")
            cta = cta.peers[int(ranks[0])]
    offset = at & _OFFSET if len(cta.peers) > 1 else at
    if g.machine.checker:
        _check_shared(g, cta, offset, nbytes, pc)
    return cta, offset, active


def _check_shared(g: Gang, cta: CtaLike, offset: Row, nbytes: int, pc: int) -> None:
    if not len(offset):
        return
    least, most = int(np.minimum.reduce(offset)), int(np.maximum.reduce(offset))
    if least < RESERVED or most + nbytes > cta.shared.size:
        wrong = (offset < RESERVED) | (offset + nbytes > cta.shared.size)
        at = int(offset[wrong][0]) - RESERVED
        text = f"{nbytes} bytes at byte {at} of {cta.shared.size - RESERVED} of shared memory"
        raise fault(g, pc, "out of bounds", text)
    if int(np.bitwise_or.reduce(offset)) & nbytes - 1:
        raise fault(g, pc, "misaligned", f"{nbytes} bytes of shared memory at {int(offset[0]):#x}")


def by_peer(g: Gang, address: Row, m: Mask) -> list[Mask]:
    """The mask, in parts that mean one CTA each."""
    if len(g.cta.peers) == 1:
        return [m]
    ranks = address >> (24 if address.itemsize == 4 else np.uint64(24))
    if m is True and not some(ranks != g.cta.rank):
        return [m]
    every = np.ones(g.n, bool) if m is True else m
    return [every & (ranks == rank) for rank in np.unique(ranks[every])]


def _one_value(g: Gang, offset: Row, values: list[Row], active: Row | slice, pc: int) -> None:
    """Lanes that store to one place in one instruction store one value: which of several stays is
    undefined."""
    if not g.machine.checker or len(set(offset.tolist())) == len(offset):
        return
    for row in values:
        held: dict[int, int] = {}
        for at, value in zip(offset.tolist(), row[active].tolist(), strict=True):
            if held.setdefault(at, value) != value:
                text = "lanes of one instruction store different values to one place"
                g.machine.checker.note(g, pc, "race", text)
                return


def ld_shared(g: Gang, out: list[Row], address: Row, nbytes: int, m: Mask, pc: int) -> None:
    """ld.shared of `len(out)` words of `nbytes` bytes."""
    for part in by_peer(g, address, m):
        cta, offset, active = places(g, address, nbytes * len(out), part, pc)
        g.machine.checker.read(g, cta, (offset, nbytes * len(out)), active, pc)
        memory, index = cta.shared.views[nbytes], offset // nbytes
        for i, row in enumerate(out):
            row[active] = memory[index + i] if i else memory[index]


def st_shared(g: Gang, address: Row, values: list[Row], nbytes: int, m: Mask, pc: int) -> None:
    """st.shared of words of `nbytes` bytes."""
    for part in by_peer(g, address, m):
        cta, offset, active = places(g, address, nbytes * len(values), part, pc)
        g.machine.checker.write(g, cta, (offset, nbytes * len(values)), active, pc)
        _one_value(g, offset, values, active, pc)
        memory, index = cta.shared.views[nbytes], offset // nbytes
        for i, row in enumerate(values):
            memory[index + i] = row[active]
    g.machine.progress += 1


def _matrix_rows(g: Gang, address: Row, count: int, m: Mask, pc: int) -> tuple[Row, Row]:
    """Offsets that the threads name, and those of all rows of `count` matrices."""
    named = g.lane < 8 * count
    named = named if m is True else named & m
    _, found, _ = places(g, address, 16, named, pc)
    offset = np.zeros(g.n, np.int64)
    offset[named] = found
    return offset, found


def ldmatrix(g: Gang, out: list[Row], address: Row, trans: bool, m: Mask, pc: int) -> None:
    """ldmatrix.m8n8: matrix i has its eight row addresses in threads 8 i to 8 i + 7."""
    offset, rows = _matrix_rows(g, address, len(out), m, pc)
    g.machine.checker.read(g, g.cta, (rows, 16), slice(None), pc)
    views, lane = g.cta.shared.views, g.lane
    for i, row in enumerate(out):
        first = g.warp_begin + 8 * i
        if trans:
            line = first + 2 * (lane % 4)
            low = views[2][offset[line] + 2 * (lane // 4) >> 1].astype(np.uint32)
            high = views[2][offset[line + 1] + 2 * (lane // 4) >> 1].astype(np.uint32)
            value = low | high << np.uint32(16)
        else:
            value = views[4][offset[first + lane // 4] + 4 * (lane % 4) >> 2]
        np.copyto(row, value, where=m)


def stmatrix(g: Gang, address: Row, values: list[Row], trans: bool, m: Mask, pc: int) -> None:
    """stmatrix.m8n8, the inverse of `ldmatrix`."""
    offset, rows = _matrix_rows(g, address, len(values), m, pc)
    g.machine.checker.write(g, g.cta, (rows, 16), slice(None), pc)
    views, lane = g.cta.shared.views, g.lane
    active: Any = slice(None) if m is True else m.nonzero()[0]
    for i, row in enumerate(values):
        first = g.warp_begin + 8 * i
        if trans:
            line = first + 2 * (lane % 4)
            low, high = offset[line] + 2 * (lane // 4) >> 1, offset[line + 1] + 2 * (lane // 4) >> 1
            views[2][low[active]] = (row & np.uint32(0xFFFF))[active]
            views[2][high[active]] = (row >> np.uint32(16))[active]
        else:
            views[4][(offset[first + lane // 4] + 4 * (lane % 4) >> 2)[active]] = row[active]
    g.machine.progress += 1


def _global(g: Gang, address: Row, nbytes: int, m: Mask, pc: int) -> tuple[Row, Row | slice]:
    """Offsets of the active threads in device memory, checked against its allocations."""
    memory = g.machine.memory
    active: Row | slice = slice(None) if m is True else m.nonzero()[0]
    offset = address[active].view(np.int64) - BASE
    if len(offset) == 0:
        return offset, active
    inside = int(offset.view(np.uint64).max()) <= memory.bytes.size - nbytes
    if not inside or not _allocated(memory.valid, offset, nbytes):
        wrong = (offset < 0) | (offset + nbytes > memory.bytes.size)
        if inside:
            wrong = ~(memory.valid[offset >> 2] & memory.valid[offset + nbytes - 1 >> 2])
        text = f"{nbytes} bytes of global memory at {memory.describe(int(offset[wrong][0]) + BASE)}"
        raise fault(g, pc, "out of bounds", text)
    if int(np.bitwise_or.reduce(offset)) & nbytes - 1:
        at = int(offset[(offset & nbytes - 1) != 0][0]) + BASE
        raise fault(g, pc, "misaligned", f"{nbytes} bytes of global memory at {at:#x}")
    return offset, active


def _allocated(valid: Row, offset: Row, nbytes: int) -> bool:
    """Whether the first and the last of `nbytes` at each offset belong to an allocation."""
    if 0 in valid[offset >> 2].tobytes():
        return False
    return 0 not in valid[offset + (nbytes - 1) >> 2].tobytes()


def ld_global(
    g: Gang, out: list[Row], address: Row, nbytes: int, m: Mask, where: tuple[int, str]
) -> None:
    """ld.global; `where` is the instruction and its memory order."""
    offset, active = _global(g, address, nbytes * len(out), m, where[0])
    g.machine.checker.globals.read(g, offset, nbytes * len(out), where)
    memory, index = g.machine.memory.views[nbytes], offset >> nbytes.bit_length() - 1
    for i, row in enumerate(out):
        row[active] = memory[index + i]


def st_global(
    g: Gang, address: Row, values: list[Row], nbytes: int, m: Mask, where: tuple[int, str]
) -> None:
    """st.global; `where` is the instruction and its memory order."""
    offset, active = _global(g, address, nbytes * len(values), m, where[0])
    g.machine.checker.globals.write(g, offset, nbytes * len(values), where)
    _one_value(g, offset, values, active, where[0])
    memory, index = g.machine.memory.views[nbytes], offset >> nbytes.bit_length() - 1
    for i, row in enumerate(values):
        memory[index + i] = row[active]
    g.machine.progress += 1


def discard(g: Gang, address: Row, m: Mask, pc: int) -> None:
    """discard.global: a line of L2 that need not be written to memory. What a later load of it
    gives is undefined; here all bits are set, which is NaN in every format."""
    offset, _ = _global(g, address, LINE, m, pc)
    g.machine.checker.globals.write(g, offset, LINE, (pc, "weak"))
    g.machine.memory.views[4][expand(offset, LINE)] = ~np.uint32(0)
    g.machine.progress += 1


def _updated(op: str, old: Any, value: Any, other: Any) -> Any:
    """What an atomic leaves; `other` is the second operand of cas."""
    if op == "inc":
        return 0 if old >= value else old + 1
    if op == "dec":
        return value if old == 0 or old > value else old - 1
    if op == "cas":
        return other if old == value else old
    if op == "exch":
        return value
    if op in ("min", "max"):
        return min(old, value) if op == "min" else max(old, value)
    return BITWISE.get(op, np.add)(old, value)


def atom(
    g: Gang,
    out: Row | None,
    address: Row,
    values: list[Row],
    op: str,
    m: Mask,
    where: tuple[int, str],
) -> None:
    """atom and red on global memory, thread by thread."""
    offset, _ = _global(g, address, values[0].itemsize, m, where[0])
    g.machine.checker.globals.atomic(g, offset, values[0].itemsize, where)
    memory = g.machine.memory.views[values[0].itemsize].view(values[0].dtype)
    threads = g.threads if m is True else m.nonzero()[0]
    for thread, at in zip(threads, offset // values[0].itemsize, strict=True):
        old = memory[at]
        second = values[1][thread] if len(values) > 1 else None
        memory[at] = _updated(op, old, values[0][thread], second)
        # who waits for a lock changes nothing
        g.machine.progress += int(memory[at] != old)
        if out is not None:
            out[thread] = old
