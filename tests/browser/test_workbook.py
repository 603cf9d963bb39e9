"""The workbook as a reader meets it: every notebook in JupyterLab, two moved controls, pictures.

    make browser-test        (needs a Chromium: apt-get install chromium)

Screenshots (the explorer before and after, the whole notebook in the light and in the dark theme)
go to the folder in MLA_LAB_SCREENSHOTS, else to the temporary one of pytest; beside them
NN_name.json has what was measured.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("playwright.sync_api")

from playwright.sync_api import Browser, Locator, Page, ViewportSize, sync_playwright

from mla_lab.core.revision import Revision
from mla_lab.lab.browser_table import PAGE_BYTES, REDRAW_MS, most_s
from mla_lab.lab.style import contrast, luminance

from ..css_colors import rgb
from .jupyter import (
    CHROMIUM,
    FLAGS,
    SCROLLER,
    SHOWN_MS,
    TALL,
    VIEW,
    Redraw,
    Watch,
    close,
    dark,
    light,
    redraw,
    run_all,
    save,
    scroll_to,
    server,
    whole,
)
from .sheets import DARK, READABLE, faults, ground

pytestmark = pytest.mark.browser
NOTEBOOKS = Path(__file__).resolve().parents[2] / "notebooks"
ALL = sorted(path.stem for path in NOTEBOOKS.glob("*.ipynb"))
#: what a reader moves, and what is drawn anew
CONTROL = ", ".join(
    (
        ".widget-dropdown select",
        ".widget-slider .noUi-handle",
        ".widget-checkbox input",
    )
)
PICTURE = ".widget-output"
#: moves that have to change a picture; tries of each and runs of a notebook, of which the quickest
#: counts, since whatever else runs on the machine lengthens one; milliseconds before a next try,
#: twice as many before each further one
MOVES, TRIES, RUNS, PAUSE_MS = 2, 8, 3, 250
#: a notebook with a chart outside explorers, which is there when its file is opened again
WITH_CHART = "11_roofline.ipynb"
#: what JupyterLab shows of a chart when its file is opened again, until the pointer is on it
SAVED_PICTURE = ".jp-RenderedPlotly .plot-img:visible"
#: the label at the pointer: its text's colour, and that of its ground
HOVER = """() => {
  const label = document.querySelector('.hoverlayer .hovertext');
  const fill = name => getComputedStyle(label.querySelector(name)).fill;
  return label && [fill('text'), fill('path')];
}"""
#: a window where charts are wider than their outputs, and notebooks whose charts have
#: long titles, panels side by side and an explorer's output around them
NARROW: ViewportSize = {**VIEW, "width": 900}
WITH_LONG_TITLES = (
    "30_waves_and_tails",
    "33_batch_invariance",
    "34_tune_for_your_trace",
)
#: text of charts that lies outside its chart, and charts that their outputs cut
CUT = """() => [...document.querySelectorAll('.jp-Notebook .jp-RenderedPlotly')].flatMap(e => {
  const chart = e.getBoundingClientRect(), output = e.parentElement;
  const out = [...e.querySelectorAll('text')].filter(t => {
    const box = t.getBoundingClientRect();
    return box.width && (box.left < chart.left - 1 || box.right > chart.right + 1);
  });
  const scrolls = getComputedStyle(output).overflowX === 'auto';
  const cut = output.scrollWidth > output.clientWidth && !scrolls ? ['a chart is cut'] : [];
  return [...out.map(t => t.textContent), ...cut];
})"""
NEXT_OPTION = """e => {
  e.selectedIndex = (e.selectedIndex + 1) % e.options.length;
  e.dispatchEvent(new Event('change', { bubbles: true }));
}"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        yield playwright.chromium.launch(executable_path=CHROMIUM, args=list(FLAGS))


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("workbook")
    for path in NOTEBOOKS.glob("*.ipynb"):
        shutil.copy(path, folder)
    with server(folder, folder / "jupyter.log") as running:
        yield running


def move(page: Page, control: Locator) -> None:
    """The next option, the next step of a slider (back at its end), a tick."""
    if control.evaluate("e => e.tagName") == "SELECT":
        control.evaluate(NEXT_OPTION)
    elif control.evaluate("e => e.tagName") == "INPUT":
        control.click()
    else:
        at, end = (control.get_attribute(f"aria-value{name}") for name in ("now", "max"))
        control.focus()
        page.keyboard.press("ArrowLeft" if at == end else "ArrowRight")


def changes(page: Page, cell: Locator, control: Locator) -> Redraw | None:
    """The redraw below a moved control, the quickest of several moves; None where the picture
    stays.
    """
    found: list[Redraw] = []
    for attempt in range(TRIES):
        one = redraw(page, cell.locator(PICTURE).first, lambda: move(page, control))
        if one is None:
            break
        found.append(one)
        if one.seen_ms <= REDRAW_MS:
            break
        page.wait_for_timeout(PAUSE_MS * 2**attempt)
    return min(found, default=None)


def opened(browser: Browser, address: str, notebook: str) -> tuple[Page, Watch, float, int]:
    """The notebook after all its cells: page, watch, seconds, bytes; of several runs the quickest,
    but the page is the last one's.
    """
    runs: list[tuple[float, int]] = []
    while True:
        page = browser.new_page(viewport=VIEW)
        watch = Watch(page)
        took = run_all(page, address, f"{notebook}.ipynb")
        runs.append((took, watch.received))
        if took <= most_s(notebook) or len(runs) == RUNS:
            return page, watch, *min(runs)
        close(page)


def height(cell: Locator) -> float:
    """Pixels of the picture below the controls."""
    box = cell.locator(PICTURE).first.bounding_box()
    return box["height"] if box else 0.0


@pytest.mark.parametrize("notebook", ALL)
def test_two_moved_controls_change_the_picture(
    notebook: str, browser: Browser, address: str, tmp_path: Path
) -> None:
    shots = Path(os.environ.get("MLA_LAB_SCREENSHOTS", tmp_path))
    page, watch, took, sent = opened(browser, address, notebook)
    scroll_to(page, CONTROL)
    cell = page.locator(".jp-Cell", has=page.locator(CONTROL)).first
    cell.locator(PICTURE).first.wait_for(timeout=20_000)
    page.screenshot(path=shots / f"{notebook}_before.png")
    controls = cell.locator(CONTROL).all()
    redraws: list[Redraw] = []
    for control in (*controls, *controls):
        one = changes(page, cell, control)
        redraws += [] if one is None else [one]
        if len(redraws) == MOVES:
            break
    page.screenshot(path=shots / f"{notebook}_after.png")
    tall = height(cell)
    dark(page)
    page.screenshot(path=shots / f"{notebook}_dark.png")
    grew = height(cell) - tall
    pictures = whole(page, shots / f"{notebook}_whole_dark.png")
    wrong = faults(pictures, True, shots / f"{notebook}_whole_dark.png")
    light(page)
    pictures = whole(page, shots / f"{notebook}_whole_light.png")
    wrong += faults(pictures, False, shots / f"{notebook}_whole_light.png")
    measured = {
        "notebook": notebook,
        "commit": Revision.here().commit,
        "run_s": round(took, 1),
        "bytes": sent,
        "redraw_ms": [round(one.seen_ms) for one in redraws],
        "settled_ms": [round(one.settled_ms) for one in redraws],
    }
    (shots / f"{notebook}.json").write_text(json.dumps(measured) + "\n", encoding="utf-8")
    close(page)
    assert len(redraws) == MOVES, f"{len(redraws)} of {len(controls)} controls change the picture"
    assert max(redraws).seen_ms <= REDRAW_MS, measured
    assert sent < PAGE_BYTES, measured
    assert took <= most_s(notebook), measured
    assert wrong == []
    assert abs(grew) < 20, "the picture has another height in the dark theme"
    assert watch.errors == []


def point_at(page: Page, selector: str, label: str) -> None:
    """Moves the pointer over the first match until its label is there: JupyterLab may draw a chart
    anew just then, which forgets the pointer.
    """
    for by in range(TRIES):
        box = page.locator(selector).first.bounding_box()
        if box is not None:
            page.mouse.move(box["x"] + box["width"] / 2 + by, box["y"] + box["height"] / 2)
        page.wait_for_timeout(PAUSE_MS)
        if page.locator(label).count():
            return
    raise AssertionError(f"no {label} over {selector}")


def test_a_saved_notebook_opens_in_the_dark(browser: Browser, address: str, tmp_path: Path) -> None:
    """No cell is run: the saved picture of a chart has the theme's colours, so has the chart that
    takes its place under the pointer, and so has the label at the pointer.
    """
    page = browser.new_page(viewport=VIEW)
    run_all(page, address, WITH_CHART)
    # JupyterLab makes the picture once the chart is drawn in view
    scroll_to(page, ".jp-RenderedPlotly .main-svg")
    dark(page)
    save(page)
    close(page)
    page = browser.new_page(viewport=VIEW)
    page.goto(f"{address}/doc/tree/{WITH_CHART}", timeout=90_000)
    page.wait_for_selector("body[data-jp-theme-light=false]", state="attached", timeout=90_000)
    page.wait_for_selector(".jp-Notebook .jp-Cell", timeout=90_000)
    scroll_to(page, SAVED_PICTURE)
    page.wait_for_timeout(SHOWN_MS)
    page.locator(SAVED_PICTURE).first.screenshot(path=tmp_path / "saved.png")
    assert ground(tmp_path / "saved.png") < DARK
    # the picture goes as soon as the pointer is on it, so there is nothing to hover over
    page.locator(SAVED_PICTURE).first.dispatch_event("mouseenter")
    page.wait_for_selector(".jp-RenderedPlotly .main-svg")
    charts = [p for p in whole(page, tmp_path / "opened.png") if p.words]
    assert charts, "no chart is on the page"
    assert faults(charts, True, tmp_path / "opened.png") == []
    scroll_to(page, ".jp-RenderedPlotly .barlayer .point")
    point_at(page, ".jp-RenderedPlotly .barlayer .point", ".hoverlayer .hovertext")
    ink, paper = (rgb(color) for color in page.evaluate(HOVER))
    assert contrast(ink, paper) >= READABLE
    assert luminance(paper) < DARK
    light(page)
    close(page)


@pytest.mark.parametrize("notebook", WITH_LONG_TITLES)
def test_a_narrow_window_cuts_no_title(notebook: str, browser: Browser, address: str) -> None:
    page = browser.new_page(viewport=NARROW)
    run_all(page, address, f"{notebook}.ipynb")
    page.set_viewport_size({**NARROW, "height": TALL})
    page.locator(SCROLLER).first.evaluate("e => { e.scrollTop = 0 }")
    page.wait_for_timeout(SHOWN_MS)
    assert page.locator(".jp-RenderedPlotly .main-svg").count(), "no chart is on the page"
    found = page.evaluate(CUT)
    close(page)
    assert found == []
