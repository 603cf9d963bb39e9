"""Registers of each role of a warp-specialized tcgen05 kernel, from its machine code.

A role is the code that one branch leads to and no other does: blocks that the branch's target
dominates. It is found by what only it executes, as `MARKS` has it, and named so. What several roles
run, as setup and a merge, is `SHARED`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
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
    return _Graph(tuple(code)).roles() if code else ()


@dataclass(frozen=True)
class _Graph:
    """Basic blocks of a kernel as (first, behind the last) instruction, and who follows whom."""

    code: tuple[Instruction, ...]

    @cached_property
    def blocks(self) -> list[tuple[int, int]]:
        begins = {0, len(self.code)}
        for i, one in enumerate(self.code):
            if one.labels:
                begins.add(i)
            if _branches(one):
                begins.add(i + 1)
        order = sorted(begins)
        return list(pairwise(order))

    @cached_property
    def parents(self) -> list[list[int]]:
        at = {label: b for b, (i, _) in enumerate(self.blocks) for label in self.code[i].labels}
        found: list[list[int]] = [[] for _ in self.blocks]
        for b, (_, behind) in enumerate(self.blocks):
            last = self.code[behind - 1]
            after = [at[name] for name in _TARGET.findall(last.operands) if name in at]
            if not _ends(last) and b + 1 < len(self.blocks):
                after.append(b + 1)
            for child in after if _branches(last) else [b + 1] * (b + 1 < len(self.blocks)):
                found[child].append(b)
        return found

    @cached_property
    def above(self) -> dict[int, int]:
        """Immediate dominators of the blocks that can be reached."""
        graph = nx.DiGraph((p, child) for child, ps in enumerate(self.parents) for p in ps)
        graph.add_node(0)
        return {**nx.immediate_dominators(graph, 0), 0: 0}

    def _line(self, block: int) -> list[int]:
        """A block and its dominators up to the entry."""
        found = [block]
        while found[-1]:
            found.append(self.above[found[-1]])
        return found

    def roles(self) -> tuple[Role, ...]:
        marked: dict[str, set[int]] = {name: set() for name in MARKS}
        lines = {block: self._line(block) for block in self.above}
        for block in self.above:
            begin, behind = self.blocks[block]
            for one in self.code[begin:behind]:
                name = next((n for n, m in MARKS.items() if one.opcode.startswith(m)), None)
                if name:
                    marked[name].add(block)
        used = {name: blocks for name, blocks in marked.items() if blocks}
        found, left = [], set(self.above)
        for name, blocks in used.items():
            others = {o for other, theirs in used.items() if other != name for o in theirs}
            heads = self._heads(blocks, lines, others)
            if heads:
                mine = [b for b in self.above if heads & set(lines[b])]
                found.append(self._role(name, mine))
                left -= set(mine)
        whole = len(found) == len(MARKS)
        return (*found, self._role(SHARED, sorted(left))) if whole else ()

    @staticmethod
    def _heads(blocks: set[int], lines: dict[int, list[int]], others: set[int]) -> set[int]:
        """The highest dominators of a role's marks that dominate no other role's."""
        taken = {block for other in others for block in lines[other]}
        heads = set()
        for block in blocks:
            free = [b for b in lines[block] if b not in taken]
            heads |= {free[-1]} if free else set()
        return heads

    def _role(self, name: str, blocks: list[int]) -> Role:
        code = [one for b in blocks for one in self.code[slice(*self.blocks[b])]]
        named = {n for one in code for n in _REGISTER.findall(one.operands)}
        return Role(name, len(code), len(named))


def _branches(one: Instruction) -> bool:
    return one.opcode.startswith((*_ENDS, "BSYNC", "CALL"))


def _ends(one: Instruction) -> bool:
    """Whether no instruction follows: an unconditional branch or end."""
    plain = not one.predicate and (
        one.operands.startswith("`(") or not one.opcode.startswith("BRA")
    )
    return plain and one.opcode.startswith(_ENDS)
