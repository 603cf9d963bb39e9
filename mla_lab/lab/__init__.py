"""What the notebooks import: `from mla_lab import lab`.

`lab.start("NN")` opens a notebook, `lab.finish()` closes it; between them explorers to play
with, checks, exercises, and numbers that say where they come from. Every name is imported when
it is first asked for.
"""

from __future__ import annotations

import importlib
from typing import Any

#: public names by module
_NAMES = {
    "answer": "exercises",
    "exercise": "exercises",
    "reveal": "exercises",
    "solved": "exercises",
    "Explorer": "explorer",
    "WorkbookMap": "workbook_map",
    "doctor_table": "workbook_map",
    "trace_lengths": "lengths",
    "LayoutExplorer": "layout_explorer",
    "SwizzleExplorer": "swizzle_explorer",
    "FragmentExplorer": "fragment_explorer",
    "MergeExplorer": "merge_explorer",
    "NeighbourExplorer": "neighbour_explorer",
    "AbsorbExplorer": "absorb_explorer",
    "RooflineExplorer": "roofline",
    "BudgetExplorer": "budget_explorer",
    "LadderExplorer": "ladder_explorer",
    "LadderXray": "ladder_explorer",
    "XrayExplorer": "xray_explorer",
    "opcode_table": "xray_explorer",
    "RecordExplorer": "record_explorer",
    "AnatomyExplorer": "anatomy_explorer",
    "anatomy_table": "anatomy_explorer",
    "role_figure": "anatomy_explorer",
    "cta_figure": "cta_timeline",
    "attempts": "attempt_log",
    "simulator_errors": "record_explorer",
    "live_row": "measuring",
    "measure": "measuring",
    "run_table": "measuring",
    "runs": "measuring",
    "MaskExplorer": "mask_explorer",
    "TokenExplorer": "token_explorer",
    "RoundingExplorer": "rounding_explorer",
    "rounding_lines": "rounding_explorer",
    "spread_chart": "rounding_explorer",
    "AccumulatorExplorer": "accumulator_explorer",
    "accumulator_curve": "accumulator_explorer",
    "SplitExplorer": "split_explorer",
    "share_chart": "split_explorer",
    "FormatExplorer": "format_explorer",
    "format_table": "format_explorer",
    "kernel_errors": "error_table",
    "TransposeExplorer": "transpose_explorer",
    "PageExplorer": "page_explorer",
    "WaveExplorer": "wave_explorer",
    "PipelineExplorer": "pipeline_explorer",
    "PlanExplorer": "plan_explorer",
    "efficiency_chart": "policies",
    "policy_curves": "policies",
    "policy_table": "policies",
    "finish": "session",
    "notebook_path": "session",
    "start": "session",
    "Source": "source",
    "formula": "source",
    "hatch": "style",
    "new_figure": "style",
    "Svg": "svg",
    "table": "tables",
}


def __getattr__(name: str) -> Any:
    if name in _NAMES:
        return getattr(importlib.import_module(f".{_NAMES[name]}", __name__), name)
    raise AttributeError(f"mla_lab.lab has no {name!r}")


def __dir__() -> list[str]:
    return sorted(_NAMES)
