"""The workbook as a reader meets it: every notebook in JupyterLab, two moved controls, pictures.

    make browser-test        (needs a Chromium: apt-get install chromium)

Screenshots, in the light theme and in the dark one, go to the folder in MLA_LAB_SCREENSHOTS, else
to pytest's temporary one.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("playwright.sync_api")

from playwright.sync_api import Browser, Locator, Page, sync_playwright

from .jupyter import CHROMIUM, FLAGS, NOT_OURS, close, dark, run_all, scroll_to, server

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
#: moves that have to change a picture, and milliseconds in which each does
MOVES, CHANGED_MS = 2, 6_000
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


def changes(page: Page, cell: Locator, control: Locator) -> bool:
    """Whether a move of the control draws another picture below it."""
    picture = cell.locator(PICTURE).first
    before = picture.inner_html()
    move(page, control)
    for _ in range(CHANGED_MS // 200):
        page.wait_for_timeout(200)
        if picture.inner_html() != before:
            return True
    return False


def height(cell: Locator) -> float:
    """Pixels of the picture below the controls."""
    box = cell.locator(PICTURE).first.bounding_box()
    return box["height"] if box else 0.0


@pytest.mark.parametrize("notebook", ALL)
def test_two_moved_controls_change_the_picture(
    notebook: str, browser: Browser, address: str, tmp_path: Path
) -> None:
    shots = Path(os.environ.get("MLA_LAB_SCREENSHOTS", tmp_path))
    page = browser.new_page(viewport={"width": 1280, "height": 800})
    errors: list[str] = []
    page.on("console", lambda m: errors.append(m.text) if m.type == "error" else None)
    page.on("pageerror", lambda error: errors.append(str(error)))
    run_all(page, address, f"{notebook}.ipynb")
    scroll_to(page, CONTROL)
    cell = page.locator(".jp-Cell", has=page.locator(CONTROL)).first
    cell.locator(PICTURE).first.wait_for(timeout=20_000)
    page.screenshot(path=shots / f"{notebook}_before.png")
    controls = cell.locator(CONTROL).all()
    moved = 0
    for control in (*controls, *controls):
        moved += changes(page, cell, control)
        if moved == MOVES:
            break
    assert moved == MOVES, f"{moved} of {len(controls)} controls change the picture"
    page.screenshot(path=shots / f"{notebook}_after.png")
    tall = height(cell)
    dark(page)
    page.screenshot(path=shots / f"{notebook}_dark.png")
    assert abs(height(cell) - tall) < 20, "the picture has another height in the dark theme"
    ours = [text for text in errors if not any(word in text for word in NOT_OURS)]
    assert ours == []
    close(page)
