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
_MODULES = {
    "attempt_log": "attempts AttemptExplorer",
    "bench_plots": "load_bars speedup_bars speedups",
    "blackwell_facts": "card_facts paper_times",
    "eight_bits": "kernel_errors",
    "exercises": "check judge reveal solved",
    "explorer": "Explorer",
    "explorers.absorb": "AbsorbExplorer",
    "explorers.accumulator": "AccumulatorExplorer accumulator_curve",
    "explorers.anatomy": "AnatomyExplorer anatomy_table cta_figure role_figure",
    "explorers.budget": "BudgetExplorer",
    "explorers.calls": "CallsExplorer",
    "explorers.debug": "DebugExplorer",
    "explorers.format": "FormatExplorer format_table",
    "explorers.fragment": "FragmentExplorer",
    "explorers.homes": "HomeExplorer",
    "explorers.ladder": "LadderExplorer LadderXray",
    "explorers.layout": "LayoutExplorer",
    "explorers.mask": "MaskExplorer",
    "explorers.merge": "MergeExplorer",
    "explorers.museum": "MuseumExplorer",
    "explorers.neighbour": "NeighbourExplorer invariance_chart invariance_costs",
    "explorers.page": "PageExplorer",
    "explorers.pair": "PairExplorer",
    "explorers.pipeline": "PipelineExplorer",
    "explorers.plan": "PlanExplorer",
    "explorers.ranks": "RanksExplorer WordsExplorer",
    "explorers.record": "RecordExplorer simulator_errors",
    "explorers.rounding": "RoundingExplorer rounding_lines spread_chart",
    "explorers.split": "SplitExplorer share_chart",
    "explorers.step": "StepExplorer",
    "explorers.swizzle": "SwizzleExplorer",
    "explorers.text": "TextExplorer",
    "explorers.token": "TokenExplorer",
    "explorers.transpose": "TransposeExplorer",
    "explorers.tune": "TuneExplorer",
    "explorers.wave": "WaveExplorer",
    "explorers.xray": "XrayExplorer opcode_table",
    "film_breaks": "film_of",
    "film_card": "beside_card",
    "film_picture": "summary",
    "film_report": "who_waits",
    "hopper_steps": "DiffExplorer shipped_table",
    "lengths": "trace_lengths",
    "measuring": "anchor_rows headline_rows measured_card live_row measure run_table runs",
    "museum": "museum_table",
    "policies": "efficiency_chart policy_curves recorded_policies policy_table",
    "roofline": "RooflineExplorer",
    "session": "finish notebook_path start",
    "source": "Source formula",
    "steps": "kernel solution trial",
    "steps.live": "live",
    "steps.report": "report",
    "style": "hatch new_figure",
    "svg": "Svg",
    "tables": "table",
    "workbook_map": "WorkbookMap doctor_table progress_table",
}
_NAMES = {name: module for module, names in _MODULES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    if name in _NAMES:
        return getattr(importlib.import_module(f".{_NAMES[name]}", __name__), name)
    raise AttributeError(f"mla_lab.lab has no {name!r}")


def __dir__() -> list[str]:
    return sorted(_NAMES)
