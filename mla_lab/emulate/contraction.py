"""Products and sums that ptxas joins: `mul.f32` and `add.f32` without a rounding may become one
fused operation, so that a card rounds once where PTX reads as if it rounded twice.

Seen in the machine code of all our builds (ptxas of CUDA 13): a product is joined with every sum
that reads it where all its readers are sums, in its own block; else with none.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from dataclasses import replace
from functools import lru_cache

from .ptx import Instruction
from .translate import Program

SUMS = ("add.f32", "sub.f32")


@lru_cache(maxsize=8)
def contracted(program: Program) -> Program:
    """The program with `fma` where ptxas makes one of a product and the sum that takes it."""
    edits = _edits(program)
    if not edits:
        return program
    code = [edits.get(pc, s) for pc, s in enumerate(program.kernel.code)]
    return Program(replace(program.kernel, code=code))


def _edits(program: Program) -> dict[int, Instruction]:
    code = program.kernel.code
    mentions: dict[str, list[int]] = defaultdict(list)
    for pc, names in enumerate(program.named):
        for name in names:
            mentions[name].append(pc)
    jumps = {pc + 1 for pc, s in enumerate(code) if s.opcode.startswith(("bra", "ret", "exit"))}
    ends = sorted(jumps | set(program.kernel.labels.values()))
    found: dict[int, Instruction] = {}
    for pc, s in enumerate(code):
        if s.opcode == "mul.f32" and s.guard is None:
            readers = [by for by in mentions[s.args[0]] if by != pc]
            if all(pc < by < ends[bisect_right(ends, pc)] for by in readers):
                found |= _joined(code, pc, readers)
    return found


def _joined(code: list[Instruction], pc: int, readers: list[int]) -> dict[int, Instruction]:
    """Sums with the product of `pc` inside; none where some reader is no such sum."""
    name, a, b = code[pc].args
    made = {}
    for by in readers:
        s = code[by]
        between = {other.args[0] for other in code[pc + 1 : by] if other.args}
        if s.opcode not in SUMS or s.guard or s.args.count(name) != 1 or {a, b} & between:
            return {}
        if s.args[0] == name:
            return {}
        first = s.args[1] == name
        sign = "" if s.opcode == "add.f32" else ".minus_c" if first else ".minus_a"
        args = (s.args[0], a, b, s.args[2] if first else s.args[1])
        made[by] = replace(s, opcode=f"fma.rn{sign}.f32", args=args)
    return made
