"""Registers of each role of a warp-specialized tcgen05 kernel, from its machine code.

A role is the code that one branch leads to and no other does: blocks that the branch's target
dominates. It is found by what only it executes, as `MARKS` has it, and named so. What several roles
run, as setup and a merge, is `SHARED`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import networkx as nx

from .sass import Instruction

#: role -> what its opcodes begin with. On Hopper the same warps multiply and take the softmax
MARKS = {
    "MMA": ("UTCHMMA", "UTCQMMA"),
    "producer": ("UTMALDG",),
    "softmax": ("LDTM",),
}
SHARED = "shared"
_TARGET = re.compile(r"`\(([^)]+)\)")
_REGISTER = re.compile(r"\bR\d+\b")
_ENDS = ("EXIT", "RET", "BRA", "BRX", "JMP", "KILL")


@dataclass(frozen=True)
class Role:
    """Code of one role."""

    name: str
    instructions: int
    #: different registers that its code names
    registers: int


def roles(code: Sequence[Instruction]) -> tuple[Role, ...]:
    """The roles of a kernel by the order of `MARKS`, then what they share; () of another kernel."""
    if not code:
        return ()
    blocks = _blocks(code)
    above = {**nx.immediate_dominators(_flow(code, blocks), 0), 0: 0}
    lines = {block: _line(block, above) for block in above}
    marked = {
        name: {
            b for b in above if any(one.opcode.startswith(mark) for one in code[slice(*blocks[b])])
        }
        for name, mark in MARKS.items()
    }
    found, left = [], set(above)
    for name, mine in marked.items():
        others = (block for other, theirs in marked.items() if other != name for block in theirs)
        taken = {block for other in others for block in lines[other]}
        free = [[b for b in lines[block] if b not in taken] for block in mine]
        # the highest dominators of its marks that dominate no other role's
        heads = {line[-1] for line in free if line}
        if not heads:
            return ()
        own = {b for b in above if heads & set(lines[b])}
        found.append(_role(name, [code[slice(*blocks[b])] for b in own]))
        left -= own
    return (*found, _role(SHARED, [code[slice(*blocks[b])] for b in left]))


def _blocks(code: Sequence[Instruction]) -> list[tuple[int, int]]:
    """Basic blocks as (first, behind the last) instruction."""
    begins = {0, len(code)}
    begins |= {i for i, one in enumerate(code) if one.labels}
    begins |= {i + 1 for i, one in enumerate(code) if _branches(one)}
    return list(pairwise(sorted(begins)))


def _flow(code: Sequence[Instruction], blocks: Sequence[tuple[int, int]]) -> nx.DiGraph:
    """Which block may follow which."""
    at = {label: b for b, (first, _) in enumerate(blocks) for label in code[first].labels}
    graph = nx.DiGraph()
    graph.add_nodes_from(range(len(blocks)))
    for b, (_, behind) in enumerate(blocks):
        last = code[behind - 1]
        if _branches(last):
            targets = _TARGET.findall(last.operands)
            graph.add_edges_from((b, at[name]) for name in targets if name in at)
        if not _ends(last) and b + 1 < len(blocks):
            graph.add_edge(b, b + 1)
    return graph


def _line(block: int, above: Mapping[int, int]) -> list[int]:
    """A block and its dominators up to the entry."""
    found = [block]
    while found[-1]:
        found.append(above[found[-1]])
    return found


def _role(name: str, blocks: Iterable[Sequence[Instruction]]) -> Role:
    code = [one for block in blocks for one in block]
    named = {register for one in code for register in _REGISTER.findall(one.operands)}
    return Role(name, len(code), len(named))


def _branches(one: Instruction) -> bool:
    return one.opcode.startswith((*_ENDS, "BSYNC", "CALL"))


def _ends(one: Instruction) -> bool:
    """Whether no instruction follows: an unconditional branch or end."""
    plain = not one.predicate and (
        one.operands.startswith("`(") or not one.opcode.startswith("BRA")
    )
    return plain and one.opcode.startswith(_ENDS)
