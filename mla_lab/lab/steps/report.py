"""What a notebook shows of a step: its code, and a report of what became of it."""

from __future__ import annotations

from collections import Counter
from html import escape

from IPython.display import HTML

from ...xray import KernelReport
from ...xray.opcodes import OTHER, ptx_class
from ...xray.render import LISTED
from ..tables import Table, table
from .compiled import DoesNotCompile
from .kernel import StepKernel, solution

#: opcodes of the machine code, and of the change of PTX, that a report lists
MOST_OPCODES, MOST_CHANGES = 8, 10
_WARN = "border-left:5px solid #D55E00;padding:4px 10px;margin:4px 0"
_GOOD = "border-left:5px solid #009E73;padding:4px 10px;margin:4px 0"


def report(kernel: StepKernel) -> HTML:
    """Registers, spills, machine code, PTX against the step before, and hazards of a kernel."""
    if kernel.unfinished:
        names = ", ".join(f"<code>{name}</code>" for name in kernel.unfinished)
        return HTML(f"<div style='{_WARN}'>Nothing to report yet: {names} still to write.</div>")
    try:
        found = kernel.xray
    except DoesNotCompile as error:
        return HTML(f"<div style='{_WARN}'><b>Not compiled.</b> {escape(str(error))}</div>")
    parts = [_hazards(kernel), facts_table(kernel)._repr_html_()]
    parts.append(machine_table(found)._repr_html_())
    if kernel.step.before:
        parts.append(change_table(kernel)._repr_html_())
    style = "display:flex;flex-wrap:wrap;gap:8px 30px;align-items:flex-start"
    blocks = "".join(f"<div>{part}</div>" for part in parts[1:])
    return HTML(f"{parts[0]}<div style='{style}'>{blocks}</div>")


def _hazards(kernel: StepKernel) -> str:
    """The emulator's verdict."""
    hazards = [escape(words) for words in kernel.hazards()]
    hazards += [escape(str(wrong)) for wrong in kernel.outcome.wrong]
    if not hazards:
        runs = " and ".join(o.schedule for o in kernel.outcomes)
        under = f"under the schedule{'s' * (len(kernel.outcomes) > 1)} {runs}"
        text = f"Right numbers, no race, no hazard, {under}."
        return f"<div style='{_GOOD}'><b>Emulated.</b> {text}</div>"
    items = "".join(f"<li>{words}</li>" for words in hazards[:4])
    more = f"<div>and {len(hazards) - 4} more</div>" if len(hazards) > 4 else ""
    return f"<div style='{_WARN}'><b>Emulated, with hazards.</b><ul>{items}</ul>{more}</div>"


def facts_table(kernel: StepKernel) -> Table:
    """Resources of the compiled kernel, and what its emulated run did."""
    found, run = kernel.xray, kernel.outcomes[0].run
    launches = run.launches
    shared = launches[0].shared_bytes if launches else 0
    rows = [
        ("registers a thread", found.resources.registers),
        ("spills", found.spills),
        ("shared memory, bytes", shared),
        ("machine instructions", sum(found.classes.values())),
        ("emulated thread instructions", run.instructions),
        ("bytes copied by TMA", run.copied_bytes),
        ("multiply-adds of wgmma", run.flops // 2),
    ]
    return table(("of this kernel", ""), rows)


def machine_table(found: KernelReport) -> Table:
    """Opcodes of the classes that tell kernels apart, most frequent first."""
    kinds = {*LISTED, "barrier"}
    counts = Counter(i.opcode for i in found.instructions if i.kind in kinds)
    if not found.instructions:
        return table(("PTX class (no nvdisasm here)", "count"), sorted(found.classes.items()))
    return table(("SASS", "count"), counts.most_common(MOST_OPCODES))


def ptx_changes(kernel: StepKernel) -> list[tuple[str, int, int]]:
    """(opcode, before, now) of the PTX against the step before. What copies, waits and multiplies
    comes before arithmetic, and what is new or gone before what is more or less."""
    before = solution(kernel.step.before).xray.ptx_opcodes
    now = kernel.xray.ptx_opcodes
    rows = [(op, before[op], now[op]) for op in {*before, *now} if before[op] != now[op]]

    def rank(row: tuple[str, int, int]) -> tuple[bool, bool, int, str]:
        opcode, was, is_now = row
        return ptx_class(opcode) == OTHER, min(was, is_now) > 0, -abs(is_now - was), opcode

    return sorted(rows, key=rank)


def change_table(kernel: StepKernel) -> Table:
    """The same as a table."""
    rows = [(_short(op), before, now) for op, before, now in ptx_changes(kernel)[:MOST_CHANGES]]
    return table((f"PTX, against step {kernel.step.before}", "before", "now"), rows)


def _short(opcode: str) -> str:
    return opcode if len(opcode) <= 44 else opcode[:41] + "..."
