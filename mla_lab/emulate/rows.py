"""Which array row holds which PTX register.

The compiler writes PTX with thousands of registers, each live for a short stretch. Registers whose
stretches do not meet share a row, so that the registers of a warp are hundreds of rows and not
thousands. A row has one element for each thread, and a thread sees its own element alone, so that
what holds for one thread's path through the code holds for all of them.
"""

from __future__ import annotations

import heapq

import numpy as np

from .ptx import NAME_IN, SIZES, Instruction, Kernel

#: bytes of a register of each type; predicates are rows of bool
CLASSES = {**SIZES, "pred": 1}


def names_in(instruction: Instruction, registers: dict[str, str]) -> list[str]:
    """Registers that an instruction names, its guard included, in the order of the text."""
    found = [w for w in NAME_IN.findall(" ".join(instruction.args)) if w in registers]
    return [*found, instruction.guard] if instruction.guard else found


def assign(
    kernel: Kernel, named: list[list[str]]
) -> tuple[dict[str, tuple[int, int]], dict[int, int]]:
    """(register -> (class, row), class -> number of rows); `named` is `names_in` of each
    instruction.
    """
    names, start, end = _stretches(kernel, named)
    order = np.argsort(start, kind="stable")
    rows: dict[str, tuple[int, int]] = {}
    free: dict[int, list[int]] = {1: [], 2: [], 4: [], 8: []}
    count = dict.fromkeys(free, 0)
    ends: list[tuple[int, int, int]] = []
    for i in order.tolist():
        while ends and ends[0][0] < start[i]:
            _, size, row = heapq.heappop(ends)
            heapq.heappush(free[size], row)
        size = CLASSES[kernel.registers[names[i]]]
        if free[size]:
            row = heapq.heappop(free[size])
        else:
            row, count[size] = count[size], count[size] + 1
        rows[names[i]] = (size, row)
        heapq.heappush(ends, (int(end[i]), size, row))
    return rows, count


def _stretches(kernel: Kernel, named: list[list[str]]) -> tuple[list[str], np.ndarray, np.ndarray]:
    """Registers, and the first and last instruction between which each holds a value.

    In straight code that is from the first instruction that names it to the last. Around a loop it
    grows to the whole loop, unless the register begins and ends inside with a plain definition.
    """
    first: dict[str, int] = {}
    last: dict[str, int] = {}
    carried: set[str] = set()
    settled = _settled(kernel.code)
    for i, instruction in enumerate(kernel.code):
        for name in named[i]:
            if name not in first:
                first[name] = i
                if instruction.guard or not _defines(instruction, name):
                    carried.add(name)
            last[name] = i
        if instruction.opcode.startswith("wgmma.mma_async"):
            # the product is written when it completes, at the latest where all are waited for
            for name in NAME_IN.findall(instruction.args[0]):
                last[name] = max(last[name], int(settled[i]))
    names = list(first)
    start = np.array([first[n] for n in names])
    end = np.array([last[n] for n in names])
    wraps = np.array([n in carried for n in names])
    loops = [
        (kernel.labels[s.args[0]], i)
        for i, s in enumerate(kernel.code)
        if s.parts[0] == "bra" and kernel.labels[s.args[0]] <= i
    ]
    changed = True
    while changed:
        changed = False
        for head, tail in loops:
            meets = (start <= tail) & (end >= head)
            outside = meets & (wraps | (start < head) | (end > tail))
            grown = outside & ((start > head) | (end < tail))
            # a value that comes from before the loop, or goes round it, holds until its end
            grown &= wraps | (start < head) | (end > tail)
            if grown.any():
                start = np.where(grown, np.minimum(start, head), start)
                end = np.where(grown, np.maximum(end, tail), end)
                changed = True
    return names, start, end


def _settled(code: list[Instruction]) -> np.ndarray:
    """For each instruction the next `wgmma.wait_group 0` in the text."""
    found = np.full(len(code), len(code))
    following = len(code)
    for i in range(len(code) - 1, -1, -1):
        if code[i].opcode.startswith("wgmma.wait_group") and code[i].args[0] == "0":
            following = i
        found[i] = following
    return found


def _defines(instruction: Instruction, name: str) -> bool:
    """Whether the instruction writes `name` without reading it."""
    words = [set(NAME_IN.findall(a)) for a in instruction.args]
    if not words or name not in words[0] or any(name in other for other in words[1:]):
        return False
    if instruction.opcode.startswith(("tcgen05.dealloc", "st.", "red.", "wgmma.")):
        return False
    return "[" not in instruction.args[0]
