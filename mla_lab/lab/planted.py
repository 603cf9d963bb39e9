"""Planted bugs: what this emulator's checks and compute-sanitizer's tools report of each.

    mla-lab verify planted RECORD --pack FOLDER    anywhere with ptxas: our checks; what a card runs
    python mla_lab/verify/planted_tools.py FOLDER ROWS    on a card: its tools on the same
    mla-lab verify planted RECORD --rows ROWS      anywhere: both in one record

A bug is a kernel of ours with a few instructions changed, or a model of a dozen lines. Each runs
with the bug and without it, where a tool must be silent.
"""

from __future__ import annotations

import base64
import json
import re
import shutil
import subprocess
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..core import files
from ..core.errors import unsupported
from ..emulate import EmulatedKernel, Options
from ..emulate.device import Device
from ..emulate.direct import ptx_kernel
from ..emulate.host import DeviceTensor
from ..emulate.ptx import rewritten
from ..emulate.recorded import pack_launch
from ..verify.planted_tools import CUBIN, FACTS, TOOLS
from ..verify.record import Row, head_row
from . import film, film_breaks
from .museum_models import MODELS, Q_BEGIN, START, Model, findings, module
from .planted_models import MORE

#: bugs of the debugger's kernel: keep_ab, bf16, one CTA
BREAKS = (
    "delete the arrive that frees a stage",
    "delete the wait for a free stage",
    "free a stage early",
    "delete the proxy fences behind P",
    "delete the wait for S",
    "count four arrivals for eight",
)
#: bugs of models: the museum's, and more
PLANTED = MODELS | MORE
SINK_WORDS = 256
#: what stores the sum of each thread's loads
SINK = """ld.param.u64 %d10, [c]; mov.u32 %r38, %ctaid.x; mov.u32 %r37, %ntid.x;
mov.u32 %r36, %tid.x; mad.lo.s32 %r38, %r38, %r37, %r36; mul.wide.u32 %d11, %r38, 4;
add.s64 %d10, %d10, %d11; st.global.b32 [%d10], %r39;
ret;"""
MENDED = "-mended"
#: PTX version that ptxas of CUDA 13.0 reads
VERSION = ".version 9.0"


@dataclass(frozen=True)
class Case:
    """A kernel that is planted, or mended: its PTX, a call's arguments, which of them it writes."""

    kernel: EmulatedKernel
    args: tuple[Any, ...]
    results: tuple[int, ...]


def names() -> list[str]:
    """All planted bugs."""
    return [*BREAKS, *PLANTED]


def case(name: str, broken: bool) -> Case:
    """A bug, or the same kernel without it."""
    if name in BREAKS:
        return _real(film_breaks.named(name) if broken else None)
    return _model(PLANTED[name], broken)


def what(name: str) -> tuple[str, str]:
    """Where a bug is planted, and what it is."""
    if name in BREAKS:
        return "keep_ab, bf16", film_breaks.named(name).sentence
    return "a model", PLANTED[name].sentence


def _real(change: film_breaks.Break | None) -> Case:
    recording = film.recording()
    text = recording.text
    if change:
        code = film.program().kernel.code
        text = rewritten(text, [(code[pc], new) for pc, new in change.edits().items()])
    kernel = EmulatedKernel(text, recording.function, recording)
    return Case(kernel, recording.call().args, (2, 3))


def _model(planted: Model, broken: bool) -> Case:
    """A model whose loads count: their sum goes to a third tensor, so that none is left out."""
    body = planted.broken if broken else planted.mended
    lines = [_used(line) for line in f"{START}\n{body.strip()}".splitlines()]
    ptx = module(lines, "abc", "model.ptx", "mov.b32 %r39, 0;", SINK)
    kernel = ptx_kernel(ptx, "k", planted.launch)
    kernel.names = ("data", "q_begin", "sums")
    data = torch.empty(64) if planted.unwritten and broken else torch.zeros(64)
    sums = torch.zeros(SINK_WORDS, dtype=torch.int32)
    return Case(kernel, (data, torch.tensor(Q_BEGIN, dtype=torch.int32), sums), (2,))


def _used(line: str) -> str:
    return re.sub(
        r"(ld\.(?:shared|global)\S*\.b32 (%r\d+), \[[^]]+\];)", r"\1 add.s32 %r39, %r39, \2;", line
    )


def ours(name: str, broken: bool) -> list[str]:
    """What our checks say: each finding, and the fault that ended the run."""
    made = case(name, broken)
    made.kernel.options = Options("exact", check=True)
    return [str(found) for found in findings(made.kernel, *made.args)]


def pack(folder: Path) -> None:
    """What a card runs: of each bug, planted and mended, machine code, launch and tensors."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in names():
        for broken in (True, False):
            file = _file(name, broken)
            if (folder / (file + FACTS)).exists():
                continue
            made = case(name, broken)
            _assemble(made.kernel.text, folder / (file + CUBIN))
            (folder / (file + FACTS)).write_text(json.dumps(_facts(made, name, broken)))


def _file(name: str, broken: bool) -> str:
    """Its files' name; all bugs of the kernel share the kernel without them."""
    if name in BREAKS and not broken:
        return "keep-ab" + MENDED
    return re.sub(r"\W+", "-", name) + ("" if broken else MENDED)


def _assemble(text: str, cubin: Path) -> None:
    ptxas = shutil.which("ptxas")
    if ptxas is None:
        raise unsupported("pack", "no ptxas", "a CUDA toolkit on PATH")
    source = cubin.with_suffix(".ptx")
    source.write_text(re.sub(r"\.version \d+\.\d+", VERSION, text))
    line = [ptxas, "-arch=sm_90a", "-lineinfo", str(source), "-o", str(cubin)]
    done = subprocess.run(line, capture_output=True, text=True)
    source.unlink()
    if done.returncode:
        raise unsupported("pack", done.stderr[-300:], "PTX that assembles")


def _facts(made: Case, name: str, broken: bool) -> dict[str, Any]:
    """The launch and the tensors of a case."""
    device = Device()
    placed = device.place(made.args)
    (launch,) = made.kernel.host.launches(made.kernel.function, placed, made.kernel.sizes)
    unwritten = name in PLANTED and PLANTED[name].unwritten and broken
    tensors: list[dict[str, Any]] = []
    where: dict[int, int] = {}
    for index, arg in enumerate(placed):
        if isinstance(arg, DeviceTensor):
            region = next(r for r in device.memory.regions if r.offset == arg.offset)
            data = device.memory.bytes[region.offset : region.offset + region.nbytes].tobytes()
            packed = base64.b64encode(zlib.compress(data, 9)).decode()
            where[index] = len(tensors)
            tensors.append(
                {
                    "offset": region.offset,
                    "nbytes": region.nbytes,
                    "data": "" if not data or (unwritten and index == 0) else packed,
                }
            )
    return {
        **pack_launch(launch),
        "tensors": tensors,
        "results": [where[index] for index in made.results],
    }


def rows(tools: Sequence[dict[str, Any]]) -> list[Row]:
    """A row a bug: our findings, and what each tool made of it, planted and mended."""
    head = head_row("planted", "cpu", len(names()))
    if tools:
        head["tools"] = tools[0]
    for tool_row in tools[1:]:
        files.check(tool_row, {"name": str, "tool": str}, "--rows")
    by_run = {(row["name"], row["tool"]): row for row in tools[1:]}
    made = [head]
    for name in names():
        place, sentence = what(name)
        row: Row = {"kind": "case", "name": name, "where": place, "what": sentence}
        for key, broken in (("planted", True), ("mended", False)):
            found = {tool: by_run.get((_file(name, broken), tool)) for tool in TOOLS}
            row[key] = {"ours": ours(name, broken)}
            row[key] |= {tool: _kept(said) for tool, said in found.items() if said}
        made.append(row)
    return made


def _kept(row: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in row.items() if key not in ("kind", "name", "tool")}
