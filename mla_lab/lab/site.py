"""The course as a site: Sphinx's pages, search and themes over the executed notebooks.

    python -m mla_lab.lab.site site

A notebook becomes a Markdown page: prose with its glossary words linked, code, outputs as HTML, and
exercises as boxes with their stub. Sessions make the order and the front page.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from html import escape
from importlib import resources
from pathlib import Path
from typing import Any

from ..core.errors import MlaLabError
from ..core.resources import data_dir
from .course.syllabus import SESSIONS, Session, syllabus
from .glossary import Term, pattern, term_of, terms, used_in
from .html import BEHAVIOUR, execute, output_html
from .session import notebook_path, prose
from .style import stylesheet
from .workbook_map import NOTEBOOKS

SCRIPT = "plotly.min.js"

#: what the theme sets, and the variables that our own pictures and tables take from Jupyter: here
#: they are the colours of Sphinx's theme, which has a light and a dark set
STYLE = """
.content{width:60em;max-width:100%} .sidebar-drawer{width:17em}
body{--jp-layout-color0:var(--color-background-primary);
--jp-layout-color2:var(--color-background-secondary);
--jp-cell-editor-background:var(--color-code-background);
--jp-border-color2:var(--color-background-border);
--jp-content-font-color1:var(--color-foreground-primary);
--jp-content-link-color:var(--color-link);
--font-stack:Inter,"Segoe UI",Helvetica,Arial,sans-serif}
.out{overflow-x:auto;margin:.4em 0 1.2em} .out pre{background:none;padding:.2em .9em}
.out table{border-collapse:collapse;font-size:.85rem}
.out td,.out th{padding:3px 10px;border-bottom:1px solid var(--color-background-border)}
.words{font-size:.85rem;margin-top:.4em} .frames input{width:340px;max-width:60%;
vertical-align:middle}
a.word{color:inherit;text-decoration:underline dotted;cursor:help}
.sessions{display:grid;grid-template-columns:repeat(auto-fill,minmax(17em,1fr));gap:1em;
margin:1.4em 0}
.sessions>div{border:1px solid var(--color-background-border);border-radius:8px;padding:.9em 1em;
background:var(--color-background-secondary)}
.sessions h3{margin:0 0 .3em;padding:0;font-size:1.02rem}
.sessions p{margin:.3em 0;font-size:.88rem}
.sessions .few{color:var(--color-foreground-secondary);font-size:.8rem}
@media print{.sidebar-drawer,.toc-drawer,.related-pages,.mobile-header{display:none!important}
.content{width:100%}}
"""

_CONF = """
project = "mla-lab: a course on decode kernels"
extensions = ["myst_parser"]
html_theme = "furo"
html_title = "mla-lab course"
html_static_path = ["_static"]
html_css_files = ["course.css"]
html_show_sphinx = False
html_show_copyright = False
html_show_sourcelink = False
html_copy_source = False
html_show_search_summary = False
html_last_updated_fmt = None
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3
# a cell may be text that is no complete program
suppress_warnings = ["misc.highlighting_failure"]
"""

#: parts of Markdown whose words are left alone: code, links, headings, HTML, bold labels
_KEPT = re.compile(
    r"(```.*?```|`[^`]*`|!?\[[^\]]*\]\([^)]*\)|^#[^\n]*$|<[^>]+>|^\|[^\n]*$)", re.S | re.M
)
_LINK = re.compile(r"\[(?P<text>[^\]]*)\]\((?P<to>[^)#\s]+)(?P<anchor>#[^)]*)?\)")


class SiteFailed(MlaLabError, RuntimeError):
    """Sphinx could not build the site without a warning; the message has its words."""


def word(term: Term, shown: str) -> str:
    """A word of the glossary as a link that shows its meaning when pointed at."""
    return (
        f'<a class="word" href="glossary.html#{term.anchor}" '
        f'title="{escape(term.meaning, quote=True)}">{shown}</a>'
    )


def with_words(markdown: str, seen: set[str]) -> str:
    """`markdown` with the first use of each word linked; `seen` are the names linked before."""

    def linked(match: re.Match[str]) -> str:
        term = term_of(match[0])
        if term.name in seen:
            return match[0]
        seen.add(term.name)
        return word(term, match[0])

    parts = _KEPT.split(markdown)
    # odd parts are those that the pattern has kept
    return "".join(p if i % 2 else pattern().sub(linked, p) for i, p in enumerate(parts))


def inside(markdown: str, pages: Iterable[str]) -> str:
    """`markdown` with links between pages of the site, and others of the checkout as plain text."""
    known = set(pages)

    def moved(match: re.Match[str]) -> str:
        to, anchor = match["to"], match["anchor"] or ""
        if to.startswith("http"):
            return match[0]
        name = Path(to).name.removesuffix(".ipynb").removesuffix(".md")
        return f"[{match['text']}]({name}.md{anchor})" if name in known else match["text"]

    return _LINK.sub(moved, markdown)


def raw(html: str) -> str:
    """HTML inside a Markdown page."""
    return f"``````{{raw}} html\n{html}\n``````"


def notebook_page(notebook: dict[str, Any], pages: Iterable[str]) -> str:
    """An executed notebook as Markdown."""
    seen: set[str] = set()
    title, *cells = notebook["cells"]
    parts = [with_words(inside(title["source"], pages), seen)]
    if "plotly" in str([cell.get("outputs") for cell in cells]):
        parts.append(raw("<script src='plotly.min.js'></script>"))
    for cell in cells:
        if cell["cell_type"] == "markdown":
            parts.append(with_words(inside(cell["source"], pages), seen))
        else:
            parts.append(code_cell(cell))
    parts.append(raw("<script src='_static/course.js'></script>"))
    return "\n\n".join(part for part in parts if part) + "\n"


def code_cell(cell: dict[str, Any]) -> str:
    """Code above its outputs; of an exercise the stub, and where it is checked."""
    source, exercise = cell["source"], cell["metadata"].get("nbmake", {}).get("post_cell_execute")
    if exercise:
        number = exercise[-1].split('"')[1]
        return (
            f":::{{admonition}} Yours: exercise {number}\n\n```python\n{source}\n```\n\n"
            f'Write it in the notebook (`make lab`). `lab.check("{number}", ...)` there says what '
            "is wrong with an answer and never what the answer is.\n:::"
        )
    if source.startswith("lab.check(") or source == "lab.finish()":
        return ""
    lines = [line for line in source.split("\n") if not line.startswith("lab.start(")]
    code = "\n".join(lines).strip()
    shown = [] if "lab.start(" in source else [output_html(o) for o in cell["outputs"]]
    block = f"```python\n{code}\n```" if code else ""
    return block + (f"\n\n{raw(f'<div class=out>{chr(10).join(shown)}</div>')}" if shown else "")


def glossary_page() -> str:
    """The glossary with a place for each word and the notebooks that use it."""
    uses = {
        entry: {t.name for t in used_in(prose(notebook_path(entry.number)))} for entry in NOTEBOOKS
    }
    parts = ["# Glossary\n\nPrint this page: it has no side columns on paper."]
    for term in terms():
        where = ", ".join(
            f"<a href='{Path(e.file).stem}.html' title='{escape(e.title)}'>{e.number}</a>"
            for e in NOTEBOOKS
            if term.name in uses[e]
        )
        parts.append(
            raw(
                f"<p id='{term.anchor}'><b>{escape(term.name)}</b>: {escape(term.meaning)} "
                f"<small>{where}</small></p>"
            )
        )
    return "\n\n".join(parts) + "\n"


def front_page(pages: Sequence[str]) -> str:
    """Sessions as cards, and the order of all pages for the side column."""
    cards = "".join(map(_card, SESSIONS))
    trees = [_tree(f"Session {s.number}: {s.title}", _known(s, pages)) for s in SESSIONS]
    rest = [p for p in pages if not any(p == Path(e.file).stem for e in NOTEBOOKS)]
    trees.append(_tree("Course and figures", sorted(rest, key=lambda p: (p not in _FIRST, p))))
    return (
        "# A course on decode kernels\n\nHow the attention of DeepSeek and Kimi models reads its "
        "cache, and how to write a kernel that does it fast: eight sessions, from a matrix product "
        "to a warp-specialised Hopper kernel that you write yourself. Every notebook runs on a "
        "laptop without a GPU; `make lab` opens them, and the pages here show them as they ran.\n\n"
        f"{raw(f'<div class=sessions>{cards}</div>')}\n\n"
        "The [syllabus](course.md) has goals and prerequisites, the [glossary](glossary.md) the "
        "words. Search is in the side column, the theme's switch above it.\n\n" + "\n\n".join(trees)
    )


_FIRST = ("course", "glossary")


def _known(session: Session, pages: Sequence[str]) -> list[str]:
    return [stem for e in session.entries if (stem := Path(e.file).stem) in pages]


def _tree(caption: str, pages: Sequence[str]) -> str:
    listed = "\n".join(pages)
    return f"```{{toctree}}\n:caption: '{caption}'\n:hidden:\n\n{listed}\n```" if pages else ""


def _card(session: Session) -> str:
    links = " · ".join(
        f"<a href='{e.file.replace('.ipynb', '.html')}'>{e.number} {escape(e.title)}</a>"
        for e in session.entries
    )
    return (
        f"<div><h3>{session.number}. {escape(session.title)}</h3>"
        f"<p>{escape(session.goals[0][0].upper() + session.goals[0][1:])}.</p><p>{links}</p>"
        f"<p class=few>{len(session.exercises)} exercises, {session.minutes} minutes of notebooks"
        "</p></div>"
    )


def write(source: Path, notebooks: Path, script: str, only: Sequence[str] = ()) -> list[str]:
    """Writes Sphinx's source folder; returns the numbers of the notebooks that were run."""
    entries = [e for e in NOTEBOOKS if not only or e.number in only]
    notes = sorted((data_dir() / "notes").glob("*.md"))
    pages = [*(Path(e.file).stem for e in entries), *(p.stem for p in notes)]
    static = source / "_static"
    static.mkdir(parents=True)
    (source / "conf.py").write_text(_CONF, encoding="utf-8")
    (static / "course.css").write_text(STYLE + stylesheet(), encoding="utf-8")
    (static / "course.js").write_text(script, encoding="utf-8")
    for path in notes:
        # links of the syllabus lead to the site's pages
        text = path.read_text(encoding="utf-8").replace(syllabus(), syllabus(""))
        (source / path.name).write_text(inside(text, pages), encoding="utf-8")
    (source / "glossary.md").write_text(glossary_page(), encoding="utf-8")
    (source / "index.md").write_text(front_page(pages), encoding="utf-8")
    for entry in entries:
        executed = execute(notebooks / entry.file)
        text = notebook_page(executed, pages)
        (source / f"{Path(entry.file).stem}.md").write_text(text, encoding="utf-8")
    return [entry.number for entry in entries]


def render(source: Path, out: Path) -> None:
    """Runs Sphinx in a process of its own. Raises SiteFailed for any warning."""
    # Python's own warnings between Sphinx and its extensions say nothing about the pages
    command = [sys.executable, "-W", "ignore", "-m", "sphinx", "-q", "-n", "-W", "--keep-going"]
    command += ["--no-color", "-d", str(out / ".doctrees"), str(source), str(out)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode or done.stderr.strip():
        raise SiteFailed(done.stderr.strip()[:2000])


def build(notebooks: Path, out: Path, only: Sequence[str] = ()) -> list[str]:
    """Writes the site into `out`, a folder that it empties first; `only` names notebooks by number.

    Returns the numbers of the notebooks. Raises SiteFailed where Sphinx has a warning.
    """
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "source"
        written = write(source, notebooks, BEHAVIOUR, only)
        shutil.rmtree(out, ignore_errors=True)
        render(source, out)
    script = resources.files("plotly").joinpath("package_data", SCRIPT)
    (out / SCRIPT).write_bytes(script.read_bytes())
    shutil.rmtree(out / ".doctrees", ignore_errors=True)
    return written


def main(argv: Sequence[str] | None = None) -> int:
    """The command; see the module."""
    parser = argparse.ArgumentParser(prog="python -m mla_lab.lab.site")
    parser.add_argument("out", type=Path, help="folder for the site; what is in it is removed")
    parser.add_argument("--notebooks", type=Path, default=Path("notebooks"))
    parser.add_argument("--only", nargs="*", default=(), help="notebook numbers")
    args = parser.parse_args(argv)
    build(args.notebooks, args.out, args.only)
    sys.stderr.write(f"open {args.out / 'index.html'}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
