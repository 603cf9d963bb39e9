"""tcgen05.mma: products of SM100's tensor core, which one thread issues and which run on their own.

Operands are in shared memory, or A in tensor memory; accumulators are in tensor memory. Products
of one warp run in the order of their issue, at the latest when a barrier that was named in a
`commit` behind them must complete; with cta_group::2 they use memory of both CTAs of a pair. Their
rounding on a card is not known: "card" numbers are "exact" ones, one rounding an instruction.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from ..core.errors import unsupported
from .barriers import Mbarrier, count_arrivals, located, mbarrier_at
from .gang import Gang, Mask, lanes_of
from .parts import CtaLike
from .tensor_memory import LANES, tensor_memory_of
from .tiles import ELEMENT_BYTES, accumulate, chains, decode, operand_bytes, values

Row = np.ndarray
#: (kind, code in the instruction descriptor) -> operand type
TYPES = {("f16", 0): "f16", ("f16", 1): "bf16", ("f8f6f4", 0): "e4m3"}
#: a descriptor's swizzle on SM100 -> that of wgmma's descriptors
_SWIZZLES = {0: 0, 2: 1, 4: 2, 6: 3}
#: lanes of the 64 rows of M 64: half of each warp's
_HALF_LANES = np.arange(64) // 16 * 32 + np.arange(64) % 16


class Multiply(NamedTuple):
    """Static facts of a tcgen05.mma: kind, whether it uses a pair of CTAs, where A is."""

    kind: str
    pair: bool
    a_in_tensor: bool
    pc: int


class Shape(NamedTuple):
    """What an instruction descriptor says."""

    m: int
    n: int
    k: int
    a_kind: str
    b_kind: str
    a_transposed: bool
    b_transposed: bool


class Part(NamedTuple):
    """Lanes of a CTA's tensor memory, and the rows of B that belong to their columns."""

    lanes: Any
    first: int
    last: int


class Issued(NamedTuple):
    """One issue: operands, the accumulators' address, and whether it adds to what they held."""

    multiply: Multiply
    shape: Shape
    ctas: list[CtaLike]
    d: int
    a: int
    b: int
    keep: bool
    #: lanes that are left as they are, a bit each
    disabled: int

    @property
    def column(self) -> int:
        return self.d & 0xFFFF

    def same(self, other: Issued) -> bool:
        """Whether both have the same accumulators."""
        mine = (self.shape, self.d, self.disabled, self.ctas[0])
        return mine == (other.shape, other.d, other.disabled, other.ctas[0])

    def parts(self) -> list[Part]:
        """How rows and columns lie in the lanes of each CTA. From CuTe's layouts."""
        m, n = self.shape.m, self.shape.n
        if self.multiply.pair and m == 128:
            return [Part(slice(0, 64), 0, n // 2), Part(slice(64, 128), n // 2, n)]
        if m == 64:
            return [Part(_HALF_LANES + (self.d >> 16), 0, n)]
        return [Part(slice(0, LANES), 0, n)]

    @property
    def columns(self) -> int:
        """Columns of the accumulators."""
        part = self.parts()[0]
        return part.last - part.first

    @property
    def a_columns(self) -> int:
        """Columns of A in tensor memory."""
        return self.shape.k * ELEMENT_BYTES[self.shape.a_kind] // 4

    def operands(self) -> list[tuple[int, int, int, int, bool]]:
        """What shared memory of each CTA is read: descriptor, rows, k, bytes, transposed."""
        s, count = self.shape, len(self.ctas)
        b = (self.b, s.n // count, s.k, ELEMENT_BYTES[s.b_kind], s.b_transposed)
        a = (self.a, s.m // count, s.k, ELEMENT_BYTES[s.a_kind], s.a_transposed)
        return [b] if self.multiply.a_in_tensor else [b, a]


@lru_cache(maxsize=256)
def shape_of(descriptor: int, kind: str, pair: bool) -> Shape:
    """An instruction descriptor of kinds f16 and f8f6f4. PTX ISA, "Instruction descriptor"."""
    n, m = (descriptor >> 17 & 63) << 3, (descriptor >> 24 & 31) << 4
    kinds = [TYPES.get((kind, descriptor >> at & 7)) for at in (7, 10)]
    if descriptor >> 4 & 3 != 1 or None in kinds or descriptor >> 13 & 3 or descriptor >> 2 & 1:
        got = f"instruction descriptor {descriptor:#x} of kind {kind}"
        raise unsupported("tcgen05.mma", got, "dense f16, bf16 and e4m3 products into fp32")
    if m not in ((128, 256) if pair else (64, 128)) or not 8 <= n <= 256:
        raise unsupported("tcgen05.mma", f"M {m}, N {n}, a pair: {pair}", "M 64 to 256, N to 256")
    step = 32 if pair else 8 if m == 64 else 16
    if n % step:
        raise unsupported(
            "tcgen05.mma", f"N {n} with M {m}, a pair: {pair}", f"multiples of {step}"
        )
    k = 32 // ELEMENT_BYTES[str(kinds[0])]
    flags = bool(descriptor >> 15 & 1), bool(descriptor >> 16 & 1)
    return Shape(m, n, k, str(kinds[0]), str(kinds[1]), *flags)


@lru_cache(maxsize=4096)
def shared_descriptor(descriptor: int) -> int:
    """A shared-memory descriptor of SM100 as wgmma has it."""
    mode = descriptor >> 61 & 7
    if descriptor >> 46 & 7 != 1 or descriptor >> 52 & 1 or mode not in _SWIZZLES:
        raise unsupported("tcgen05 descriptor", hex(descriptor), "relative, swizzles of 16 bytes")
    return descriptor & 0x000F_3FFF_3FFF_3FFF | _SWIZZLES[mode] << 62


class Group(NamedTuple):
    """Products, and the barriers that a commit behind them signals."""

    issued: list[Issued]
    barriers: list[Mbarrier]
    #: what happened before, see `races`
    seen: Any
    pc: int


class TensorQueue:
    """Products of one warp in the order of their issue."""

    def __init__(self) -> None:
        self.issued: list[Issued] = []
        self.groups: list[Group] = []
        self.done = 0

    def run_to(self, g: Gang, last: int) -> None:
        """Run groups until number `last` is done."""
        while self.done <= last:
            group, self.done = self.groups[self.done], self.done + 1
            for chain in chains(group.issued, lambda a, b: b.keep and a.same(b)):
                _accumulate(group.issued[chain])
            for bar in group.barriers:
                g.machine.checker.tensor.arrives(bar, group.seen)
                count_arrivals(g, bar, 1, group.pc)
            self.groups[self.done - 1] = Group([], [], None, group.pc)


def _queue(g: Gang, thread: int) -> TensorQueue:
    queue: TensorQueue = g.cta.tensor_queues.setdefault((g.first + thread) // 32, TensorQueue())
    return queue


def tcgen05_mma(
    g: Gang,
    multiply: Multiply,
    operands: tuple[Row, Row, Row, Row, Row],
    disabled: list[Row],
    m: Mask,
) -> None:
    """tcgen05.mma; operands: D, A, B, instruction descriptor, and whether D is added to."""
    for thread in lanes_of(g, m):
        d, a, b, descriptor, keep = (int(row[thread if row.size > 1 else 0]) for row in operands)
        peers, rank = g.cta.peers, g.cta.rank
        ctas = [peers[rank & ~1], peers[rank | 1]] if multiply.pair else [g.cta]
        lanes = sum(int(row[thread]) << 32 * i for i, row in enumerate(disabled))
        shape = shape_of(descriptor, multiply.kind, multiply.pair)
        a = a if multiply.a_in_tensor else shared_descriptor(a)
        issued = Issued(multiply, shape, ctas, d, a, shared_descriptor(b), bool(keep), lanes)
        for cta in ctas:
            tensor = tensor_memory_of(cta)
            tensor.check(g, issued.column, issued.columns, multiply.pc)
            if multiply.a_in_tensor:
                tensor.check(g, a & 0xFFFF, issued.a_columns, multiply.pc)
        g.machine.checker.tensor.product(g, issued)
        _queue(g, int(thread)).issued.append(issued)
        g.machine.flops += 2 * shape.m * shape.n * shape.k


def tcgen05_commit(g: Gang, bar: Row, cast: Row | None, m: Mask, pc: int) -> None:
    """tcgen05.commit: an arrival at barriers when all products of the thread are done."""
    for thread in lanes_of(g, m):
        address = int(bar[thread])
        if cast is None:
            barriers = [mbarrier_at(g, address, pc)]
        else:
            _, offset = located(g, address, pc)
            ranks = [r for r in range(16) if int(cast[thread]) >> r & 1]
            barriers = [mbarrier_at(g, r << 24 | offset, pc) for r in ranks]
        queue = _queue(g, int(thread))
        work = sum(i.shape.m * i.shape.n * i.shape.k // len(i.ctas) for i in queue.issued)
        first = queue.issued[0].multiply.pc if queue.issued else pc
        g.machine.recorder.tensor_products(g, barriers, (len(queue.issued), work), first)
        seen = g.machine.checker.tensor.committed(g)
        queue.groups.append(Group(queue.issued, barriers, seen, pc))
        queue.issued = []
        last = len(queue.groups) - 1
        g.machine.later(lambda q=queue, n=last: q.run_to(g, n))  # type: ignore[misc]
        g.machine.progress += 1


def _accumulate(chain: list[Issued]) -> None:
    """Products over the same accumulators, one after the other."""
    one, rights = chain[0], [_right(issued) for issued in chain]
    numbers = one.ctas[0].machine.numbers
    for rank, cta in enumerate(one.ctas):
        tensor, columns = tensor_memory_of(cta), slice(one.column, one.column + one.columns)
        for part in one.parts():
            lefts = [_left(issued, cta, part) for issued in chain]
            held = tensor.floats[part.lanes, columns]
            total = held if one.keep else np.zeros_like(held)
            b = [right[part.first : part.last] for right in rights]
            total = accumulate("fast" if numbers == "fast" else "exact", total, lefts, b)
            if one.disabled:
                bits = np.arange(LANES)[part.lanes] + LANES * rank
                kept = [bool(one.disabled >> int(bit) & 1) for bit in bits]
                total = np.where(np.array(kept)[:, None], held, total)
            tensor.floats[part.lanes, columns] = total


def _left(issued: Issued, cta: CtaLike, part: Part) -> Row:
    """A of one CTA, [rows, k]."""
    kind = issued.shape.a_kind
    if issued.multiply.a_in_tensor:
        first = issued.a & 0xFFFF
        words = tensor_memory_of(cta).words[part.lanes, first : first + issued.a_columns]
        return values(words, kind).reshape(len(words), -1)
    return decode(cta.shared.views, operand_bytes(*issued.operands()[1]), kind)


def _right(issued: Issued) -> Row:
    """B transposed, [n, k], of which each CTA holds its share."""
    where = operand_bytes(*issued.operands()[0])
    kind = issued.shape.b_kind
    return np.concatenate([decode(cta.shared.views, where, kind) for cta in issued.ctas])
