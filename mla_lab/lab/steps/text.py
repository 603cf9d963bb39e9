"""Text of a step's module: which lines are a function, and the same text with other functions."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from ...core.errors import InvalidInput
from ..style import GREEN, ORANGE, PAGE_CODE, PAGE_INK, RED
from .catalogue import Step

_FRAME = (
    f"background:{PAGE_CODE};color:{PAGE_INK};border:1px solid #B9BEC888;border-radius:6px;"
    "padding:8px 12px;max-height:420px;overflow:auto;font-size:12.5px;line-height:1.35"
)
#: comments, which themes make faint; grounds of marked lines, and of those that a diff takes and
#: adds, which themes leave without
_STYLES = {
    "c1": f"color:{PAGE_INK};opacity:0.75",
    "hll": f"background:{ORANGE}33",
    "gd": f"background:{RED}33",
    "gi": f"background:{GREEN}33",
}


@cache
def module_text(path: Path) -> str:
    """Text of an author's module."""
    return path.read_text(encoding="utf-8")


def functions_in(text: str) -> dict[str, ast.FunctionDef]:
    """Functions at the top of a module, by name."""
    return {node.name: node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)}


def source_of(function: Callable[..., Any]) -> str:
    """Text of a function that stands in a cell or a file. Raises InvalidInput where it is lost."""
    try:
        return textwrap.dedent(inspect.getsource(function)).rstrip() + "\n"
    except (OSError, TypeError) as error:
        name = getattr(function, "__name__", repr(function))
        raise InvalidInput(
            f"{name}: its source text is needed ({error}); supported: a `def` in a cell"
        ) from None


def is_unfinished(source: str) -> bool:
    """Whether a function still holds a `...`."""
    return any(
        isinstance(node, ast.Constant) and node.value is ... for node in ast.walk(ast.parse(source))
    )


def with_functions(text: str, sources: Mapping[str, str]) -> str:
    """`text` with the functions named in place of its own; decorators stay."""
    lines, found = text.splitlines(), functions_in(text)
    for name in sorted(sources, key=lambda n: -found[n].lineno):
        node = found[name]
        lines[node.lineno - 1 : node.end_lineno] = sources[name].rstrip().splitlines()
    return "\n".join(lines) + "\n"


def stub_of(text: str, name: str) -> str:
    """A function as a reader finds it: signature and docstring, the rest is missing."""
    node = functions_in(text)[name]
    first = node.body[0]
    end = first.end_lineno or node.lineno
    return "\n".join([*text.splitlines()[node.lineno - 1 : end], "    ...  # yours"])


def given_text(step: Step) -> str:
    """The module without its header, the reader's functions as stubs."""
    text = module_text(step.path)
    text = with_functions(text, {name: stub_of(text, name) for name in step.functions})
    body = [n for n in ast.parse(text).body if not isinstance(n, ast.Import | ast.ImportFrom)]
    first = body[1]  # behind the docstring
    decorators = getattr(first, "decorator_list", [])
    line = min([first.lineno, *(d.lineno for d in decorators)])
    return "\n".join(text.splitlines()[line - 1 :]).strip() + "\n"


def solution_text(step: Step) -> str:
    """The reference solution: the functions that readers write, as the author wrote them."""
    text, parts = module_text(step.path), []
    for name in step.functions:
        node = functions_in(text)[name]
        parts.append("\n".join(text.splitlines()[node.lineno - 1 : node.end_lineno]))
    return "\n\n\n".join(parts)


def highlighted(code: str, marked: Sequence[int] = (), language: str = "python") -> str:
    """Code as HTML in the colours of the page's theme, which JupyterLab and Sphinx give to
    Pygments' classes; lines `marked` have a ground of their own.
    """
    from pygments import highlight  # type: ignore[import-untyped]
    from pygments.formatters import HtmlFormatter  # type: ignore[import-untyped]
    from pygments.lexers import get_lexer_by_name  # type: ignore[import-untyped]

    form = HtmlFormatter(prestyles=_FRAME, hl_lines=list(marked))
    made = str(highlight(code, get_lexer_by_name(language, stripnl=False), form))
    for name, style in _STYLES.items():
        made = made.replace(f'class="{name}"', f'class="{name}" style="{style}"')
    return made
