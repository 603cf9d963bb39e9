"""Reports as text, for a terminal."""

from __future__ import annotations

from linecache import getline
from pathlib import Path

from ..jit.arch import label
from ..jit.code_size import ROOM
from .opcodes import OTHER, PTX_CLASSES, SASS_CLASSES
from .report import Change, KernelReport, Report

#: opcodes of these classes are listed one by one
LISTED = ("matrix", "tma", "tensor memory", "local", "special function", "register file")


def render(report: Report) -> str:
    """A summary: resources, instruction classes, and the opcodes of the main classes."""
    artifact = report.artifact
    lines = [f"{artifact.config.name()} for {label(artifact.arch)}"]
    if not report.has_sass:
        lines.append("counts are PTX: no nvdisasm here (`pip install nvidia-cuda-nvdisasm`)")
    for kernel in report.kernels:
        lines += ["", *_kernel(kernel)]
    return "\n".join(lines)


def _kernel(kernel: KernelReport) -> list[str]:
    r = kernel.resources
    dynamic = "run time" if r.dynamic_shared is None else f"{r.dynamic_shared:,}"
    block = "run time" if r.block is None else "x".join(map(str, r.block))
    lines = [
        kernel.name,
        f"  registers {r.registers}   block {block}   named barriers {r.barriers}"
        + (", 0 included" if r.barriers else "")
        + f"   mbarriers {kernel.mbarriers}",
        *_roles(kernel),
        f"  shared memory: static {r.static_shared:,} B, dynamic {dynamic}"
        + (" B" if r.dynamic_shared is not None else ""),
        f"  stack {r.stack} B   local memory accesses {kernel.spills}"
        + ("   SPILLS" if kernel.spills else "")
        + ("   MMAS SERIALIZED" if kernel.serialized else ""),
        *_code(kernel),
        "",
    ]
    order = [*(SASS_CLASSES if kernel.instructions else PTX_CLASSES), OTHER]
    counted = [(kind, kernel.classes[kind]) for kind in order if kernel.classes[kind]]
    lines += [f"  {count:6d}  {kind}" for kind, count in counted]
    lines.append(f"  {sum(count for _, count in counted):6d}  instructions")
    chosen = sorted({(i.opcode, i.kind) for i in kernel.instructions if i.kind in LISTED})
    if chosen:
        lines.append("")
        lines += [f"  {kernel.opcodes[opcode]:6d}  {opcode}" for opcode, _ in chosen]
    return lines


def _roles(kernel: KernelReport) -> list[str]:
    named = "   ".join(f"{role.name} {role.registers}" for role in kernel.roles)
    return [f"  registers named by role: {named}"] if named else []


def _code(kernel: KernelReport) -> list[str]:
    """The size of the machine code, where it is known."""
    beyond = "   beyond what launches without loss" if kernel.code_bytes > ROOM else ""
    return [f"  machine code {kernel.code_bytes:,} B{beyond}"] if kernel.code_bytes else []


def render_changes(changes: list[Change]) -> str:
    """A table of the differences."""
    if not changes:
        return "  no difference"
    width = max(len(c.fact) for c in changes)
    rows = [f"  {'':{width}s} {'before':>9s} {'after':>9s} {'change':>9s}"]
    rows += [
        f"  {c.fact:{width}s} {c.before:9,d} {c.after:9,d} {c.after - c.before:+9,d}"
        for c in changes
    ]
    return "\n".join(rows)


def render_sass(kernel: KernelReport, kinds: frozenset[str] = frozenset()) -> str:
    """SASS listing, each source line above its instructions; `kinds` selects classes."""
    lines, source = [f"{kernel.name}:"], None
    for instruction in kernel.instructions:
        if kinds and instruction.kind not in kinds:
            continue
        if instruction.source and instruction.source != source:
            source = instruction.source
            lines.append(f"{Path(source[0]).name}:{source[1]}  {getline(*source).strip()}")
        lines.append(f"    {instruction}")
    return "\n".join(lines)
