"""wgmma: products of a warp group, which run on their own between issue and wait.

A product begins when all four warps have issued it. A group of products is done at the latest when
a warp waits for it; under other schedules than a late one, when the last warp has committed it.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from .findings import fault
from .gang import Gang
from .tiles import (
    ELEMENT_BYTES,
    a_fragment,
    accumulate,
    accumulator,
    accumulator_registers,
    chains,
    decode,
    operand_bytes,
)
from .writer import BLOCKED

Row = np.ndarray
#: by operand type: the last place that a card keeps below the largest exponent
CARD_BITS = {"bf16": 25, "f16": 25, "e4m3": 13}


class Product(NamedTuple):
    """Static facts of a wgmma.mma_async: rows of registers, m64 n k, types, and where it stands."""

    d_rows: tuple[int, ...]
    #: empty where A is in shared memory
    a_rows: tuple[int, ...]
    n: int
    k: int
    kind: str
    a_transposed: bool
    b_transposed: bool
    pc: int


class Issued(NamedTuple):
    """One issue of a product: its operands, and whether it adds to what D held."""

    product: Product
    #: fp32 [rows of this gang, k] from registers, or a descriptor
    a: Row | int
    b: int
    keep: bool


def wgmma_issue(g: Gang, product: Product, a: Row | None, b: Row, keep: Row) -> None:
    """wgmma.mma_async; A comes from registers where `a` is None."""
    if a is None:
        left: Row | int = a_fragment(g.file32[list(product.a_rows)], product.kind)
    else:
        left = int(a[0])
    issued = Issued(product, left, int(b[0]), bool(keep[0]))
    g.machine.checker.product(g, issued)
    g.issued.append(issued)
    g.machine.flops += 2 * 64 * product.n * product.k * g.n // 128


def wgmma_commit(g: Gang) -> None:
    """wgmma.commit_group"""
    if g.machine.recorder and g.issued:
        work = sum(64 * i.product.n * i.product.k for i in g.issued)
        g.machine.recorder.products(g, len(g.issued), work, g.issued[0].product.pc)
    g.groups.append(g.issued)
    g.issued = []
    g.machine.checker.wgmma_commit(g)
    if not g.machine.late:
        _finish(g, len(g.groups))


def wgmma_wait(g: Gang, left: int, after: int) -> int:
    """wgmma.wait_group: all but the last `left` groups are done."""
    if not _finish(g, len(g.groups) - left):
        return BLOCKED
    g.machine.checker.wgmma_wait(g, left)
    g.machine.recorder.products_waited(g, g.cta.program.starts[g.current.block])
    return after


def _finish(g: Gang, count: int) -> bool:
    """Run groups until `count` are done; False where a warp has not committed one of them."""
    team = g.team
    while g.done < count:
        if any(len(other.groups) <= g.done for other in team):
            return False
        _run(team, [other.groups[g.done] for other in team])
        for other in team:
            other.groups[other.done] = []
            other.done += 1
        g.machine.progress += 1
    return True


def _run(team: list[Gang], groups: list[list[Issued]]) -> None:
    first = groups[0]
    if any(len(group) != len(first) for group in groups):
        pc = max(groups, key=len)[0].product.pc
        raise fault(team[0], pc, "divergence", "warps of a group commit different products")
    for chain in chains(first, lambda a, b: b.keep and a.product.d_rows == b.product.d_rows):
        _accumulate(team, [group[chain] for group in groups])


def _accumulate(team: list[Gang], chains: list[list[Issued]]) -> None:
    """Products over the same accumulators, one after the other."""
    product, rows = chains[0][0].product, list(chains[0][0].product.d_rows)
    held = np.concatenate([g.file32[rows] for g in team], axis=1)
    total = accumulator(held.view(np.float32))
    if not chains[0][0].keep:
        total = np.zeros_like(total)
    lefts = [_left(team, [chain[i] for chain in chains]) for i in range(len(chains[0]))]
    rights = [_right(team[0], issued) for issued in chains[0]]
    total = accumulate(team[0].machine.numbers, total, lefts, rights, CARD_BITS[product.kind])
    registers = accumulator_registers(total).view(np.uint32)
    at = 0
    for g in team:
        g.file32[rows] = registers[:, at : at + g.n]
        at += g.n


def _left(team: list[Gang], issued: list[Issued]) -> Row:
    """A, [64, k]."""
    one = issued[0]
    if any(other.product.pc != one.product.pc or other.b != one.b for other in issued):
        raise fault(team[0], one.product.pc, "divergence", "warps of a group differ in a product")
    if not isinstance(one.a, int):
        return np.concatenate([i.a for i in issued])
    p = one.product
    size = ELEMENT_BYTES[p.kind]
    where = operand_bytes(one.a, 64, p.k, size, p.a_transposed)
    return decode(team[0].cta.shared.views, where, p.kind)


def _right(g: Gang, issued: Issued) -> Row:
    """B transposed, [n, k]."""
    p = issued.product
    where = operand_bytes(issued.b, p.n, p.k, ELEMENT_BYTES[p.kind], p.b_transposed)
    return decode(g.cta.shared.views, where, p.kind)
