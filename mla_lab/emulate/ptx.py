"""PTX text as data: kernels, their instructions, and the source line of each instruction.

Inline PTX comes as `{ ... }` blocks with registers and labels of their own, which repeat from block
to block: a name that a block declares becomes `name@block`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from ..core.errors import invalid
from .functions import without_calls

#: bytes of a PTX type
SIZES = {f"{kind}{bits}": bits // 8 for kind in "busf" for bits in (8, 16, 32, 64)}

_PARAM = re.compile(
    r"\.param\s+(?:\.align\s+(\d+)\s+)?\.(\w+)\s+(?:\.ptr[^,)]*?\s)?([\w$]+)(?:\[(\d+)\])?\s*(?:,|$)"
)
_SHARED = re.compile(r"\.shared\s+\.align\s+(\d+)\s+\.(\w+)\s+([\w$]+)(?:\[(\d*)\])?")
_TOKEN = re.compile(
    r"\s*(?:(?P<loc>\.loc\s+[^\n]*)|(?P<label>[\w$]+:(?!:))|(?P<reg>\.reg\s+[^;]+;)"
    r"|(?P<shared>\.shared\s+[^;]+;)|(?P<pragma>\.pragma[^;]*;)|(?P<open>\{)|(?P<close>\})"
    r"|(?P<statement>[^;{}]*(?:\{[^{}]*\}[^;{}]*)*;))"
)
_GUARD = re.compile(r"@(!?)([%\w$]+)\s+")
#: a name in an operand
NAME_IN = re.compile(r"[%\w$@]+")


class Place(NamedTuple):
    """A line of the kernel's source; line 0 where the compiler named none."""

    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


class Parameter(NamedTuple):
    """A kernel parameter and its place in the parameter block, in bytes."""

    name: str
    nbytes: int
    offset: int


@dataclass(slots=True)
class Instruction:
    """One instruction; `parts` are the opcode's words, `args` its operands as text."""

    opcode: str
    args: tuple[str, ...]
    guard: str | None
    negated: bool
    place: Place
    text: str
    parts: tuple[str, ...] = ()
    #: where the statement stands in the module's `bare` text
    span: tuple[int, int] = (0, 0)

    def __post_init__(self) -> None:
        self.parts = tuple(self.opcode.split("."))


@dataclass
class Kernel:
    """One `.entry`."""

    name: str
    params: list[Parameter]
    #: register name -> PTX type
    registers: dict[str, str] = field(default_factory=dict)
    code: list[Instruction] = field(default_factory=list)
    #: label -> index of the instruction behind it
    labels: dict[str, int] = field(default_factory=dict)
    #: shared variable -> (offset, bytes); dynamic memory begins behind the last one
    shared: dict[str, tuple[int, int]] = field(default_factory=dict)
    static_shared: int = 0

    @property
    def param_bytes(self) -> int:
        return self.params[-1].offset + self.params[-1].nbytes if self.params else 0


def shorten(text: str) -> str:
    """PTX whose file names begin at the package, wherever it lay when it was compiled."""
    return re.sub(r'(\.file\s+\d+\s+")[^"]*?/(mla_lab/[^"]+")', r"\1\2", text)


def bare(text: str) -> str:
    """PTX without comments, with short file names, and with functions in place of their calls."""
    text = re.sub(r"/\*.*?\*/", "", re.sub(r"//[^\n]*", "", shorten(text)), flags=re.S)
    return without_calls(text)


def rewritten(text: str, edits: Iterable[tuple[Instruction, Instruction]]) -> str:
    """The PTX of a module with other instructions in some places: (what stands there, instead)."""
    text = bare(text)
    for old, new in sorted(edits, key=lambda edit: edit[0].span, reverse=True):
        guard = f"@{'!' if new.negated else ''}{new.guard} " if new.guard else ""
        line = re.sub(r"@\d+", "", f"{guard}{new.opcode} {', '.join(new.args)};")
        text = text[: old.span[0]] + line + text[old.span[1] :]
    return text


def parse(text: str) -> dict[str, Kernel]:
    """Kernels of a PTX module by name. Raises InvalidInput for text that is no PTX."""
    text = bare(text)
    files = {int(m[1]): m[2] for m in re.finditer(r'\.file\s+(\d+)\s+"([^"]+)"', text)}
    heads = list(re.finditer(r"\.entry\s+([\w$]+)\s*\((.*?)\)[^{]*\{", text, flags=re.S))
    if not heads:
        raise invalid("PTX", f"{len(text)} characters without an .entry", "PTX of a kernel")
    between = text[: heads[0].start()]
    kernels = {}
    for head in heads:
        kernel = Kernel(head[1], _parameters(head[2]))
        _share(kernel, between)
        _Body(kernel, text, head.end(), files).read()
        kernels[kernel.name] = kernel
    return kernels


def _parameters(text: str) -> list[Parameter]:
    params, at = [], 0
    for m in re.finditer(_PARAM, " ".join(text.split())):
        size = SIZES[m[2]]
        nbytes, align = size * int(m[4] or 1), int(m[1] or size)
        at = -(-at // align) * align
        params.append(Parameter(m[3], nbytes, at))
        at += nbytes
    return params


def _share(kernel: Kernel, text: str) -> None:
    """Place the shared variables that `text` declares; those without a size are dynamic."""
    for m in _SHARED.finditer(text):
        nbytes = SIZES[m[2]] * int(m[4] or 1) if m[4] != "" else 0
        start = -(-kernel.static_shared // int(m[1])) * int(m[1]) if nbytes else -1
        kernel.shared[m[3]] = (start, nbytes)
        if nbytes:
            kernel.static_shared = start + nbytes


_BRACKET = re.compile(r"[{\[(]")
_OPERAND = re.compile(r"(?:[^,{\[(]|\{[^}]*\}|\[[^\]]*\]|\([^)]*\))+")


def split_operands(text: str) -> list[str]:
    """Operands at the commas outside brackets."""
    found = _OPERAND.findall(text) if _BRACKET.search(text) else text.split(",")
    return [word for word in map(str.strip, found) if word]


class _Body:
    """Reads the statements between a kernel's braces."""

    def __init__(self, kernel: Kernel, text: str, at: int, files: dict[int, str]) -> None:
        self.kernel, self.text, self.at, self.files = kernel, text, at, files
        #: open blocks: their number, and what the names that they declare mean
        self.scopes: list[tuple[int, dict[str, str]]] = [(0, {})]
        self.blocks = 0
        self.place = Place("?", 0)
        #: (statement, where it stands, numbers of the open blocks, scoped names, place)
        self.statements: list[tuple[str, tuple[int, int], list[int], dict[str, str], Place]] = []

    def read(self) -> None:
        while self.scopes:
            token = _TOKEN.match(self.text, self.at)
            if token is None or token.lastgroup is None:
                raise invalid("PTX", repr(self.text[self.at : self.at + 80].strip()), "a statement")
            self.at = token.end()
            getattr(self, f"_{token.lastgroup}")(token[token.lastgroup])
        for statement, span, blocks, names, place in self.statements:
            made = self._instruction(statement, blocks, names, place)
            made.span = span
            self.kernel.code.append(made)

    def _loc(self, text: str) -> None:
        file, line = text.replace(",", " ").split()[1:3]
        if line != "0":
            self.place = Place(self.files.get(int(file), "?"), int(line))

    def _label(self, text: str) -> None:
        self.kernel.labels[self._scoped(text[:-1])] = len(self.statements)

    def _scoped(self, name: str) -> str:
        return name if len(self.scopes) == 1 else f"{name}@{self.scopes[-1][0]}"

    def _reg(self, text: str) -> None:
        _, kind, names = text.rstrip(";").split(None, 2)
        for name in names.split(","):
            name = name.strip()
            ranged = re.match(r"([%\w$]+)<(\d+)>", name)
            if ranged:
                more = {f"{ranged[1]}{i}": kind[1:] for i in range(int(ranged[2]))}
                self.kernel.registers.update(more)
            else:
                self.scopes[-1][1][name] = self._scoped(name)
                self.kernel.registers[self._scoped(name)] = kind[1:]

    def _shared(self, text: str) -> None:
        _share(self.kernel, text)

    def _pragma(self, text: str) -> None:
        pass

    def _open(self, text: str) -> None:
        self.blocks += 1
        self.scopes.append((self.blocks, {}))

    def _close(self, text: str) -> None:
        self.scopes.pop()

    def _statement(self, text: str) -> None:
        names: dict[str, str] = {}
        for _, scope in self.scopes:
            names.update(scope)
        blocks = [number for number, _ in self.scopes]
        span = (self.at - len(text), self.at)
        self.statements.append((" ".join(text.split()), span, blocks, names, self.place))

    def _instruction(
        self, text: str, blocks: list[int], names: dict[str, str], place: Place
    ) -> Instruction:
        body, guard, negated = text[:-1].strip(), None, False
        predicate = _GUARD.match(body)
        if predicate:
            guard, negated = names.get(predicate[2], predicate[2]), bool(predicate[1])
            body = body[predicate.end() :]
        opcode, _, rest = body.partition(" ")
        args = split_operands(rest)
        if names:
            args = [NAME_IN.sub(lambda m: names.get(m[0], m[0]), a) for a in args]
        if opcode.startswith("bra"):
            near = [args[0] if b == 0 else f"{args[0]}@{b}" for b in reversed(blocks)]
            args = [next((name for name in near if name in self.kernel.labels), args[0])]
        return Instruction(opcode, tuple(args), guard, negated, place, text)
