"""The executed workbook as a static site that works offline; `site` makes its pages.

    python -m mla_lab.lab.html site

Runs every notebook, solutions included. An explorer becomes a slider over pictures that were
computed here; everything else is as Jupyter shows it.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from html import escape
from importlib import resources
from pathlib import Path
from typing import Any

from .explorer import FRAMES_MIME, PLOTLY_MIME

SCRIPT = "plotly.min.js"
#: seconds that one cell may take
CELL_TIMEOUT = 300

_BEHAVIOUR = """
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

    sys.stderr.write(f"running {path.name}\n")
    notebook = nbformat.read(path, as_version=4)
    solved = _with_solutions(notebook["cells"])
    run = nbformat.from_dict({**notebook, "cells": solved})
    environment = {**os.environ, "MLA_LAB_HTML": "1"}
    client = NotebookClient(run, timeout=CELL_TIMEOUT, kernel_name="python3")
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


def build(notebooks: Path, out: Path, only: Sequence[str] = ()) -> list[str]:
    """Writes the site into `out`, a folder that it empties first; `only` names notebooks by number.

    Returns the numbers of the notebooks. Raises SiteFailed where Sphinx has a warning.
    """
    from . import site

    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "source"
        written = site.write(source, notebooks, _BEHAVIOUR, only)
        shutil.rmtree(out, ignore_errors=True)
        site.build(source, out)
    script = resources.files("plotly").joinpath("package_data", SCRIPT)
    (out / SCRIPT).write_bytes(script.read_bytes())
    shutil.rmtree(out / ".doctrees", ignore_errors=True)
    return written


def main(argv: Sequence[str] | None = None) -> int:
    """The command; see the module."""
    parser = argparse.ArgumentParser(prog="python -m mla_lab.lab.html")
    parser.add_argument("out", type=Path, help="folder for the site; what is in it is removed")
    parser.add_argument("--notebooks", type=Path, default=Path("notebooks"))
    parser.add_argument("--only", nargs="*", default=(), help="notebook numbers")
    args = parser.parse_args(argv)
    build(args.notebooks, args.out, args.only)
    sys.stderr.write(f"open {args.out / 'index.html'}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
