"""Registers, stack, shared memory and barriers of the kernels in a cubin, read from the ELF.

No disassembler is needed: `.nv.info` holds (symbol, value) attributes, the size of
`.nv.shared.NAME` is the static shared memory. Attribute codes as `readelf`-style dumps of
`cuobjdump -elf` name them (EIATTR_*).
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

REGCOUNT, FRAME_SIZE, MIN_STACK_SIZE, NUM_BARRIERS, REQNTID = 0x2F, 0x11, 0x12, 0x4C, 0x10
#: attribute formats: no value, one byte, two bytes, and a sized payload
SIZED = 0x04
SYMTAB = 2
FUNCTION = 2


@dataclass(frozen=True)
class KernelResources:
    """Resources of one kernel: registers and stack bytes per thread, the rest per block.

    `barriers` counts named barriers (BAR), not mbarriers. `dynamic_shared` comes from the
    launch; it and `block` are None where they are decided at run time.
    """

    kernel: str
    registers: int
    stack: int
    static_shared: int
    barriers: int
    dynamic_shared: int | None = None
    block: tuple[int, int, int] | None = None

    @property
    def shared(self) -> int:
        """Bytes of shared memory of a block, static and dynamic."""
        return self.static_shared + (self.dynamic_shared or 0)


@dataclass(frozen=True)
class _Section:
    name: str
    kind: int
    offset: int
    size: int
    link: int


def _text(blob: bytes, start: int) -> str:
    return blob[start : blob.index(b"\0", start)].decode()


def sections(elf: bytes) -> list[_Section]:
    """Section headers of a 64-bit little-endian ELF file."""
    (table,) = struct.unpack_from("<Q", elf, 0x28)
    step, count, names_idx = struct.unpack_from("<HHH", elf, 0x3A)
    raw = [struct.unpack_from("<IIQQQQIIQQ", elf, table + i * step) for i in range(count)]
    names = raw[names_idx][4]
    return [_Section(_text(elf, names + r[0]), r[1], r[4], r[5], r[6]) for r in raw]


@dataclass(frozen=True)
class Function:
    """A kernel, or a function that was not inlined, which lies behind its kernel's code."""

    symbol: int
    name: str
    section: str
    #: bytes from the beginning of the section
    offset: int


def functions(elf: bytes) -> list[Function]:
    """Functions of a cubin, in the order of its symbols."""
    found, table = [], sections(elf)
    for section in (s for s in table if s.kind == SYMTAB):
        strings = table[section.link].offset
        for i in range(section.size // 24):
            at = section.offset + 24 * i
            name, info, _, place, value = struct.unpack_from("<IBBHQ", elf, at)
            if info & 0xF == FUNCTION:
                own = table[place].name if place < len(table) else ""
                found.append(Function(i, _text(elf, strings + name), own, value))
    return found


def _attributes(elf: bytes, section: _Section) -> Iterator[tuple[int, bytes]]:
    """(attribute code, payload) of a .nv.info section."""
    at, end = section.offset, section.offset + section.size
    while at + 4 <= end:
        form, code, value = struct.unpack_from("<BBH", elf, at)
        size = value if form == SIZED else 0
        yield code, elf[at + 4 : at + 4 + size] if size else struct.pack("<H", value)
        at += 4 + size


def read_resources(elf: bytes) -> list[KernelResources]:
    """One entry per kernel, in the order of their code in the file."""
    table = sections(elf)
    names = {function.symbol: function.name for function in functions(elf)}
    by_name = {s.name: s for s in table}
    values: dict[str, dict[int, int]] = {}
    if ".nv.info" in by_name:
        for code, payload in _attributes(elf, by_name[".nv.info"]):
            if len(payload) == 8:
                symbol, value = struct.unpack("<II", payload)
                values.setdefault(names.get(symbol, ""), {})[code] = value
    found = []
    for section in table:
        kernel = section.name.removeprefix(".text.")
        if kernel == section.name or f".nv.info.{kernel}" not in by_name:
            continue
        attributes = values.get(kernel, {})
        own = dict(_attributes(elf, by_name[f".nv.info.{kernel}"]))
        shared = by_name.get(f".nv.shared.{kernel}")
        found.append(
            KernelResources(
                kernel=kernel,
                registers=attributes.get(REGCOUNT, 0),
                stack=max(attributes.get(FRAME_SIZE, 0), attributes.get(MIN_STACK_SIZE, 0)),
                static_shared=shared.size if shared else 0,
                barriers=own[NUM_BARRIERS][0] if NUM_BARRIERS in own else 0,
                block=struct.unpack("<3I", own[REQNTID]) if REQNTID in own else None,
            )
        )
    return found
