"""A JupyterLab server and a Chromium for the browser tests."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from playwright.sync_api import ConsoleMessage, Locator, Page, ViewportSize, WebSocket

from mla_lab.cli.commands.lab import SETTINGS

#: the Chromium of Debian; CHROMIUM names another one
CHROMIUM = os.environ.get("CHROMIUM", shutil.which("chromium") or "/usr/bin/chromium")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
#: words of console errors that come from JupyterLab itself, not from us
NOT_OURS = ("favicon", "Source map", "preloaded using link preload", "jupyterlab/settings")
#: seconds for the server to start, and for a notebook to run
START_S, RUN_S = 90, 180
#: milliseconds without a change after which a picture stays (JupyterLab draws a plotly chart three
#: times: at once, once more, and 100 ms later for its width), and after which none comes
QUIET_MS, UNCHANGED_MS = 400, 4000
#: pixels of the page, and of one that holds any whole notebook; milliseconds until it shows
VIEW: ViewportSize = {"width": 1280, "height": 800}
TALL, SHOWN_MS = 12_000, 2000
#: where the last cell ends
BOTTOM = """() => Math.ceil(Math.max(...[...document.querySelectorAll('.jp-Notebook .jp-Cell')]
  .map(e => e.getBoundingClientRect().bottom)))"""
SCROLLER = ".jp-WindowedPanel-outer"
#: cells that are run before there is a kernel are forgotten, so it is waited for
RUN_ALL = """async () => {
  const app = window.jupyterapp, panel = app.shell.currentWidget;
  await panel.context.ready;
  await panel.sessionContext.ready;
  await panel.sessionContext.session.kernel.info;
  await app.commands.execute('notebook:run-all-cells');
}"""
#: starts to keep what each frame shows of an element, and when; `start` is the reader's move.
#: JupyterLab holds an output's height while it is drawn anew, which shows nothing
OBSERVE = """e => {
  const look = () => e.innerHTML.replace(/ style="(min-height: [\\d.]+px;)?"/g, '');
  const seen = window.mlaLab = { start: 0, at: 0, waits: false, before: look(), frames: [], look };
  const frame = () => {
    seen.waits = false;
    seen.frames.push([performance.now(), look()]);
  };
  seen.observer = new MutationObserver(() => {
    seen.at = performance.now();
    if (!seen.waits) requestAnimationFrame(frame);
    seen.waits = true;
  });
  seen.observer.observe(e, { childList: true, subtree: true, attributes: true });
  for (const kind of ['change', 'input', 'click', 'keydown'])
    window.addEventListener(kind, () => { seen.start ||= performance.now(); },
      { capture: true, once: true });
}"""
#: [milliseconds to the first frame with the picture as it stays, milliseconds to the last change],
#: once that is QUIET_MS ago; null where the picture is the old one for UNCHANGED_MS
DRAWN = """async (e, [quiet, most]) => {
  const seen = window.mlaLab, begun = performance.now();
  const wait = ms => new Promise(done => setTimeout(done, ms));
  for (;;) {
    await wait(20);
    const now = performance.now();
    const changed = seen.at && !seen.waits && e.textContent.trim() && seen.look() !== seen.before;
    if (changed && now - seen.at > quiet) break;
    if (!changed && now - begun > most) { seen.observer.disconnect(); return null; }
  }
  seen.observer.disconnect();
  const stays = seen.frames.at(-1)[1];
  const first = seen.frames.findLastIndex(([_, html]) => html !== stays) + 1;
  return [seen.frames[first][0] - seen.start, seen.at - seen.start];
}"""


#: until the kernel and the page have nothing left to do
AT_REST = """async () => {
  const wait = ms => new Promise(done => setTimeout(done, ms));
  const session = () => window.jupyterapp.shell.currentWidget.sessionContext.session;
  while (session()?.kernel?.status !== 'idle') await wait(50);
  await new Promise(done => requestIdleCallback(done, { timeout: 10_000 }));
}"""
#: of every picture on the page: its words, its box, the colours of its sheet and of the text on it;
#: text inside a bar or on a tint has a ground of its own
PICTURES = """() => [...document.querySelectorAll(
    '.jp-Notebook .js-plotly-plot, .jp-Notebook svg[role=img]')].map(e => {
  const sheet = e.querySelector('.main-svg') ?? e;
  const texts = sheet === e ? e.querySelectorAll('text[fill^=var]')
    : e.querySelectorAll('text:not(.bartext-inside)');
  const box = e.getBoundingClientRect();
  return {
    words: e.textContent.slice(0, 60),
    box: [box.left, box.top, box.right, box.bottom],
    ground: getComputedStyle(sheet).backgroundColor,
    inks: [...new Set([...texts].map(t => getComputedStyle(t).fill))],
  };
})"""


class Watch:
    """What a page's kernel sends to it, in bytes, and the console errors that are not
    JupyterLab's own.
    """

    def __init__(self, page: Page) -> None:
        self.received = 0
        self.errors: list[str] = []
        page.on("websocket", self._open)
        page.on("console", self._console)
        page.on("pageerror", lambda error: self.errors.append(str(error)))

    def _open(self, socket: WebSocket) -> None:
        if "/channels" in socket.url:
            socket.on("framereceived", self._frame)

    def _frame(self, payload: str | bytes) -> None:
        self.received += len(payload)

    def _console(self, message: ConsoleMessage) -> None:
        text = f"{message.text} ({message.location.get('url', '')})"
        if message.type == "error" and not any(word in text for word in NOT_OURS):
            self.errors.append(text)


@contextmanager
def server(folder: Path, log: Path) -> Iterator[str]:
    """JupyterLab on `folder`, on this machine only; yields its address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--ip=127.0.0.1"]
    command += [f"--port={port}", "--IdentityProvider.token=", "--allow-root"]
    command += [f"--ServerApp.root_dir={folder}", "--LabApp.expose_app_in_browser=True"]
    # as `mla-lab lab` has it: no question about news lies over the page
    command += [f"--LabApp.app_settings_dir={SETTINGS}"]
    environment = {**os.environ, "JUPYTERLAB_SETTINGS_DIR": str(folder / "settings")}
    with log.open("w") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env=environment
        )
    try:
        address = f"http://127.0.0.1:{port}"
        _wait(address)
        yield address
    finally:
        process.terminate()
        process.wait(60)


def _wait(address: str) -> None:
    end = time.monotonic() + START_S
    while time.monotonic() < end:
        try:
            urllib.request.urlopen(f"{address}/api", timeout=2).close()
            return
        except OSError:
            time.sleep(0.3)
    raise TimeoutError(f"JupyterLab at {address} did not start within {START_S} s")


def run_all(page: Page, address: str, notebook: str) -> float:
    """Opens a notebook and runs every cell; returns the seconds until the last one has finished."""
    page.goto(f"{address}/doc/tree/{notebook}", timeout=90_000)
    page.wait_for_selector(".jp-Notebook .jp-Cell", timeout=90_000)
    page.wait_for_function("window.jupyterapp?.shell.currentWidget?.sessionContext")
    start = time.monotonic()
    page.evaluate(RUN_ALL)
    finished = page.locator("text=Checked: no widget holds an error")
    end = time.monotonic() + RUN_S
    while not finished.count():
        if time.monotonic() > end:
            raise TimeoutError(f"{notebook} did not finish within {RUN_S} s")
        # the last cell is rendered only while it is in view
        page.locator(SCROLLER).first.evaluate("e => { e.scrollTop = e.scrollHeight }")
        page.wait_for_timeout(300)
    return time.monotonic() - start


class Redraw(NamedTuple):
    """Milliseconds from a reader's move to the first frame with the new picture, and to the last
    change of the page, which draws the same picture again.
    """

    seen_ms: float
    settled_ms: float


class Picture(NamedTuple):
    """A chart or drawing: its first words, its box in pixels, the colours of its sheet and text."""

    words: str
    box: tuple[float, float, float, float]
    ground: str
    inks: tuple[str, ...]


def redraw(page: Page, picture: Locator, move: Callable[[], None]) -> Redraw | None:
    """The redraw of a picture after a reader's move; None where the picture stays. It begins when
    nothing of an earlier one is left to do.
    """
    page.evaluate(AT_REST)
    picture.evaluate(OBSERVE)
    move()
    ms: list[float] | None = picture.evaluate(DRAWN, [QUIET_MS, UNCHANGED_MS])
    return Redraw(*ms) if ms else None


def scroll_to(page: Page, selector: str) -> None:
    """Brings the first match into view; JupyterLab renders cells only where they are seen."""
    scroller = page.locator(SCROLLER).first
    scroller.evaluate("e => { e.scrollTop = 0 }")
    for _ in range(60):
        if page.locator(selector).count():
            page.locator(selector).first.scroll_into_view_if_needed()
            return
        scroller.evaluate("e => { e.scrollTop += 500 }")
        page.wait_for_timeout(150)
    raise AssertionError(f"{selector} was not found")


def whole(page: Page, path: Path) -> list[Picture]:
    """A screenshot of the notebook from its first cell to its last; returns the pictures on it."""
    page.set_viewport_size({**VIEW, "height": TALL})
    page.wait_for_timeout(800)
    page.locator(SCROLLER).first.evaluate("e => { e.scrollTop = 0 }")
    page.wait_for_timeout(SHOWN_MS)
    bottom: float = page.evaluate(BOTTOM)
    page.screenshot(path=path, clip={"x": 0, "y": 0, "width": VIEW["width"], "height": bottom})
    found: list[dict[str, Any]] = page.evaluate(PICTURES)
    page.set_viewport_size(VIEW)
    return [Picture(p["words"], tuple(p["box"]), p["ground"], tuple(p["inks"])) for p in found]


def dark(page: Page) -> None:
    """Changes to JupyterLab's dark theme."""
    page.evaluate(
        "window.jupyterapp.commands.execute('apputils:change-theme', { theme: 'JupyterLab Dark' })"
    )
    page.wait_for_selector("body[data-jp-theme-light=false]", state="attached", timeout=90_000)
    page.wait_for_timeout(700)


def light(page: Page) -> None:
    """Changes to JupyterLab's light theme."""
    page.evaluate(
        "window.jupyterapp.commands.execute('apputils:change-theme', { theme: 'JupyterLab Light' })"
    )
    page.wait_for_selector("body[data-jp-theme-light=true]", state="attached", timeout=90_000)
    page.wait_for_timeout(700)


def save(page: Page) -> None:
    """Writes the notebook with its outputs."""
    page.evaluate("window.jupyterapp.commands.execute('docmanager:save')")


def close(page: Page) -> None:
    """Shuts the notebook's kernel down, closes the page."""
    page.evaluate("window.jupyterapp.serviceManager.sessions.shutdownAll()")
    page.close()
