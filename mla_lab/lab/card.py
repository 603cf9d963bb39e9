"""The H200 of the figures: its preset with the ceilings that the headline run itself measured.

All floors of the workbook use these ceilings: the best read and the best GEMM of the run whose
times are shown. No recorded call is faster than its floor.
"""

from __future__ import annotations

from dataclasses import replace

from ..bench.records import Row
from ..core.gpu import H200, PRESETS, Gpu
from .measuring import ANCHOR, headline_run, runs


def headline_rows() -> tuple[Row, ...]:
    """Rows of the run of the plain call (`headline_run`), the run's own first; none without."""
    found = headline_run()
    return found.rows if found else ()


def anchor_rows() -> tuple[Row, ...]:
    """Rows of the newest run with a host plan, which has clocks and watts; none without."""
    found = runs(ANCHOR)
    return found[-1].rows if found else ()


def measured_card() -> Gpu:
    """The H200 with the ceilings of the headline run; the preset without that record."""
    run = headline_run()
    found = [row["ceilings"] for row in run.rows if row.get("ceilings")] if run else []
    if run is None or not found or H200.ceilings is None:
        return H200
    read, gemm = (max(c[name] for c in found) for name in ("read_tbps", "gemm_tflops"))
    ceilings = replace(
        H200.ceilings,
        read_tbps=read,
        burst_tflops=gemm,
        sustained_tflops=(gemm, gemm),
        card=run.card,
        date=run.date,
    )
    return replace(H200, ceilings=ceilings)


def cards() -> tuple[Gpu, ...]:
    """The presets in their order, the H200 as measured."""
    return tuple(measured_card() if gpu.name == H200.name else gpu for gpu in PRESETS)
