"""Screenshots of executed notebooks, as JupyterLab opens them: nothing is run.

python -m mla_lab.lab.run_all --keep EXECUTED   (on the machine whose results are to be seen)
python -m tests.browser.shown EXECUTED SHOTS
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from playwright.sync_api import Page, sync_playwright

from .jupyter import CHROMIUM, FLAGS, SCROLLER, VIEW, server, whole


def _through(page: Page) -> None:
    """Scrolls to the end and back, so that every chart is drawn; saved pictures become charts."""
    scroller = page.locator(SCROLLER).first
    for _ in range(80):
        for picture in page.locator(".jp-RenderedPlotly .plot-img:visible").all():
            picture.dispatch_event("mouseenter")
        end = "e => e.scrollTop + e.clientHeight >= e.scrollHeight - 2"
        if scroller.evaluate(end):
            break
        scroller.evaluate("e => { e.scrollTop += 600 }")
        page.wait_for_timeout(150)


def main(executed: Path, shots: Path) -> None:
    """One PNG a notebook, from its first cell to its last."""
    shots.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp())
    names = sorted(path.name for path in executed.glob("*.ipynb"))
    for name in names:
        shutil.copy(executed / name, folder)
    # widgets and pages of HTML are shown in trusted notebooks alone
    trust = [sys.executable, "-m", "nbformat.sign", *(str(folder / name) for name in names)]
    subprocess.run(trust, check=True, stdout=subprocess.DEVNULL)
    with sync_playwright() as playwright, server(folder, folder / "jupyter.log") as address:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=list(FLAGS))
        for name in names:
            page = browser.new_page(viewport=VIEW)
            page.goto(f"{address}/doc/tree/{name}", timeout=90_000)
            page.wait_for_selector(".jp-Notebook .jp-Cell", timeout=90_000)
            page.wait_for_timeout(1500)
            _through(page)
            pictures = whole(page, shots / f"{Path(name).stem}.png")
            sys.stdout.write(f"{name}: {len(pictures)} pictures\n")
            page.close()
    shutil.rmtree(folder)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:3]))
