"""Executed notebooks as HTML that works without a kernel, for the course's site (`site`).

Every notebook runs with its solutions. An explorer becomes a slider over pictures that were
computed here; everything else is as Jupyter shows it.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from html import escape
from pathlib import Path
from typing import Any

from .explorer import FRAMES_MIME, PLOTLY_MIME

#: seconds that one cell may take
CELL_TIMEOUT = 300

#: the script of a page: draws charts, moves sliders
BEHAVIOUR = """
function draw(place, data) {
  const figure = data["application/vnd.plotly.v1+json"];
  if (figure) Plotly.react(place, figure.data, figure.layout, figure.config);
  else place.innerHTML = data["text/html"] || "";
}
document.querySelectorAll("script.picture").forEach(s =>
  draw(s.previousElementSibling, JSON.parse(s.textContent)));
document.querySelectorAll(".frames").forEach(box => {
  const set = JSON.parse(box.querySelector("script").textContent);
  const place = box.querySelector(".place"), range = box.querySelector("input");
  const word = box.querySelector("output");
  const words = box.querySelector(".words");
  const show = i => {
    const frame = set.frames[i];
    word.textContent = frame.value; words.innerHTML = frame.words; draw(place, frame.data);
  };
  if (range) range.addEventListener("input", () => show(Number(range.value)));
  show(range ? Number(range.value) : 0);
});
"""


def execute(path: Path) -> dict[str, Any]:
    """Runs a notebook with explorers writing their frames. Raises where a cell does."""
    import nbformat
    from nbclient import NotebookClient
    from traitlets.config import Config

    sys.stderr.write(f"running {path.name}\n")
    notebook = nbformat.read(path, as_version=4)
    solved = _with_solutions(notebook["cells"])
    run = nbformat.from_dict({**notebook, "cells": solved})
    environment = {**os.environ, "MLA_LAB_HTML": "1"}
    with tempfile.TemporaryDirectory() as folder:
        # sockets that are files: over TCP the kernel warns that others on the machine may listen
        place = Config(KernelManager={"transport": "ipc", "ip": f"{folder}/kernel"})
        client = NotebookClient(run, config=place, timeout=CELL_TIMEOUT, kernel_name="python3")
        client.execute(cwd=str(path.parent), env=environment)
    run["cells"] = [cell for cell in run["cells"] if "mla_lab_solution" not in cell["metadata"]]
    return dict(run)


def _with_solutions(cells: list[Any]) -> list[Any]:
    """Cells with each exercise's solution after its stub, so that what follows has an answer."""
    import nbformat

    found = []
    for cell in cells:
        found.append(cell)
        if lines := cell["metadata"].get("nbmake", {}).get("post_cell_execute"):
            solution = nbformat.v4.new_code_cell("\n".join(lines))
            solution["metadata"]["mla_lab_solution"] = True
            found.append(solution)
    return found


def output_html(output: dict[str, Any]) -> str:
    """One output, the richest form that a page without a kernel can show."""
    if output["output_type"] == "stream":
        return f"<pre class='out'>{escape(output['text'])}</pre>"
    data = output.get("data", {})
    if FRAMES_MIME in data:
        return frames_html(data[FRAMES_MIME])
    if PLOTLY_MIME in data:
        return f"<div class='chart'></div>{_json(data, 'picture')}"
    if "text/html" in data:
        return f"<div>{_pages(data['text/html'])}</div>"
    return f"<pre class='out'>{escape(data.get('text/plain', ''))}</pre>"


def frames_html(frames: dict[str, Any]) -> str:
    """An explorer: its pictures under a slider, each with the words below it."""
    frames = {**frames, "frames": [{**f, "words": _pages(f["words"])} for f in frames["frames"]]}
    values = [frame["value"] for frame in frames["frames"]]
    control = "<output hidden></output>"
    if len(values) > 1:
        now = values.index(frames["now"])
        name = escape(frames["control"].replace("_", " "))
        control = (
            f"<label>{name} <input type='range' min='0' max='{len(values) - 1}' value='{now}'"
            f" aria-label='{name}'></label> <output></output>"
        )
    places = "<div class='place'></div><div class='words'></div>"
    return f"<div class='frames'>{control}{places}{_json(frames)}</div>"


def _json(data: dict[str, Any], name: str = "data") -> str:
    # a closing tag inside a string would end the script element
    text = json.dumps(data).replace("</", "<\\/")
    return f"<script type='application/json' class='{name}'>{text}</script>"


def _pages(html: str) -> str:
    """Links between notebooks as links between pages."""
    return html.replace(".ipynb'", ".html'").replace('.ipynb"', '.html"')
