"""A kernel's basic blocks as Python functions on NumPy rows.

Each register is a row with one element a thread; an instruction is one ufunc call or a call of an
operation in this package. A block's function takes the gang that executes it and a mask of threads
(True for all of them), and returns the number of the next block, EXIT, or BLOCKED where the threads
have to wait and try again.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from ..core.errors import MlaLabError, unsupported
from .ptx import Instruction, Kernel
from .rows import assign, names_in

EXIT, BLOCKED = -2, -1

#: PTX type -> name of the list of row views with that NumPy type
VIEWS = {"u32": "U", "b32": "U", "s32": "S", "f32": "F", "u64": "D", "b64": "D", "s64": "Q"}
VIEWS |= {"u16": "H", "b16": "H", "s16": "I", "f16": "G", "pred": "P"}
NUMPY = {"u8": "uint8", "b8": "uint8", "s8": "int8", "u16": "uint16", "b16": "uint16"}
NUMPY |= {"s16": "int16", "f16": "float16", "u32": "uint32", "b32": "uint32", "s32": "int32"}
NUMPY |= {"f32": "float32", "u64": "uint64", "b64": "uint64", "s64": "int64", "pred": "bool"}
TYPE_BYTES = {kind: 1 if name == "bool" else 0 for kind, name in NUMPY.items()}
TYPE_BYTES |= {k: int(k[1:]) // 8 for k in NUMPY if k != "pred"}
#: registers of each class as plain bits
BITS = {1: "pred", 2: "u16", 4: "u32", 8: "u64"}

#: instructions that may have to wait; each is a block of its own, so that a second try repeats
#: nothing else
WAITS = (
    "wgmma.wait_group",
    "mbarrier.try_wait",
    "mbarrier.test_wait",
    "bar.sync",
    "bar.red",
    "bar.arrive",
    "barrier.sync",
    "barrier.red",
    "barrier.cluster",
    "cp.async.wait",
    "tcgen05.alloc",
)
#: instructions that the live threads of a warp execute together, all or those of a member mask
BY_WARP = (
    *("shfl", "vote", "elect", "redux", "activemask", "bar.warp"),
    *("ldmatrix", "stmatrix", "movmatrix", "mma", "setmaxnreg"),
    *("tcgen05.ld", "tcgen05.st", "tcgen05.wait", "tcgen05.alloc", "tcgen05.dealloc"),
    "tcgen05.relinquish",
)

#: mnemonic -> which operand is the member mask
MEMBERS = {"shfl": 4, "vote": 2, "elect": 1, "redux": 2, "bar": 0}
ALL_LANES = 0xFFFFFFFF

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


class Writer:
    """Operands of a kernel's instructions as Python expressions."""

    def __init__(self, kernel: Kernel, named: list[list[str]]) -> None:
        self.kernel = kernel
        self.rows, self.counts = assign(kernel, named)
        #: (type, value) of each constant row, see `gang.constant_row`
        self.constants: list[tuple[str, Any]] = []
        self._known: dict[tuple[str, Any], int] = {}
        #: static facts of matrix products, by index
        self.products: list[Any] = []
        self.params = {p.name: p.offset for p in kernel.params}
        self.block_at: dict[int, int] = {}

    def constant(self, kind: str, value: Any) -> str:
        """A row of one value: a number, the name of a special register, or a tuple."""
        key = (kind, value)
        if key not in self._known:
            self._known[key] = len(self.constants)
            self.constants.append(key)
        return f"K[{self._known[key]}]"

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

    def row(self, name: str, kind: str) -> str:
        """The row of a register, seen as `kind`."""
        size, row = self.rows[name]
        if size != TYPE_BYTES[kind]:
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

    def next_block(self, pc: int) -> int:
        """The block behind instruction `pc`."""
        return self.block_at[pc + 1]

    def lines(self, s: Instruction, pc: int) -> Lines:
        """Python of one instruction, under its guard."""
        handler = HANDLERS.get(s.parts[0])
        try:
            if handler is None:
                raise unsupported("instruction", s.opcode, "see the opcodes of the emulator")
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
        guard = f"pm = guard({self.row(s.guard, 'pred')}, m, {s.negated})"
        return [guard, "if pm is not None:", *("  " + line.replace("MASK", "pm") for line in body)]


class Program:
    """A translated kernel: one Python function a basic block."""

    def __init__(self, kernel: Kernel, by_line: bool = False) -> None:
        """by_line: a new source line begins a new block, for a debugger to stop at."""
        #: instructions that `without` has taken out
        self.gone: frozenset[int] = frozenset()
        _environment()  # registers the handlers of all instructions
        self.kernel = kernel
        #: registers that each instruction names
        self.named = [names_in(s, kernel.registers) for s in kernel.code]
        self.writer = Writer(kernel, self.named)
        self.starts = _leaders(kernel, by_line)
        self.ends = [*self.starts[1:], len(kernel.code)]
        self.writer.block_at = {start: n for n, start in enumerate(self.starts)}
        #: lanes that a block's instructions need together, a bit each
        self.members = [self._members(n) for n in range(len(self.starts))]
        self.waits = [self._any(n, WAITS) for n in range(len(self.starts))]
        self.by_group = [self._any(n, ("wgmma",)) for n in range(len(self.starts))]
        sources = [self.block_source(n) for n in range(len(self.starts))]
        self.blocks = _functions(sources, self.writer.products)

    def _any(self, block: int, opcodes: tuple[str, ...]) -> bool:
        code = self.kernel.code[self.starts[block] : self.ends[block]]
        return any(s.opcode.startswith(opcodes) for s in code)

    def _members(self, block: int) -> int:
        code = self.kernel.code[self.starts[block] : self.ends[block]]
        found = 0
        for s in code:
            if s.opcode.startswith(BY_WARP):
                found |= members_of(s)
        return found

    def block_source(self, block: int, without: int = -1) -> str:
        """Python of a block, perhaps `without` the instruction at that index."""
        lines: Lines = []
        for pc in range(self.starts[block], self.ends[block]):
            if pc != without:
                lines += self.writer.lines(self.kernel.code[pc], pc)
        text = "\n".join(lines)
        views = [v for v in "USFDQHIGPK" if f"{v}[" in text]
        head = f"def b{block}(g, m):"
        if views:
            head += "\n  " + "; ".join(f"{v} = g.{v}" for v in views)
        if not lines or not lines[-1].startswith("return"):
            last = self.ends[block] == len(self.kernel.code)
            lines.append("return EXIT" if last else f"return {block + 1}")
        return "\n".join([head, *("  " + line for line in lines)])

    def without(self, pc: int, instead: str = "") -> Program:
        """This program with one instruction gone, or replaced by a line of Python."""
        import copy

        other = copy.copy(self)
        block = max(n for n, start in enumerate(self.starts) if start <= pc)
        source = self.block_source(block, without=pc)
        if instead:
            head, _, rest = source.partition("\n")
            views = "; ".join(f"{v} = g.{v}" for v in "USFDQHIGPK")
            source = "\n".join([head, f"  {views}", f"  {instead}", rest])
        other.blocks, other.gone = list(self.blocks), self.gone | {pc}
        (other.blocks[block],) = _functions([source], self.writer.products)
        return other

    def edited(self, edits: dict[int, Instruction]) -> Program:
        """This program with other instructions in some places; its blocks stay where they are."""
        import copy

        other = copy.copy(self)
        other.kernel = copy.copy(self.kernel)
        other.kernel.code = [edits.get(pc, s) for pc, s in enumerate(self.kernel.code)]
        other.named = [
            names_in(edits[pc], self.kernel.registers) if pc in edits else names
            for pc, names in enumerate(self.named)
        ]
        other.blocks, other.waits = list(self.blocks), list(self.waits)
        for block, (start, end) in enumerate(zip(self.starts, self.ends, strict=True)):
            if any(start <= pc < end for pc in edits):
                source = other.block_source(block)
                (other.blocks[block],) = _functions([source], self.writer.products)
                other.waits[block] = other._any(block, WAITS)
        return other


def members_of(s: Instruction) -> int:
    """Lanes that an instruction of `BY_WARP` needs, a bit each; all where a register has them."""
    at = MEMBERS.get(s.parts[0], len(s.args))
    words = s.args[at] if at < len(s.args) else ""
    try:
        return int(words.rstrip("U"), 0) & ALL_LANES
    except ValueError:
        return ALL_LANES


def _leaders(kernel: Kernel, by_line: bool) -> list[int]:
    leaders = {0, *kernel.labels.values()}
    for i, s in enumerate(kernel.code):
        if s.parts[0] in ("bra", "ret", "exit", "trap"):
            leaders.add(i + 1)
        if s.opcode.startswith(WAITS):
            leaders |= {i, i + 1}
        if by_line and s.place != kernel.code[i - 1].place:
            leaders.add(i)
    return sorted(i for i in leaders if i < len(kernel.code))


@lru_cache(maxsize=1)
def _environment() -> dict[str, Any]:
    """What the generated code may call."""
    from . import operations

    return {**operations.names(), "EXIT": EXIT}


def _functions(sources: list[str], products: list[Any]) -> list[Callable[..., int]]:
    """A function of each block, compiled when it is first executed: many never are."""
    names = {**_environment(), "PRODUCTS": products}

    def function(source: str) -> Callable[..., int]:
        made: list[Callable[..., int]] = []

        def block(g: Any, m: Any) -> int:
            if not made:
                found: dict[str, Any] = {}
                exec(compile(source, "<ptx>", "exec"), names, found)
                made.extend(found.values())
            return made[0](g, m)

        return block

    return [function(source) for source in sources]
