"""One cached token, byte by byte, in each format."""

from __future__ import annotations

from typing import Any

from ...core.kv_cache import SCALE_GROUP, token_bytes
from .. import explorer
from ..eight_bits import Field, field_at, fields
from ..source import formula
from ..svg import Cell, Svg, box, document, label, tint

FORMATS = {"bf16": "bf16", "656 bytes": "fp8_656", "e4m3": "e4m3"}
_TINTS = {"latent": 0, "scale": 1, "rope": 2}
_LEFT, _WIDTH = 90.0, 922.0
#: bytes of the line that is drawn large
LINE = 16


def describe(kv_format: str, byte: int) -> str:
    """What `byte` of a token is part of, in words."""
    field = field_at(kv_format, byte)
    element = field.element(byte)
    if field.part == "scale":
        first = element * SCALE_GROUP
        return f"fp32 scale {element}, of latent columns {first} to {first + SCALE_GROUP - 1}"
    dtype = {1: "e4m3", 2: "bf16"}[field.size]
    return f"{field.part} column {element}, {dtype}"


class TokenExplorer(explorer.Explorer):
    """A token in three formats on one scale; below, sixteen bytes of the chosen one."""

    source = formula("formats of the cache")
    frames_over = "kv_format"

    knobs = explorer.knobs(
        kv_format=explorer.choice("format", tuple(FORMATS), "656 bytes", "220px"),
        byte=explorer.integers("byte", 0, token_bytes("bf16") - 1, 520, width="420px"),
    )

    def figure(self, state: dict[str, Any]) -> Svg:
        chosen = FORMATS[state["kv_format"]]
        size = token_bytes(chosen)
        byte = min(state["byte"], size - 1)
        share = size / token_bytes("bf16")
        finding = f"{size} bytes a token, {share:.2f} of bf16; byte {byte}: "
        finding += describe(chosen, byte)
        parts = [label(0, 12, finding, size=16, anchor="start")]
        for row, (name, kv_format) in enumerate(FORMATS.items()):
            parts.append(_bar(34 + 46 * row, name, kv_format, kv_format == chosen))
        y = 34 + 46 * len(FORMATS) + 30
        parts.append(_line(y, chosen, byte))
        return document(_LEFT + _WIDTH + 60, y + 44, "".join(parts), finding)

    def note(self, state: dict[str, Any]) -> str:
        own = fields(FORMATS[state["kv_format"]])
        sizes: dict[str, int] = {}
        for field in own:
            sizes[field.part] = sizes.get(field.part, 0) + field.end - field.begin
        words = " + ".join(f"{count} ({part})" for part, count in sizes.items())
        return f"<div>{words} = {sum(sizes.values())} bytes.</div>"


def _bar(y: float, name: str, kv_format: str, chosen: bool) -> str:
    scale = _WIDTH / token_bytes("bf16")
    parts = [label(_LEFT - 8, y + 16, name, size=13, anchor="end")]
    for field in fields(kv_format):
        width = (field.end - field.begin) * scale
        title = f"{field.part}, bytes {field.begin} to {field.end - 1}, {field.size} each"
        text = field.part if width > 40 else ""
        cell = Cell(text, tint(_TINTS[field.part]), title, chosen)
        parts.append(box(_LEFT + field.begin * scale, y, width, 32, cell))
    size = token_bytes(kv_format)
    parts.append(label(_LEFT + size * scale + 8, y + 16, str(size), size=13, anchor="start"))
    return "".join(parts)


def _line(y: float, kv_format: str, byte: int) -> str:
    """The sixteen aligned bytes around `byte`; elements of several bytes are one cell."""
    begin = byte // LINE * LINE
    title = f"bytes {begin} to {begin + LINE - 1}"
    parts = [label(_LEFT, y - 12, title, size=13, anchor="start")]
    at, step = begin, _WIDTH / LINE
    while at < begin + LINE:
        field: Field = field_at(kv_format, at)
        short = {"latent": "c", "scale": "s", "rope": "r"}[field.part] + str(field.element(at))
        cell = Cell(
            short,
            tint(_TINTS[field.part]),
            f"bytes {at} to {at + field.size - 1}: {describe(kv_format, at)}",
            at <= byte < at + field.size,
        )
        parts.append(box(_LEFT + (at - begin) * step, y, field.size * step, 36, cell))
        at += field.size
    return "".join(parts)
