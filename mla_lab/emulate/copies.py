"""Copies that run on their own: TMA, copies between CTAs, st.async, cp.async.

Each is checked when it is issued. Its bytes land at once, or, under a late schedule, when nobody
can go on without them.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from ..core.gpu import MAX_CLUSTER
from .barriers import Mbarrier, count_arrivals, each_address, located, mbarrier_at
from .findings import fault
from .gang import Gang, Mask, lanes_of
from .memory import BASE, RESERVED, GlobalMemory
from .parts import CtaLike
from .tensor_map import TensorMap

Row = np.ndarray


def _map_at(g: Gang, address: int, pc: int) -> TensorMap:
    machine, offset = g.machine, address - BASE
    found = machine.maps.get(offset)
    if found is None:
        if offset % 64 or not 0 <= offset <= machine.memory.bytes.size - 128:
            raise fault(g, pc, "misaligned", f"a tensor map at {address:#x}")
        raw = machine.memory.bytes[offset : offset + 128].tobytes()
        found = machine.maps[offset] = TensorMap(raw)
    return found


def _check_target(g: Gang, cta: CtaLike, offset: int, nbytes: int, align: int, pc: int) -> None:
    if offset < RESERVED or offset + nbytes > cta.shared.size:
        at, size = offset - RESERVED, cta.shared.size - RESERVED
        raise fault(g, pc, "out of bounds", f"{nbytes} bytes at byte {at} of {size} shared ones")
    if offset % align:
        raise fault(g, pc, "misaligned", f"a copy to shared memory at {offset:#x}, not {align}")


def _check_barrier(g: Gang, cta: CtaLike, bar: Mbarrier, pc: int) -> None:
    if bar.cta is not cta:
        text = f"{bar.name} counts the bytes of a copy to shared memory of CTA {cta.name}"
        raise fault(g, pc, "barrier", text)


def tensor_copy(
    g: Gang, address: Row, where: list[Row], to: tuple[Row, Row, Row | None, bool], m: Mask, pc: int
) -> None:
    """cp.async.bulk.tensor from global memory at element coordinates `where`.

    to: shared address, mbarrier, the mask of CTAs that receive it, None for the address's alone,
    and whether one mbarrier of each pair of CTAs counts for both.
    """
    target, bar, cast, pair = to
    for thread in lanes_of(g, m):
        tensor = _map_at(g, int(address[thread]), pc)
        places = [int(row[thread]) for row in where]
        own, offset = located(g, int(target[thread]), pc)
        _, bar_offset = located(g, int(bar[thread]), pc)
        if cast is None:
            receivers = [(own, mbarrier_at(g, int(bar[thread]), pc))]
            if not pair:
                _check_barrier(g, *receivers[0], pc)
        else:
            ranks = [r for r in range(MAX_CLUSTER) if int(cast[thread]) >> r & 1]
            leads = [r & ~1 | int(bar[thread]) >> 24 & 1 if pair else r for r in ranks]
            found = [
                (r, mbarrier_at(g, lead << 24 | bar_offset, pc))
                for r, lead in zip(ranks, leads, strict=True)
            ]
            receivers = [(g.cta.peers[r], b) for r, b in found]
        _, wrong = tensor.read(g.machine.memory, places)
        if wrong >= 0:
            text = f"box at {places}: global memory at {g.machine.memory.describe(wrong)}"
            raise fault(g, pc, "out of bounds", text)
        for cta, barrier in receivers:
            _check_target(g, cta, offset, tensor.nbytes, 128, pc)
            words = slice(offset >> 2, offset + tensor.nbytes >> 2)
            g.machine.checker.copy_in(g, cta, words, barrier, pc)
            g.machine.recorder.copy(g, cta, barrier, tensor.nbytes, pc)
        g.machine.copied_bytes += tensor.nbytes * len(receivers)
        g.machine.later(partial(_land, g.machine.memory, tensor, places, offset, receivers))


def _land(
    memory: GlobalMemory,
    tensor: TensorMap,
    places: list[int],
    offset: int,
    receivers: list[tuple[CtaLike, Mbarrier]],
) -> None:
    """Finish a tensor copy."""
    data, _ = tensor.read(memory, places)
    for cta, bar in receivers:
        tensor.write(cta.shared, offset, data)
        bar.complete_bytes(data.size)


def bulk_to_peer(
    g: Gang, target: Row, source: Row, nbytes: Row, bar: Row, m: Mask, pc: int
) -> None:
    """cp.async.bulk from this CTA's shared memory to that of another of the cluster."""
    for thread in lanes_of(g, m):
        n = int(nbytes[thread])
        cta, offset = located(g, int(target[thread]), pc)
        own, start = located(g, int(source[thread]), pc)
        barrier = mbarrier_at(g, int(bar[thread]), pc)
        _check_target(g, cta, offset, n, 16, pc)
        _check_target(g, own, start, n, 16, pc)
        _check_barrier(g, cta, barrier, pc)
        if n % 16:
            raise fault(g, pc, "misaligned", f"a copy of {n} bytes, not of a multiple of 16")
        g.machine.checker.alone(g, own, slice(start >> 2, start + n >> 2), int(g.lane[thread]), pc)
        g.machine.checker.copy_out(g, own, slice(start >> 2, start + n >> 2), barrier, pc)
        g.machine.checker.copy_in(g, cta, slice(offset >> 2, offset + n >> 2), barrier, pc)
        g.machine.recorder.copy(g, cta, barrier, n, pc)
        g.machine.copied_bytes += n

        def land(cta: CtaLike = cta, to: int = offset, own: CtaLike = own, at: int = start) -> None:
            cta.shared.bytes[to : to + n] = own.shared.bytes[at : at + n]  # noqa: B023
            barrier.complete_bytes(n)  # noqa: B023

        g.machine.later(land)


def st_async(g: Gang, target: Row, values: list[Row], bar: Row, m: Mask, pc: int) -> None:
    """st.async of 32-bit words to shared memory of the cluster."""
    done: dict[int, tuple[Mbarrier, int]] = {}
    for thread in lanes_of(g, m):
        cta, offset = located(g, int(target[thread]), pc)
        barrier = mbarrier_at(g, int(bar[thread]), pc)
        _check_target(g, cta, offset, 4 * len(values), 4 * len(values), pc)
        _check_barrier(g, cta, barrier, pc)
        words = slice(offset >> 2, (offset >> 2) + len(values))
        g.machine.checker.copy_in(g, cta, words, barrier, pc, generic=True)
        for i, row in enumerate(values):
            cta.shared.views[4][(offset >> 2) + i] = row[thread]
        barrier, nbytes = done.get(id(barrier), (barrier, 0))
        done[id(barrier)] = barrier, nbytes + 4 * len(values)
    for barrier, nbytes in done.values():
        g.machine.later(lambda b=barrier, n=nbytes: b.complete_bytes(n))  # type: ignore[misc]


def cp_async(g: Gang, target: Row, source: Row, n: int, have: Row | None, m: Mask, pc: int) -> None:
    """cp.async: `n` bytes a thread, of which the first `have` come from memory, zeros after."""
    memory, threads = g.machine.memory, lanes_of(g, m)
    counts = np.full(g.n, n) if have is None else have.astype(np.int64)
    start, offset = source.view(np.int64) - BASE, (target & 0xFFFFFF).astype(np.int64)
    for thread in threads:
        at, count = int(start[thread]), int(counts[thread])
        _check_target(g, g.cta, int(offset[thread]), n, n, pc)
        if count and at % n:
            raise fault(g, pc, "misaligned", f"{n} bytes of global memory at {at + BASE:#x}")
        if not 0 <= count <= n:
            raise fault(g, pc, "out of bounds", f"{count} bytes of a copy of {n}")
        inside = at >= 0 and at + count <= memory.bytes.size
        if count and not (inside and memory.valid[at >> 2 : (at + count + 3) >> 2].all()):
            text = f"{count} bytes of global memory at {memory.describe(at + BASE)}"
            raise fault(g, pc, "out of bounds", text)
    for count in np.unique(counts[threads]).tolist():
        if g.machine.checker and count:
            same = threads[counts[threads] == count]
            g.machine.checker.globals.read(g, start[same], count + 3 & ~3, (pc, "weak"))
    g.machine.checker.cp_async(g, offset[threads], n, (pc, g.lane[threads]))
    shared = g.cta.shared.bytes
    g.machine.copied_bytes += n * len(threads)

    def land() -> None:
        for thread in threads:
            at, to, count = int(start[thread]), int(offset[thread]), int(counts[thread])
            shared[to : to + count] = memory.bytes[at : at + count]
            shared[to + count : to + n] = 0

    if g.machine.late:
        g.copies.append(land)
    else:
        land()


def cp_async_commit(g: Gang) -> None:
    """cp.async.commit_group"""
    g.copy_groups.append(g.copies)
    g.copies = []
    g.machine.checker.cp_commit(g)


def cp_async_wait(g: Gang, left: int) -> None:
    """cp.async.wait_group: all but the last `left` groups have landed."""
    for group in g.copy_groups[: max(0, len(g.copy_groups) - left)]:
        for land in group:
            land()
        group.clear()
    g.machine.checker.cp_wait(g, left)


def cp_async_arrive(g: Gang, address: Row, noinc: bool, m: Mask, pc: int) -> None:
    """cp.async.mbarrier.arrive: an arrival when the thread's copies have landed."""
    for land in [*(land for group in g.copy_groups for land in group), *g.copies]:
        land()
    g.copies, g.copy_groups = [], []
    g.machine.checker.cp_settle(g)
    for at, threads in each_address(g, address, m):
        bar = mbarrier_at(g, at, pc)
        if not noinc:
            bar.pending += len(threads)
        g.machine.checker.releases(g, bar, False, pc, threads)
        count_arrivals(g, bar, len(threads), pc)
