"""README's recording: notebook 54 in JupyterLab, stepped, broken and run; an animated WebP.

python -m tests.browser.record data/pictures/debugger.webp
"""

from __future__ import annotations

import io
import shutil
import sys
import tempfile
from pathlib import Path

from PIL import Image
from playwright.sync_api import Page, sync_playwright

from .jupyter import CHROMIUM, FLAGS, run_all, scroll_to, server

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOK = "54_inside_the_fast_kernel.ipynb"
#: what is broken, and a finding that its report names
BREAK, FINDING = "delete the arrive that frees a stage", "no warp can go on"
VIEW = {"width": 1480, "height": 980}
#: the page is drawn at this share of its size; steps that are shown, and how far apart
SCALE, STEPS, STRIDE = 0.72, 14, 5
#: pixels of the explorer, and of the line below the notebook
MOST_WIDTH, STATUS = 1060, 34
#: milliseconds of a frame while it steps, and of one that is read
STEP_MS, READ_MS, LAST_MS = 420, 1800, 5000
QUALITY = 60


def _explorer(page: Page) -> dict[str, float]:
    """Where the explorer lies: from its menus to the words below its picture."""
    scroll_to(page, ".widget-dropdown select")
    menus = page.locator(".jp-OutputArea", has=page.locator(".widget-dropdown select")).first
    menus.evaluate("e => e.scrollIntoView({block: 'start'})")
    page.wait_for_timeout(500)
    box = menus.bounding_box()
    if box is None:
        raise TimeoutError("the explorer is not on the page")
    top, width = max(box["y"], 0), min(box["width"], MOST_WIDTH)
    return {"x": box["x"], "y": top, "width": width, "height": VIEW["height"] - top - STATUS}


def _shot(page: Page, clip: dict[str, float]) -> Image.Image:
    image = Image.open(io.BytesIO(page.screenshot(clip=clip))).convert("RGB")
    size = (round(image.width * SCALE), round(image.height * SCALE))
    return image.resize(size, Image.Resampling.LANCZOS)


def _set_step(page: Page, by: int) -> None:
    page.locator(".widget-slider .noUi-handle").first.focus()
    for _ in range(by):
        page.keyboard.press("ArrowRight")
    page.wait_for_timeout(700)


def frames(page: Page) -> list[tuple[Image.Image, int]]:
    """(picture, milliseconds): stepped from the first load on, then broken, run, and read."""
    clip = _explorer(page)
    page.locator(".widget-slider .noUi-handle").first.focus()
    page.keyboard.press("Home")
    page.wait_for_timeout(900)
    taken = [(_shot(page, clip), READ_MS)]
    for _ in range(STEPS):
        _set_step(page, STRIDE)
        taken.append((_shot(page, clip), STEP_MS))
    page.locator(".widget-dropdown select").first.select_option(BREAK)
    page.wait_for_selector("text=Press Run", state="attached")
    page.wait_for_timeout(500)
    taken.append((_shot(page, clip), READ_MS))
    page.locator(".jupyter-button", has_text="Run").first.click()
    page.wait_for_selector(f"text={FINDING}", timeout=60_000)
    page.wait_for_timeout(700)
    taken.append((_shot(page, clip), LAST_MS))
    return taken


def main(target: Path) -> None:
    """Record into `target`."""
    folder = Path(tempfile.mkdtemp(prefix="mla-lab-record-"))
    shutil.copy(ROOT / "notebooks" / NOTEBOOK, folder)
    with server(folder, folder / "jupyter.log") as address, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=list(FLAGS))
        page = browser.new_page(viewport=VIEW)
        run_all(page, address, NOTEBOOK)
        taken = frames(page)
        browser.close()
    shutil.rmtree(folder)
    (first, _), *others = taken
    first.save(
        target,
        save_all=True,
        append_images=[image for image, _ in others],
        duration=[ms for _, ms in taken],
        loop=0,
        quality=QUALITY,
        method=6,
    )
    sys.stdout.write(f"{target}: {len(taken)} frames, {target.stat().st_size:,} bytes\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
