"""Python of loads, stores, atomics, copies and matrix products."""

from __future__ import annotations

import re

from ..core.errors import unsupported
from .ptx import SIZES, Instruction
from .wgmma import CARD_BITS, Product
from .writer import BITS, Lines, Writer, emits

#: orders that make an access to global memory part of a protocol between CTAs
STRONG = ("relaxed", "acquire", "release", "acq_rel", "volatile", "mmio")
ATOMICS = ("add", "inc", "dec", "min", "max", "and", "or", "xor", "exch", "cas")


def order(s: Instruction) -> str:
    """The memory order that an access names, "weak" without one."""
    return next((p for p in s.parts if p in STRONG), "weak")


def _shared(s: Instruction) -> bool:
    return any(p.startswith("shared") for p in s.parts)


def _bits_of(kind: str) -> str:
    return f"u{8 * SIZES[kind]}"


@emits("ld")
def _ld(w: Writer, s: Instruction, pc: int) -> Lines:
    kind, nbytes = s.parts[-1], SIZES[s.parts[-1]]
    targets = w.group(s.args[0])
    if s.parts[1] == "param":
        base, offset = w.base_and_offset(s.args[1])
        if base in w.params:
            return _ld_param(w, targets, kind, w.params[base] + offset)
    rows = "[" + ", ".join(w.bits(name) for name in targets) + "]"
    address = w.address(s.args[1])
    if _shared(s):
        lines = [f"ld_shared(g, {rows}, {address}, {nbytes}, MASK, {pc})"]
    else:
        lines = [f"ld_global(g, {rows}, {address}, {nbytes}, MASK, ({pc}, {order(s)!r}))"]
    if kind[0] == "s":
        for name in targets:
            size = w.rows[name][0]
            if size > nbytes:
                row, by = w.bits(name, signed=True), 8 * (size - nbytes)
                lines.append(f"copyto({row}, {row} << {by} >> {by}, where=MASK)")
    return lines


def _ld_param(w: Writer, targets: list[str], kind: str, offset: int) -> Lines:
    lines = []
    for i, name in enumerate(targets):
        register = BITS[w.rows[name][0]]
        value = w.constant(register, ("param value", kind, offset + SIZES[kind] * i))
        lines.append(f"copyto({w.bits(name)}, {value}, where=MASK)")
    return lines


@emits("st")
def _st(w: Writer, s: Instruction, pc: int) -> Lines:
    kind, nbytes = s.parts[-1], SIZES[s.parts[-1]]
    if s.parts[1] == "async":
        address, bar = w.address(s.args[0]), w.address(s.args[2])
        values = w.values_of(s.args[1], "u32")
        return [f"st_async(g, {address}, {values}, {bar}, MASK, {pc})"]
    found = []
    for name in w.group(s.args[1]):
        found.append(w.bits(name) if name in w.rows else w.value(name, _bits_of(kind)))
    address = w.address(s.args[0])
    values = "[" + ", ".join(found) + "]"
    if _shared(s):
        return [f"st_shared(g, {address}, {values}, {nbytes}, MASK, {pc})"]
    return [f"st_global(g, {address}, {values}, {nbytes}, MASK, ({pc}, {order(s)!r}))"]


@emits("discard")
def _discard(w: Writer, s: Instruction, pc: int) -> Lines:
    return [f"discard(g, {w.address(s.args[0])}, MASK, {pc})"]


@emits("atom", "red")
def _atom(w: Writer, s: Instruction, pc: int) -> Lines:
    kind = s.parts[-1].replace("b", "u")
    op = next(p for p in s.parts if p in ATOMICS)
    args = list(s.args)
    target = w.row(args.pop(0), kind) if s.parts[0] == "atom" else "None"
    if _shared(s):
        raise unsupported("instruction", s.opcode, "atomics on global memory")
    address = w.address(args[0])
    values = ", ".join(w.value(a, kind) for a in args[1:])
    named = order(s) if order(s) != "weak" else "relaxed"
    return [f"atom(g, {target}, {address}, [{values}], {op!r}, MASK, ({pc}, {named!r}))"]


@emits("ldmatrix")
def _ldmatrix(w: Writer, s: Instruction, pc: int) -> Lines:
    rows, address = w.rows_of(s.args[0], "u32"), w.address(s.args[1])
    return [f"ldmatrix(g, {rows}, {address}, {'trans' in s.parts}, MASK, {pc})"]


@emits("stmatrix")
def _stmatrix(w: Writer, s: Instruction, pc: int) -> Lines:
    address, values = w.address(s.args[0]), w.values_of(s.args[1], "u32")
    return [f"stmatrix(g, {address}, {values}, {'trans' in s.parts}, MASK, {pc})"]


@emits("cp")
def _cp(w: Writer, s: Instruction, pc: int) -> Lines:
    if "prefetch" in s.parts:
        return ["pass"]
    if "tensor" in s.parts:
        return _tensor_copy(w, s, pc)
    if s.parts[2] == "bulk" and "shared::cluster" in s.parts and "shared::cta" in s.parts:
        target, source, bar = (w.address(s.args[i]) for i in (0, 1, 3))
        nbytes = w.value(s.args[2], "u32")
        return [f"bulk_to_peer(g, {target}, {source}, {nbytes}, {bar}, MASK, {pc})"]
    if s.parts[2] in ("cg", "ca"):
        have = w.value(s.args[3], "u32") if len(s.args) > 3 else "None"
        target, source = w.address(s.args[0]), w.address(s.args[1])
        return [f"cp_async(g, {target}, {source}, {int(s.args[2])}, {have}, MASK, {pc})"]
    if s.parts[2] == "mbarrier":
        return [f"cp_async_arrive(g, {w.address(s.args[0])}, {'noinc' in s.parts}, MASK, {pc})"]
    if s.parts[2] == "commit_group":
        return ["cp_async_commit(g)"]
    if s.parts[2] == "wait_all":  # those in no group too
        return ["cp_async_commit(g)", "cp_async_wait(g, 0)"]
    if s.parts[2] == "wait_group":
        return [f"cp_async_wait(g, {int(s.args[0])})"]
    raise unsupported("instruction", s.opcode, "copies of TMA, cp.async and between CTAs")


def _tensor_copy(w: Writer, s: Instruction, pc: int) -> Lines:
    match = re.match(r"\[\s*([%\w$@]+)\s*,\s*\{(.*?)\}\s*\]", s.args[1])
    if match is None or "mbarrier::complete_tx::bytes" not in s.parts:
        raise unsupported("instruction", s.opcode, "tensor copies to shared memory, tiled")
    places = ", ".join(w.value(c.strip(), "s32") for c in match[2].split(","))
    cast = w.value(s.args[3], "u16") if "multicast::cluster" in s.parts else "None"
    target, bar = w.address(s.args[0]), w.address(s.args[2])
    where = f"[{places}], ({target}, {bar}, {cast}, {'cta_group::2' in s.parts})"
    return [f"tensor_copy(g, {w.value(match[1], 'u64')}, {where}, MASK, {pc})"]


@emits("wgmma")
def _wgmma(w: Writer, s: Instruction, pc: int) -> Lines:
    if s.parts[1] == "fence":
        return ["pass"]  # registers are always in order here
    if s.parts[1] == "commit_group":
        return ["wgmma_commit(g)"]
    if s.parts[1] == "wait_group":
        return [f"return wgmma_wait(g, {int(s.args[0])}, {w.next_block(pc)})"]
    match = re.match(r"m64n(\d+)k(\d+)", s.parts[4])
    mixed = s.parts[5] != "f32" or s.parts[6] != s.parts[7] or s.parts[6] not in CARD_BITS
    if match is None or mixed:
        types = ", ".join(CARD_BITS)
        raise unsupported("instruction", s.opcode, f"m64 products of one type, {types}, into fp32")
    if s.args[4:6] != ("1", "1"):
        raise unsupported("instruction", s.text, "products without negation")
    flags = [int(a) for a in s.args[6:]]
    from_registers = s.args[1].startswith("{")
    rows = tuple(w.rows[name][1] for name in w.group(s.args[0]))
    a_rows = tuple(w.rows[name][1] for name in w.group(s.args[1])) if from_registers else ()
    a_transposed = bool(flags[0]) if len(flags) == 2 else False
    b_transposed = bool(flags[-1]) if flags else False
    product = Product(
        rows, a_rows, int(match[1]), int(match[2]), s.parts[6], a_transposed, b_transposed, pc
    )
    w.products.append(product)
    a = "None" if from_registers else w.value(s.args[1], "u64")
    keep = w.value(s.args[3], "pred")
    b = w.value(s.args[2], "u64")
    return [f"wgmma_issue(g, PRODUCTS[{len(w.products) - 1}], {a}, {b}, {keep})"]


@emits("mma")
def _mma(w: Writer, s: Instruction, pc: int) -> Lines:
    kind = s.parts[7]
    d, c = w.rows_of(s.args[0], "f32"), w.values_of(s.args[3], "f32")
    a, b = w.values_of(s.args[1], "u32"), w.values_of(s.args[2], "u32")
    return [f"mma(g, {d}, {a}, {b}, {c}, {kind!r}, MASK)"]
