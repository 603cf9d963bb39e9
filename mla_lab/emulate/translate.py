"""A kernel's basic blocks as Python functions.

A block's function takes the gang that executes it and a mask of threads (True for all of them), and
returns the number of the next block, EXIT, or BLOCKED where the threads have to wait and try again.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np

from . import access, arithmetic, barriers, copies, lanes, tcgen05, tensor_memory, wgmma
from .gang import Mask
from .ptx import Instruction, Kernel
from .rows import names_in
from .writer import BY_WARP, EXIT, Lines, Writer, members_of, with_masks

#: importing them registers the handlers of all instructions
from . import emit_arithmetic, emit_control, emit_memory, emit_tcgen05  # noqa: F401  isort: skip

#: names that generated code calls: NumPy's, and the operations of this package
_NUMPY = (
    "copyto add subtract multiply divide maximum minimum fmax fmin bitwise_and bitwise_or "
    "bitwise_xor bitwise_count logical_and logical_or logical_xor logical_not equal not_equal less "
    "less_equal greater greater_equal left_shift right_shift invert negative absolute rint floor "
    "ceil trunc fmod sqrt bool uint8 int8 uint16 int16 float16 uint32 int32 float32 uint64 int64"
)
_MODULES = (access, arithmetic, barriers, copies, lanes, tcgen05, tensor_memory, wgmma)

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
#: loads that see what others store while a block repeats them
SHARED_LOADS = ("ld.acquire", "ld.relaxed", "ld.volatile")

ASKS = (*SHARED_LOADS, "mbarrier.try_wait", "mbarrier.test_wait", "atom")


class Program:
    """A translated kernel: one Python function a basic block."""

    def __init__(self, kernel: Kernel, by_line: bool = False) -> None:
        """by_line: a new source line begins a new block, for a debugger to stop at."""
        self.kernel = kernel = with_masks(kernel)
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
        #: a turn ends where such a block repeats: within it nobody else can store anything
        self.polls = [self._any(n, SHARED_LOADS) for n in range(len(self.starts))]
        #: whether a block asks for what others leave: threads that never do so do not spin
        self.asks = [self._any(n, ASKS) for n in range(len(self.starts))]
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

    def block_source(self, block: int) -> str:
        """Python of a block."""
        lines: Lines = []
        for pc in range(self.starts[block], self.ends[block]):
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

    def edited(self, edits: dict[int, Instruction]) -> Program:
        """This program with other instructions in some places; its blocks stay where they are."""
        other = copy.copy(self)
        other.kernel = copy.copy(self.kernel)
        other.kernel.code = [edits.get(pc, s) for pc, s in enumerate(self.kernel.code)]
        other.named = [
            names_in(edits[pc], self.kernel.registers) if pc in edits else names
            for pc, names in enumerate(self.named)
        ]
        other.blocks, other.waits = list(self.blocks), list(self.waits)
        other.polls, other.asks = list(self.polls), list(self.asks)
        for block, (start, end) in enumerate(zip(self.starts, self.ends, strict=True)):
            if any(start <= pc < end for pc in edits):
                source = other.block_source(block)
                (other.blocks[block],) = _functions([source], self.writer.products)
                other.waits[block] = other._any(block, WAITS)
                other.polls[block] = other._any(block, SHARED_LOADS)
                other.asks[block] = other._any(block, ASKS)
        return other


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


def _functions(sources: list[str], products: list[Any]) -> list[Callable[..., int]]:
    """A function of each block, compiled when it is first executed: many never are."""
    names = {**_named(), "EXIT": EXIT, "PRODUCTS": products}

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


def guard(flags: np.ndarray, m: Mask, negated: bool) -> Mask:
    """Threads of a mask whose predicate holds; None where there are none, True for all."""
    if m is True:
        raw = flags.tobytes()
        if 0 not in raw:
            return None if negated else True
        if 1 not in raw:
            return True if negated else None
        return ~flags if negated else flags.copy()
    found = (~flags if negated else flags) & m
    return found if 1 in found.tobytes() else None


def _named() -> dict[str, Any]:
    """What generated code sees."""
    found = {name: getattr(np, name) for name in _NUMPY.split()}
    for module in _MODULES:
        functions = vars(module).items()
        found |= {k: v for k, v in functions if callable(v) and not k.startswith("_")}
    found |= {"guard": guard, "pick": np.where}
    return {**found, "YES": np.ones(1, bool), "NO": np.zeros(1, bool)}
