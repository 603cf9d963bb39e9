"""Step through a kernel: blocks, source lines, breakpoints, registers, barriers, tiles."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ..core.errors import invalid
from .arithmetic import E4M3, from_bf16
from .gang import Fragment, Gang
from .machine import CTA, Machine
from .memory import RESERVED
from .ptx import Place
from .rows import CLASSES
from .tensor_memory import COLUMNS, tensor_memory_of
from .tiles import swizzle
from .writer import VIEWS

#: blocks after which a search for a breakpoint gives up
MOST_BLOCKS = 10_000_000
#: bytes of a swizzled row -> mode of matrix descriptors
SWIZZLES = {0: 0, 128: 1, 64: 2, 32: 3}
ELEMENTS = {"bf16": 2, "fp16": 2, "fp32": 4, "int32": 4, "e4m3": 1, "uint8": 1}


class Debugger:
    """Runs a launch that has begun (`Machine.begin`) block by block."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.gangs = [g for cta in machine.ctas for g in cta.gangs]
        #: (end of a file's name, line)
        self.breakpoints: set[tuple[str, int]] = set()
        self._turn = 0

    @property
    def ended(self) -> bool:
        """Whether all threads have exited."""
        return not any(g.fragments for g in self.gangs)

    def _cta(self, number: int) -> CTA:
        count = len(self.machine.ctas)
        if not 0 <= number < count:
            raise invalid("cta", number, f"0 to {count - 1}")
        return self.machine.ctas[number]

    def warp(self, number: int, cta: int = 0) -> Gang:
        """The gang that holds a warp of a CTA."""
        found = [g for g in self._cta(cta).gangs if g.first <= 32 * number < g.first + g.n]
        if not found:
            raise invalid("warp", number, f"a warp of CTA {cta}")
        return found[0]

    def place(self, g: Gang) -> list[tuple[Place, int, str]]:
        """Where a gang's threads stand: source line, how many threads, and the instruction."""
        code, starts = g.cta.program.kernel.code, g.cta.program.starts
        return [
            (code[starts[f.block]].place, _count(g, f), code[starts[f.block]].text)
            for f in g.fragments
        ]

    def step(self, g: Gang | None = None) -> Gang | None:
        """Run one block of a gang, or of the next one that can go on; who it was.

        None when nobody moved: all have exited, or `g` waits. Raises Fault as `Machine.round`.
        """
        with np.errstate(all="ignore"):
            for _ in range(len(self.gangs)):
                one = g or self.gangs[self._turn % len(self.gangs)]
                self._turn += g is None
                if one.fragments and one.run(1):
                    return one
                if g is not None:
                    return None
        if not self.ended:
            self.machine.round()
        return None

    def run_to(self, when: Callable[[Gang], bool]) -> Gang | None:
        """Step until a gang that has just moved fulfils a condition; None when all have exited."""
        for _ in range(MOST_BLOCKS):
            moved = self.step()
            if moved is not None and when(moved):
                return moved
            if moved is None and self.ended:
                self.machine.finish()
                return None
        return None

    def go(self) -> Gang | None:
        """Run to the next breakpoint; who stands there, or None at the end."""
        return self.run_to(lambda g: any(self._breaks(g, f) for f in g.fragments))

    def run_to_line(self, file: str, line: int) -> Gang | None:
        """Run until somebody stands before a line of a file, named by its end."""
        self.breakpoints.add((file, line))
        found = self.go()
        self.breakpoints.discard((file, line))
        return found

    def _breaks(self, g: Gang, f: Fragment) -> bool:
        program = g.cta.program
        code = program.kernel.code[program.starts[f.block] : program.ends[f.block]]
        places = {s.place for s in code}
        return any(
            p.line == n and p.file.endswith(file) for file, n in self.breakpoints for p in places
        )

    def register(self, g: Gang, name: str, kind: str = "u32") -> np.ndarray:
        """Values of a PTX register in all threads of a gang; undefined where it is not live."""
        rows = g.cta.program.writer.rows
        if name not in rows:
            raise invalid("register", name, "a register of the kernel")
        size, row = rows[name]
        if kind not in VIEWS or CLASSES[kind] != size:
            raise invalid("kind", kind, sorted(k for k in VIEWS if CLASSES[k] == size))
        return np.array(getattr(g, VIEWS[kind])[row])

    def barriers(self, cta: int = 0) -> list[dict[str, Any]]:
        """State of a CTA's mbarriers."""
        names = ("phase", "pending", "expected", "bytes")
        return [
            {"offset": bar.offset - RESERVED, **{name: getattr(bar, name) for name in names}}
            for bar in self._cta(cta).mbarriers.values()
        ]

    def tile(
        self, offset: int, shape: tuple[int, int], kind: str = "bf16", span: int = 128, cta: int = 0
    ) -> np.ndarray:
        """A tile of shared memory as its matrix [rows, columns], rows of `span` bytes swizzled.

        span 0: rows follow each other plainly.
        """
        if kind not in ELEMENTS or span not in SWIZZLES:
            raise invalid("kind, span", (kind, span), (sorted(ELEMENTS), sorted(SWIZZLES)))
        owner = self._cta(cta)
        rows, columns = shape
        size = ELEMENTS[kind]
        width = span or columns * size
        byte = np.arange(columns)[None, :] * size
        # columns beyond a row of the swizzle lie in further boxes of as many rows
        linear = np.arange(rows)[:, None] * width + byte % width + byte // width * rows * width
        at = swizzle(RESERVED + offset + linear, SWIZZLES[span])
        room = owner.shared.size - RESERVED
        if offset < 0 or offset % size or min(shape) < 1 or at.max() + size > owner.shared.size:
            supported = f"whole elements inside of {room} bytes of shared memory"
            raise invalid("offset, shape", (offset, shape), supported)
        return _seen_as(owner.shared.views[size][at // size], kind)

    def tensor_memory(
        self, column: int, columns: int, kind: str = "fp32", cta: int = 0
    ) -> np.ndarray:
        """Columns of SM100's tensor memory, [128 lanes, elements]; what nobody wrote is NaN."""
        if kind not in ELEMENTS or not 0 <= column <= column + columns <= COLUMNS:
            raise invalid("kind, columns", (kind, column, columns), (sorted(ELEMENTS), COLUMNS))
        words = tensor_memory_of(self._cta(cta)).words[:, column : column + columns]
        return _seen_as(np.ascontiguousarray(words).view(f"u{ELEMENTS[kind]}"), kind)


def _seen_as(words: np.ndarray, kind: str) -> np.ndarray:
    if kind == "e4m3":
        return E4M3[words]
    if kind == "bf16":
        return from_bf16(words)
    plain = {"fp16": np.float16, "fp32": np.float32, "int32": np.int32}
    return words.view(plain[kind]) if kind in plain else words


def _count(g: Gang, f: Fragment) -> int:
    return g.n if f.mask is True else int(f.mask.sum())
