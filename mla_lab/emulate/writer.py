"""Instructions as lines of Python, by handlers that `emits` registers for mnemonics.

Each register is a NumPy row with one element a thread; an instruction is one ufunc call or a call
of an operation in this package.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from ..core.errors import MlaLabError, unsupported
from .forms import check
from .ptx import Instruction, Kernel
from .rows import CLASSES, assign

#: what a block returns at the end, and where its threads have to wait and try again
EXIT, BLOCKED = -2, -1

#: PTX type -> name of the list of row views with that NumPy type
VIEWS = {"u32": "U", "b32": "U", "s32": "S", "f32": "F", "u64": "D", "b64": "D", "s64": "Q"}
VIEWS |= {"u16": "H", "b16": "H", "s16": "I", "f16": "G", "pred": "P"}
NUMPY = {"u8": "uint8", "b8": "uint8", "s8": "int8", "u16": "uint16", "b16": "uint16"}
NUMPY |= {"s16": "int16", "f16": "float16", "u32": "uint32", "b32": "uint32", "s32": "int32"}
NUMPY |= {"f32": "float32", "u64": "uint64", "b64": "uint64", "s64": "int64", "pred": "bool"}
#: registers of each class as plain bits
BITS = {1: "pred", 2: "u16", 4: "u32", 8: "u64"}

#: mnemonic -> which operand is the member mask
MEMBERS = {"shfl": 4, "vote": 2, "elect": 1, "redux": 2, "bar": 0}
ALL_LANES = 0xFFFFFFFF
#: instructions that the live threads of a warp execute together, all or those of a member mask
BY_WARP = (
    *("shfl", "vote", "elect", "redux", "activemask", "bar.warp"),
    *("ldmatrix", "stmatrix", "movmatrix", "mma", "setmaxnreg"),
    *("tcgen05.ld", "tcgen05.st", "tcgen05.wait", "tcgen05.alloc", "tcgen05.dealloc"),
    "tcgen05.relinquish",
)
#: what makes one register of others, and does nothing else
PLAIN = ("mov", "selp", "setp", "and", "or", "xor", "not", "cvt")

Lines = list[str]
Handler = Callable[["Writer", Instruction, int], Lines]
#: mnemonic -> what writes its Python
HANDLERS: dict[str, Handler] = {}


def emits(*mnemonics: str) -> Callable[[Handler], Handler]:
    """Register a handler of instructions."""

    def register(handler: Handler) -> Handler:
        HANDLERS.update(dict.fromkeys(mnemonics, handler))
        return handler

    return register


def members_of(s: Instruction) -> int:
    """Lanes that an instruction of a whole warp needs, a bit each; of a member mask that is no
    number (see `with_masks`), which `Writer.lines` refuses, all."""
    return _number(_mask(s)) or ALL_LANES


def with_masks(kernel: Kernel) -> Kernel:
    """The kernel with numbers for member masks in registers that hold one number."""
    made: dict[str, list[Instruction]] = {}
    wanted = {_mask(s) for s in kernel.code}
    for s in kernel.code:
        if s.args and s.args[0] in wanted:
            made.setdefault(s.args[0], []).append(s)
    plain = {
        name: found[0].args[1]
        for name, found in made.items()
        if len(found) == 1 and found[0].parts[0] == "mov" and not found[0].guard
    }
    known = {name: word for name, word in plain.items() if _number(word) is not None}
    code = []
    for s in kernel.code:
        args = tuple(known.get(arg, arg) for arg in s.args) if _mask(s) in known else s.args
        code.append(s if args == s.args else replace(s, args=args))
    return replace(kernel, code=code)


def _mask(s: Instruction) -> str:
    """The member mask of an instruction that has one."""
    at = MEMBERS.get(s.parts[0], len(s.args))
    whole = s.parts[0] == "bar" and s.parts[1] != "warp"
    return "" if whole or at >= len(s.args) else s.args[at]


def _number(word: str) -> int | None:
    try:
        return int(word.rstrip("U"), 0) & ALL_LANES
    except ValueError:
        return None


def constant_row(kind: str, value: Any, threads: int) -> np.ndarray:
    """A row of one value that nothing may change."""
    dtype = np.dtype(NUMPY[kind])
    if isinstance(value, int) and dtype.kind in "iu":
        bits = value & (1 << 8 * dtype.itemsize) - 1
        value = np.array(bits, f"u{dtype.itemsize}").view(dtype)
    row = np.empty(threads, dtype)
    row[:] = value
    row.flags.writeable = False
    return row


class Writer:
    """Operands of a kernel's instructions as Python expressions."""

    def __init__(self, kernel: Kernel, named: list[list[str]]) -> None:
        self.kernel = kernel
        self.rows, self.counts = assign(kernel, named)
        #: register -> instructions that name it
        self._named: dict[str, list[int]] = {}
        for pc, names in enumerate(named):
            for name in names:
                self._named.setdefault(name, []).append(pc)
        #: (type, value) of each constant row
        self.constants: list[tuple[str, Any]] = []
        # by its text: 0.0 and -0.0 are equal
        self._known: dict[tuple[str, str], int] = {}
        self._literals: dict[int, list[np.ndarray | None]] = {}
        #: static facts of matrix products, by index
        self.products: list[Any] = []
        self.params = {p.name: p.offset for p in kernel.params}
        self.block_at: dict[int, int] = {}

    def constant(self, kind: str, value: Any) -> str:
        """A row of one value: a number, the name of a special register, or a tuple."""
        key = (kind, repr(value))
        if key not in self._known:
            self._known[key] = len(self.constants)
            self.constants.append((kind, value))
        return f"K[{self._known[key]}]"

    def literals(self, threads: int) -> list[np.ndarray | None]:
        """The constant rows that are numbers, made once for all gangs of so many threads; None
        where a CTA or a thread has its own value."""
        rows = self._literals.setdefault(threads, [])
        # a mutated program has more constants than when its first gang began
        for kind, value in self.constants[len(rows) :]:
            own = isinstance(value, (tuple, str))
            rows.append(None if own else constant_row(kind, value, threads))
        return rows

    def value(self, arg: str, kind: str) -> str:
        """An operand that is read."""
        if arg in self.rows:
            return self.row(arg, kind)
        if arg.startswith("%"):
            return self.constant(kind, arg)
        if arg in self.kernel.shared:
            return self.constant(kind, ("shared", arg, 0))
        if arg in self.params:
            return self.constant(kind, ("param", self.params[arg]))
        if arg.startswith(("0f", "0F")):
            bits = int(arg[2:], 16)
            number = struct.unpack("f", struct.pack("I", bits))[0] if kind == "f32" else bits
            return self.constant(kind, number)
        if kind == "pred":
            return "YES" if int(arg) else "NO"
        return self.constant(kind, int(arg.rstrip("U"), 0))

    def predicate(self, arg: str) -> str:
        """A predicate that is read, negated where it says so."""
        found = self.value(arg.removeprefix("!"), "pred")
        return f"~{found}" if arg.startswith("!") else found

    def row(self, name: str, kind: str) -> str:
        """The row of a register, seen as `kind`."""
        size, row = self.rows[name]
        if size != CLASSES[kind]:
            raise unsupported(name, f"a register of {size} bytes as {kind}", "one of the same size")
        return f"{VIEWS[kind]}[{row}]"

    def bits(self, name: str, signed: bool = False) -> str:
        """The row of a register as integers of its own width."""
        kind = BITS[self.rows[name][0]]
        return self.row(name, kind.replace("u", "s") if signed else kind)

    def base_and_offset(self, arg: str) -> tuple[str, int]:
        """The parts of `[base + offset]`."""
        match = re.match(r"\[\s*([%\w$@]+)\s*(?:\+\s*(-?\w+))?\s*\]", arg)
        if match is None:
            raise unsupported("address", arg, "[register + number]")
        return match[1], int(match[2], 0) if match[2] else 0

    def address(self, arg: str) -> str:
        """`[base + offset]` as a row, of 32 or 64 bits as its base is."""
        base, offset = self.base_and_offset(arg)
        if base in self.kernel.shared:
            return self.constant("u32", ("shared", base, offset))
        if base in self.params:
            return self.constant("u64", ("param", self.params[base] + offset))
        kind = BITS[self.rows[base][0]]
        plus = f" + {self.constant(kind, offset)}" if offset else ""
        return self.row(base, kind) + plus

    def group(self, arg: str) -> list[str]:
        """Operands in braces, or the one that stands alone."""
        return [word.strip() for word in arg.strip("{} ").split(",")]

    def rows_of(self, arg: str, kind: str) -> str:
        """A list of rows that are written."""
        return f"[{', '.join(self.row(name, kind) for name in self.group(arg))}]"

    def values_of(self, arg: str, kind: str) -> str:
        """A list of rows that are read."""
        return f"[{', '.join(self.value(name, kind) for name in self.group(arg))}]"

    def matters(self, name: str, pc: int) -> bool:
        """Whether anything comes of the value that instruction `pc` leaves in a register: more than
        registers from which nothing comes."""
        left, seen = [(name, pc)], {name}
        while left:
            name, maker = left.pop()
            for user in self._named[name]:
                s = self.kernel.code[user]
                made = s.args[0] if s.parts[0] in PLAIN and s.guard is None else ""
                if user != maker and made not in self.rows:
                    return True
                if user != maker and made not in seen:
                    left.append((made, user))
                    seen.add(made)
        return False

    def next_block(self, pc: int) -> int:
        """The block behind instruction `pc`."""
        return self.block_at[pc + 1]

    def lines(self, s: Instruction, pc: int) -> Lines:
        """Python of one instruction, under its guard."""
        handler = HANDLERS.get(s.parts[0])
        try:
            if handler is None:
                raise unsupported("instruction", s.opcode, "see the opcodes of the emulator")
            check(s)
            if _mask(s) and _number(_mask(s)) is None:
                raise unsupported("member mask", _mask(s), "a number, or a register that holds one")
            body = handler(self, s, pc)
        except (KeyError, IndexError, ValueError, TypeError, MlaLabError) as error:
            where = f"{s.text!r} at {s.place}"
            raise unsupported(
                "instruction", f"{where} ({error})", "PTX for sm_90a and sm_100a"
            ) from error
        if s.guard is None or s.parts[0] in ("bra", "ret", "exit"):
            return [line.replace("MASK", "m") for line in body]
        if any(line.startswith("return") for line in body):
            raise unsupported("instruction", f"{s.text!r} under a guard at {s.place}", "a branch")
        if s.opcode.startswith((*BY_WARP, "wgmma.")):
            body = [f"every_member(g, {members_of(s)}, MASK, {pc})", *body]
        guard = f"pm = guard({self.row(s.guard, 'pred')}, m, {s.negated})"
        return [guard, "if pm is not None:", *("  " + line.replace("MASK", "pm") for line in body)]
