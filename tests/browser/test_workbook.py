"""The workbook as a reader meets it: JupyterLab, a moved control, another picture.

    make browser-test        (needs a Chromium: apt-get install chromium)

Screenshots go to the folder in MLA_LAB_SCREENSHOTS, else to pytest's temporary one.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("playwright.sync_api")

from playwright.sync_api import Browser, sync_playwright

from .jupyter import CHROMIUM, FLAGS, NOT_OURS, run_all, scroll_to, server

pytestmark = pytest.mark.browser
NOTEBOOKS = Path(__file__).resolve().parents[2] / "notebooks"
#: notebook, a control, the key that moves it or the value to choose, the picture that must change
SLIDER, CHOICE = ".widget-slider .noUi-handle", ".widget-dropdown select"
SVG, CHART = ".jp-OutputArea-output svg[role=img]", ".js-plotly-plot"
MOVES = [
    ("00_start_here", CHOICE, "everything", SVG),
    ("21_swizzles_and_banks", SLIDER, "ArrowLeft", SVG),
    ("31_split_kv_policies", SLIDER, "ArrowLeft", CHART),
    ("34_tune_for_your_trace", SLIDER, "ArrowRight", CHART),
    ("54_inside_the_fast_kernel", SLIDER, "ArrowRight", SVG),
    ("55_museum_of_bugs", CHOICE, "0 x NaN", ".exhibit"),
    ("56_hopper_to_blackwell", SLIDER, "ArrowRight", SVG),
    ("90_benchmarks", SLIDER, "ArrowLeft", CHART),
]


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


@pytest.mark.parametrize(("notebook", "control", "move", "picture"), MOVES)
def test_a_moved_control_changes_the_picture(
    notebook: str,
    control: str,
    move: str,
    picture: str,
    browser: Browser,
    address: str,
    tmp_path: Path,
) -> None:
    shots = Path(os.environ.get("MLA_LAB_SCREENSHOTS", tmp_path))
    page = browser.new_page(viewport={"width": 1280, "height": 800})
    errors: list[str] = []
    page.on("console", lambda m: errors.append(m.text) if m.type == "error" else None)
    page.on("pageerror", lambda error: errors.append(str(error)))
    run_all(page, address, f"{notebook}.ipynb")
    scroll_to(page, control)
    page.wait_for_selector(picture, timeout=20_000)
    before = page.locator(picture).first.inner_html()
    page.locator(picture).first.scroll_into_view_if_needed()
    page.screenshot(path=shots / f"{notebook}_before.png")
    if control == CHOICE:
        page.locator(control).first.select_option(move)
    else:
        page.locator(control).first.focus()
        page.keyboard.press(move)
    page.wait_for_function(
        "([picture, before]) => { const e = document.querySelector(picture);"
        " return e && e.innerHTML !== before }",
        arg=[picture, before],
        timeout=15_000,
    )
    page.wait_for_timeout(700)
    page.screenshot(path=shots / f"{notebook}_after.png")
    ours = [text for text in errors if not any(word in text for word in NOT_OURS)]
    assert ours == []
    page.close()
