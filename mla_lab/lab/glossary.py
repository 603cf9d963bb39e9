"""The glossary: `data/notes/glossary.md`, its words found in text, and shown beside a notebook."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from html import escape

from ..core.resources import own_data_dir
from .style import PAGE_TINT

FILE = "notes/glossary.md"
_ENTRY = re.compile(
    r"^\*\*(?P<term>.+?)\*\*(?: \((?P<forms>[^)]+)\))?: (?P<meaning>.+)$", re.MULTILINE
)


@dataclass(frozen=True)
class Term:
    """A word, its other forms, and what it means."""

    name: str
    forms: tuple[str, ...]
    meaning: str

    @property
    def anchor(self) -> str:
        """Its place on a page, such as `word-block-table`."""
        return "word-" + re.sub(r"\W+", "-", self.name.lower())


@cache
def terms() -> tuple[Term, ...]:
    """All words, in the order of the file."""
    text = (own_data_dir() / FILE).read_text(encoding="utf-8")
    found = []
    for match in _ENTRY.finditer(text):
        forms = (match["forms"] or "").split(", ") if match["forms"] else []
        found.append(Term(match["term"], tuple(forms), match["meaning"]))
    return tuple(found)


@cache
def _by_form() -> dict[str, Term]:
    return {form: term for term in terms() for form in (term.name, *term.forms)}


@cache
def pattern() -> re.Pattern[str]:
    """Matches each form as a whole word, longer ones first; the first letter may be a capital."""
    forms = sorted(_by_form(), key=len, reverse=True)
    shown = [
        f"[{form[0].upper()}{form[0]}]{re.escape(form[1:])}"
        if form[0].islower()
        else re.escape(form)
        for form in forms
    ]
    return re.compile(rf"(?<![\w/.:-])(?:{'|'.join(shown)})(?![\w/:-])")


def term_of(form: str) -> Term:
    """The word of a form that `pattern` has matched."""
    known = _by_form()
    return known[form] if form in known else known[form[0].lower() + form[1:]]


def used_in(text: str) -> list[Term]:
    """Words that Markdown `text` uses, in order of their first use."""
    found = {term_of(match[0]): None for match in pattern().finditer(text)}
    return list(found)


def words_html(text: str) -> str:
    """Folded list of the words that `text` uses; pointing at one shows its meaning."""
    rows = "".join(
        f"<span title='{escape(term.meaning, quote=True)}' tabindex='0' style='"
        f"display:inline-block;background:{PAGE_TINT};border-radius:4px;padding:1px 7px;"
        "margin:2px 4px 2px 0;"
        f"text-decoration:underline dotted;cursor:help'>{escape(term.name)}</span>"
        for term in sorted(used_in(text), key=lambda term: term.name.lower())
    )
    return (
        "<details style='margin:4px 0'><summary style='cursor:pointer'>Words of this notebook: "
        f"point at one for its meaning</summary><div style='padding:4px 0'>{rows}</div></details>"
    )
