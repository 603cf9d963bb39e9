"""First and last cell of a notebook: device, swallowed errors, provenance of the page."""

from __future__ import annotations

import ctypes
import datetime
import json
import os
import platform
import resource
import sys
import time
from dataclasses import dataclass, field
from functools import cache
from html import escape
from pathlib import Path
from typing import Any

import ipywidgets as widgets
from IPython.display import HTML, display

from ..core.errors import MlaLabError, invalid
from ..core.installed import version_of
from .explorer import forget, moved
from .glossary import words_html
from .style import PAGE_INK, PAGE_TINT, stylesheet


class WidgetFailed(MlaLabError, RuntimeError):
    """An output widget of this notebook holds an error that was not raised."""


class OverBudget(MlaLabError, RuntimeError):
    """A notebook exceeds its budget of processor time or widget state."""


#: processor seconds and bytes of widget state that a notebook may take; checked where the
#: environment has BUDGET, as in our tests
BUDGET, BUDGET_S, BUDGET_BYTES = "MLA_LAB_BUDGET", 15.0, 1_000_000


@dataclass
class Session:
    """The open notebook: its number, its file, when it started, what was solved."""

    number: str
    path: Path
    started: float
    #: processor seconds before it
    spent: float = 0.0
    passed: list[str] = field(default_factory=list)


_SESSIONS: list[Session] = []


def current() -> Session:
    """The session that `start` opened last."""
    if not _SESSIONS:
        raise invalid("session", "none", 'lab.start("NN") in the first cell')
    return _SESSIONS[-1]


@cache
def gpu_name() -> str:
    """Name of the first CUDA device, "" where there is none. Asks the driver, not torch."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return ""
    count, name = ctypes.c_int(0), ctypes.create_string_buffer(128)
    if cuda.cuInit(0) or cuda.cuDeviceGetCount(ctypes.byref(count)) or not count.value:
        return ""
    cuda.cuDeviceGetName(name, len(name), 0)
    return name.value.decode()


def notebook_path(number: str) -> Path:
    """File of notebook `number`: beside the kernel's folder, or in the checkout."""
    checkout = Path(__file__).resolve().parents[2] / "notebooks"
    for folder in (Path.cwd(), Path.cwd() / "notebooks", checkout):
        for path in sorted(folder.glob(f"{number}_*.ipynb")):
            return path
    raise invalid("number", repr(number), f"a notebook NN_*.ipynb in {checkout}")


def start(number: str) -> None:
    """Open notebook `number` ("31") and show where its cells run."""
    session = Session(number, notebook_path(number), time.monotonic(), processor_s())
    _SESSIONS.append(session)
    forget()
    gpu = gpu_name()
    place = "no GPU here, and none is needed: what is not predicted is a recorded row"
    if gpu:
        place = f"a GPU is here: <b>{escape(gpu)}</b>, so measurements are live"
    _banner(f"<b>Notebook {number}</b> runs on your CPU ({platform.machine()}); {place}.")
    display(HTML(f"<style>{stylesheet()}</style>{words_html(prose(session.path))}"))


def prose(notebook: Path) -> str:
    """Markdown of a notebook, its cells joined."""
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    return "\n\n".join("".join(c["source"]) for c in cells if c["cell_type"] == "markdown")


def finish() -> None:
    """Raise if an output widget swallowed an error, or in tests if a cell left an explorer changed;
    then print the provenance.
    """
    errors = widget_errors()
    if errors:
        raise WidgetFailed("; ".join(errors))
    session = current()
    if os.environ.get(BUDGET):
        if left := moved():
            raise WidgetFailed(f"not as the author left it: {'; '.join(left)}")
        check_budget(processor_s() - session.spent, widget_bytes())
    solved = ", ".join(session.passed) or "none yet"
    took = time.monotonic() - session.started
    _banner(
        f"Checked: no widget holds an error. Exercises solved: {solved}. {took:.1f} s in all.<br>"
        f"<span style='opacity:0.75'>{escape(provenance())}</span>"
    )


def widget_errors() -> list[str]:
    """Errors inside `Output` widgets, which a notebook run does not raise."""
    shown = [output for w in _instances() if isinstance(w, widgets.Output) for output in w.outputs]
    errors = [output for output in shown if output.get("output_type") == "error"]
    return [f"{error.get('ename')}: {error.get('evalue')}" for error in errors]


def check_budget(seconds: float, size: int) -> None:
    """Raises OverBudget for more processor seconds or more bytes of widgets than a notebook may
    take.
    """
    if seconds > BUDGET_S:
        raise OverBudget(f"{seconds:.1f} s of processor time; supported: up to {BUDGET_S:.0f}")
    if size > BUDGET_BYTES:
        raise OverBudget(f"{size:,} bytes of widgets; supported: up to {BUDGET_BYTES:,}")


def processor_s() -> float:
    """Processor time so far, of this process and of programs that it has run and waited for."""
    used = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(r.ru_utime + r.ru_stime for r in used)


def widget_bytes() -> int:
    """Bytes of state that the widgets of this kernel have sent to the browser, as JSON."""
    return sum(len(json.dumps(w.get_state(), default=str)) for w in _instances())


def _instances() -> list[Any]:
    """Every live widget of this kernel."""
    from ipywidgets.widgets import widget

    return list(widget._instances.values())


def provenance() -> str:
    """Date, device and versions in one line."""
    parts = [datetime.date.today().isoformat(), gpu_name() or f"CPU {platform.machine()}"]
    parts.append(f"Python {platform.python_version()}")
    for package in ("mla-lab", "numpy", "torch", "plotly"):
        module = package.replace("-", "_")
        if module in sys.modules:
            parts.append(f"{package} {version_of(package) or '(from a folder)'}")
    return " · ".join(parts)


def _banner(html: str) -> None:
    display(
        HTML(
            f"<div style='background:{PAGE_TINT};color:{PAGE_INK};border-radius:6px;"
            f"padding:8px 12px;font:14px Helvetica,Arial,sans-serif'>{html}</div>"
        )
    )
