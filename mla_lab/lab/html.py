"""The executed workbook as a static site that works offline.

    python -m mla_lab.lab.html site

Runs every notebook and writes a page each, one for each page of `data/notes/`, an index, and one
copy of plotly's script. An explorer
becomes a slider over pictures that were computed here; everything else is as Jupyter shows it.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Sequence
from html import escape
from importlib import resources
from pathlib import Path
from typing import Any

from ..core.resources import data_dir
from .explorer import FRAMES_MIME, PLOTLY_MIME
from .workbook_map import NOTEBOOKS, Entry, WorkbookMap

SCRIPT = "plotly.min.js"
#: seconds that one cell may take
CELL_TIMEOUT = 300

_STYLE = """
body{font:16px/1.55 Helvetica,Arial,sans-serif;color:#1F2430;margin:0 auto;max-width:1120px;
padding:0 24px 80px}
nav{font-size:14px;padding:12px 0;border-bottom:1px solid #D9DBE0}
nav a{margin-right:14px;white-space:nowrap} a{color:#0072B2}
pre{background:#F4F6FA;padding:10px 14px;overflow-x:auto;font:13px/1.45 Menlo,Consolas,monospace}
pre.out{background:none;padding:2px 14px} code{font-family:Menlo,Consolas,monospace;font-size:.9em}
table{border-collapse:collapse;font-size:14px;margin:8px 0}
td,th{padding:3px 10px;border-bottom:1px solid #E3E6EC} .frames{margin:14px 0}
.frames input{width:340px;vertical-align:middle}
"""

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

    notebook = nbformat.read(path, as_version=4)
    environment = {**os.environ, "MLA_LAB_HTML": "1"}
    client = NotebookClient(notebook, timeout=CELL_TIMEOUT, kernel_name="python3")
    client.execute(cwd=str(path.parent), env=environment)
    return dict(notebook)


def page(entry: Entry, notebook: dict[str, Any]) -> str:
    """One notebook as a page."""
    body = "\n".join(cell_html(cell) for cell in notebook["cells"])
    return _document(f"{entry.number} {entry.title}", body)


def note(path: Path) -> str:
    """A Markdown page of `data/notes/` as a page of the site."""
    from nbconvert.filters.markdown import markdown2html

    body = str(markdown2html(path.read_text(encoding="utf-8")))
    return _document(path.stem, re.sub(r'href="(\w+)\.md"', r'href="\1.html"', body))


def cell_html(cell: dict[str, Any]) -> str:
    """A cell: prose, or highlighted code above its outputs."""
    if cell["cell_type"] == "markdown":
        from nbconvert.filters.markdown import markdown2html

        return str(markdown2html(cell["source"]))
    from pygments import highlight  # type: ignore[import-untyped]
    from pygments.formatters import HtmlFormatter  # type: ignore[import-untyped]
    from pygments.lexers import PythonLexer  # type: ignore[import-untyped]

    code = highlight(cell["source"], PythonLexer(), HtmlFormatter(noclasses=True, style="friendly"))
    return code + "".join(output_html(output) for output in cell["outputs"])


def output_html(output: dict[str, Any]) -> str:
    """One output, the richest form that a page without a kernel can show."""
    if output["output_type"] == "stream":
        return f"<pre class='out'>{escape(output['text'])}</pre>"
    data = output.get("data", {})
    if FRAMES_MIME in data:
        return frames_html(data[FRAMES_MIME])
    if PLOTLY_MIME in data:
        return f"<div></div>{_json(data, 'picture')}"
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


def _document(title: str, body: str) -> str:
    links = "".join(
        f"<a href='{e.file.replace('.ipynb', '.html')}' title='{escape(e.title)}'>{e.number}</a>"
        for e in NOTEBOOKS
    )
    return (
        "<!doctype html><html lang='en'><head><meta charset='utf-8'>"
        "<meta name='viewport' content='width=device-width'>"
        f"<title>{escape(title)}</title><style>{_STYLE}</style><script src='{SCRIPT}'></script>"
        f"</head><body><nav><a href='index.html'>mla-lab</a>{links}</nav>{body}"
        f"<script>{_BEHAVIOUR}</script></body></html>"
    )


def index() -> str:
    """The map, and every notebook with what a reader can do afterwards."""
    chart = WorkbookMap(path="everything")
    rows = "".join(
        f"<li><a href='{e.file.replace('.ipynb', '.html')}'>{e.number} {escape(e.title)}</a>: "
        f"{escape(e.after)} ({e.minutes} minutes)</li>"
        for e in NOTEBOOKS
    )
    pages = "".join(f"<li><a href='{p.stem}.html'>{p.stem}</a></li>" for p in notes())
    body = (
        f"<h1>mla-lab workbook</h1>{chart.figure(chart.state).markup}<ul>{rows}</ul>"
        f"<h2>Figures and verification</h2><ul>{pages}</ul>"
    )
    return _document("mla-lab workbook", body)


def notes() -> list[Path]:
    """The Markdown pages of `data/notes/`."""
    return sorted((data_dir() / "notes").glob("*.md"))


def build(notebooks: Path, out: Path, only: Sequence[str] = ()) -> list[Path]:
    """Writes the site into `out`; `only` names notebooks by number, none means all."""
    out.mkdir(parents=True, exist_ok=True)
    script = resources.files("plotly").joinpath("package_data", SCRIPT)
    (out / SCRIPT).write_bytes(script.read_bytes())
    (out / "index.html").write_text(index(), encoding="utf-8")
    for path in notes():
        (out / f"{path.stem}.html").write_text(note(path), encoding="utf-8")
    written = []
    for entry in NOTEBOOKS:
        if only and entry.number not in only:
            continue
        sys.stderr.write(f"running {entry.file}\n")
        target = out / entry.file.replace(".ipynb", ".html")
        target.write_text(page(entry, execute(notebooks / entry.file)), encoding="utf-8")
        written.append(target)
    return written


def main(argv: Sequence[str] | None = None) -> int:
    """The command; see the module."""
    parser = argparse.ArgumentParser(prog="python -m mla_lab.lab.html")
    parser.add_argument("out", type=Path, help="folder for the site")
    parser.add_argument("--notebooks", type=Path, default=Path("notebooks"))
    parser.add_argument("--only", nargs="*", default=(), help="notebook numbers")
    args = parser.parse_args(argv)
    build(args.notebooks, args.out, args.only)
    sys.stderr.write(f"open {args.out / 'index.html'}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
