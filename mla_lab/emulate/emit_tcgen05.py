"""Python of tcgen05 instructions."""

from __future__ import annotations

from ..core.errors import unsupported
from .ptx import Instruction
from .tcgen05 import Multiply
from .tensor_memory import SHAPES
from .writer import Lines, Writer, emits


@emits("tcgen05")
def _tcgen05(w: Writer, s: Instruction, pc: int) -> Lines:
    what, _, which = s.parts[1].partition("::")
    # memory is always in order here; checks note what waits and fences order
    if what == "wait":
        return [f"g.machine.checker.tensor.wait(g, {which == 'ld'})"]
    if what == "fence":
        return [f"g.machine.checker.tensor.fence(g, {which == 'before_thread_sync'}, {pc})"]
    if what == "relinquish_alloc_permit":
        return ["tcgen05_relinquish(g)"]
    if what == "alloc":
        where = f"{w.address(s.args[0])}, {w.value(s.args[1], 'u32')}"
        return [f"return tcgen05_alloc(g, {where}, m, {w.next_block(pc)}, {pc})"]
    if what == "dealloc":
        where = f"{w.value(s.args[0], 'u32')}, {w.value(s.args[1], 'u32')}"
        return [f"tcgen05_dealloc(g, {where}, MASK, {pc})"]
    if what in ("ld", "st"):
        return _access(w, s, pc)
    if what == "commit":
        cast = w.value(s.args[1], "u16") if "multicast::cluster" in s.parts else "None"
        return [f"tcgen05_commit(g, {w.address(s.args[0])}, {cast}, MASK, {pc})"]
    if what == "mma" and s.parts[2].startswith("cta_group"):
        return _mma(w, s, pc)
    raise unsupported("instruction", s.opcode, "tcgen05 alloc, mma, commit, ld, st, wait, fence")


def _access(w: Writer, s: Instruction, pc: int) -> Lines:
    load = s.parts[1] == "ld"
    registers, address = s.args[:2] if load else (s.args[1], s.args[0])
    split = 0
    if s.parts[4] == "16x32bx2":
        split = int(s.args[2 if load else 1], 0)
        registers = registers if load else s.args[2]
    wanted = SHAPES[s.parts[4]][1] * int(s.parts[5][1:])
    if len(w.group(registers)) != wanted or s.parts[-1] != "b32" or len(s.parts) != 7:
        raise unsupported("instruction", s.opcode, f"{wanted} registers of 32 bits, not packed")
    shape = f"({s.parts[4]!r}, {split})"
    if load:
        rows = w.rows_of(registers, "u32")
        return [f"tcgen05_ld(g, {rows}, {w.address(address)}, {shape}, MASK, {pc})"]
    rows = w.values_of(registers, "u32")
    return [f"tcgen05_st(g, {w.address(address)}, {rows}, {shape}, MASK, {pc})"]


def _mma(w: Writer, s: Instruction, pc: int) -> Lines:
    kind = s.parts[3].partition("::")[2]
    rest = [p for p in s.parts[4:] if not p.startswith("collector")]
    args = list(s.args)
    lanes = w.values_of(args.pop(4), "u32") if args[4].startswith("{") else "[]"
    if kind not in ("f16", "f8f6f4") or rest or len(args) != 5:
        raise unsupported("instruction", s.opcode, "kinds f16 and f8f6f4, dense and unscaled")
    in_tensor = args[1].startswith("[")
    w.products.append(Multiply(kind, s.parts[2] == "cta_group::2", in_tensor, pc))
    a = w.address(args[1]) if in_tensor else w.value(args[1], "u64")
    b, descriptor = w.value(args[2], "u64"), w.value(args[3], "u32")
    operands = f"({w.address(args[0])}, {a}, {b}, {descriptor}, {w.value(args[4], 'pred')})"
    return [f"tcgen05_mma(g, PRODUCTS[{len(w.products) - 1}], {operands}, {lanes}, MASK)"]
