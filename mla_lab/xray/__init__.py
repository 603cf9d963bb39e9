"""Resources, opcodes, SASS and PTX of a compiled kernel, without running it.

report = inspect(compile(config))
report.kernels[0].count("HGMMA"), report.kernels[0].resources.registers
print(render(report))
"""

from .render import render, render_changes, render_sass
from .report import Change, KernelReport, Report, compare, inspect, serializes
from .roles import Role
from .sass import Instruction

__all__ = [
    "Change",
    "Instruction",
    "KernelReport",
    "Report",
    "Role",
    "compare",
    "inspect",
    "render",
    "render_changes",
    "render_sass",
    "serializes",
]
