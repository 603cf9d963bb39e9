"""Source of a number: predicted by a formula or the simulator, measured now, or recorded."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape

from ..core.errors import invalid

KINDS = ("predicted", "measured", "recorded")

_STYLE = {
    "predicted": "background:repeating-linear-gradient(45deg,#fff,#fff 4px,#dbe7f1 4px,"
    "#dbe7f1 8px);border:1px dashed #0072B2;color:#1F2430",
    "measured": "background:#009E73;border:1px solid #009E73;color:#1F2430",
    "recorded": "background:#0072B2;border:1px solid #0072B2;color:#fff",
}


@dataclass(frozen=True)
class Source:
    """The origin of a number: its kind, and for a record the card and the date."""

    kind: str
    card: str = ""
    date: str = ""
    detail: str = ""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise invalid("kind", repr(self.kind), KINDS)
        if self.kind == "recorded" and not (self.card and self.date):
            raise invalid("source", "a record without card or date", "recorded with both")

    @property
    def label(self) -> str:
        """Short text, for legends: `recorded, NVIDIA H200, 2026-11-20`."""
        return ", ".join(part for part in (self.kind, self.card, self.date, self.detail) if part)

    def chip(self) -> str:
        """The label as a small HTML badge; kinds differ by fill as well as colour."""
        return (
            f'<span style="{_STYLE[self.kind]};border-radius:9px;padding:1px 9px;'
            f'font:12px Helvetica,Arial,sans-serif;white-space:nowrap">{escape(self.label)}</span>'
        )

    def _repr_html_(self) -> str:
        return self.chip()


PREDICTED = Source("predicted", detail="simulator")


def formula(detail: str = "formula") -> Source:
    """A number that follows from a formula on this page."""
    return Source("predicted", detail=detail)
