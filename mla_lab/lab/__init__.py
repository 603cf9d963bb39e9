"""What the notebooks import: `from mla_lab import lab`.

`lab.start("NN")` opens a notebook, `lab.finish()` closes it; between them explorers to play
with, checks, exercises, and numbers with their source. Names are imported at their first use.
"""

from __future__ import annotations

import importlib
from typing import Any

from .later import load_later

# plotly imports it, and shows none of our figures by itself
load_later("nbformat")

#: public names by module
_NAMES = {
    "check": "exercises",
    "judge": "exercises",
    "reveal": "exercises",
    "solved": "exercises",
    "Explorer": "explorer",
    "WorkbookMap": "workbook_map",
    "doctor_table": "workbook_map",
    "progress_table": "workbook_map",
    "anchor_rows": "card",
    "headline_rows": "card",
    "measured_card": "card",
    "trace_lengths": "lengths",
    "LayoutExplorer": "explorers.layout",
    "SwizzleExplorer": "explorers.swizzle",
    "FragmentExplorer": "explorers.fragment",
    "MergeExplorer": "explorers.merge",
    "NeighbourExplorer": "explorers.neighbour",
    "AbsorbExplorer": "explorers.absorb",
    "RooflineExplorer": "roofline",
    "BudgetExplorer": "explorers.budget",
    "LadderExplorer": "explorers.ladder",
    "LadderXray": "explorers.ladder",
    "XrayExplorer": "explorers.xray",
    "opcode_table": "explorers.xray",
    "RecordExplorer": "explorers.record",
    "AnatomyExplorer": "explorers.anatomy",
    "anatomy_table": "explorers.anatomy",
    "role_figure": "explorers.anatomy",
    "cta_figure": "cta_timeline",
    "attempts": "attempt_log",
    "AttemptExplorer": "attempt_log",
    "CallsExplorer": "explorers.calls",
    "load_bars": "bench_plots",
    "speedup_bars": "bench_plots",
    "speedups": "bench_plots",
    "invariance_chart": "explorers.neighbour",
    "invariance_costs": "explorers.neighbour",
    "simulator_errors": "explorers.record",
    "live_row": "measuring",
    "measure": "measuring",
    "run_table": "measuring",
    "runs": "measuring",
    "MaskExplorer": "explorers.mask",
    "DebugExplorer": "explorers.debug",
    "HomeExplorer": "explorers.homes",
    "PairExplorer": "explorers.pair",
    "card_facts": "blackwell_facts",
    "paper_times": "blackwell_facts",
    "MuseumExplorer": "explorers.museum",
    "museum_table": "museum",
    "beside_card": "film_card",
    "film_of": "film_breaks",
    "summary": "film_picture",
    "who_waits": "film_report",
    "DiffExplorer": "hopper_steps",
    "shipped_table": "hopper_steps",
    "TextExplorer": "explorers.text",
    "TuneExplorer": "explorers.tune",
    "TokenExplorer": "explorers.token",
    "RoundingExplorer": "explorers.rounding",
    "rounding_lines": "explorers.rounding",
    "spread_chart": "explorers.rounding",
    "AccumulatorExplorer": "explorers.accumulator",
    "accumulator_curve": "explorers.accumulator",
    "SplitExplorer": "explorers.split",
    "share_chart": "explorers.split",
    "FormatExplorer": "explorers.format",
    "format_table": "explorers.format",
    "kernel_errors": "error_table",
    "TransposeExplorer": "explorers.transpose",
    "PageExplorer": "explorers.page",
    "WaveExplorer": "explorers.wave",
    "PipelineExplorer": "explorers.pipeline",
    "PlanExplorer": "explorers.plan",
    "efficiency_chart": "policies",
    "policy_curves": "policies",
    "recorded_policies": "policies",
    "policy_table": "policies",
    "finish": "session",
    "notebook_path": "session",
    "start": "session",
    "kernel": "steps",
    "solution": "steps",
    "report": "steps.report",
    "StepExplorer": "explorers.step",
    "live": "steps.live",
    "trial": "steps.trials",
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
