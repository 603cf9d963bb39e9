"""Map of the notebooks: learning goals, reading paths, and the capabilities of this machine."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from typing import Any

from ..api.doctor import examine
from . import explorer, progress
from .checks import CHECKS
from .style import BLUE, FONT, GREY, INK, ORANGE, PAGE_INK, PAGE_LINK, PAGE_PAPER, PAGE_TINT
from .svg import Svg, document, label
from .tables import Table, table


@dataclass(frozen=True)
class Entry:
    """One notebook: `notebooks/NN_slug.ipynb`."""

    number: str
    slug: str
    title: str
    after: str
    minutes: int

    @property
    def file(self) -> str:
        return f"{self.number}_{self.slug}.ipynb"


NOTEBOOKS = (
    Entry("00", "start_here", "Start here", "say what runs where and choose a path", 5),
    Entry("10", "mla_maths", "The absorb trick", "derive 576 and 512, and 1152 bytes", 15),
    Entry("11", "roofline", "Roofline, honestly", "say how many drafts are free", 8),
    Entry("20", "layouts_as_functions", "Layouts", "read shape:stride, compose, divide", 18),
    Entry(
        "21", "swizzles_and_banks", "Swizzles and banks", "count conflicts, choose a swizzle", 10
    ),
    Entry("22", "pages_and_tma", "Pages and TMA", "follow a block table to boxes", 8),
    Entry("30", "waves_and_tails", "Waves and tails", "read 132 SMs over time", 12),
    Entry("31", "split_kv_policies", "Split-kv policies", "compare how kernels split a batch", 10),
    Entry("32", "lse_merge", "Merging softmax", "merge partials, empty ones too", 8),
    Entry("33", "batch_invariance", "Batch invariance", "find what changed your bits, fix it", 7),
    Entry("34", "tune_for_your_trace", "Tune for your trace", "choose format, drafts, policy", 10),
    Entry("35", "draft_masks", "Draft masks", "pack a token tree into words", 10),
    Entry("36", "several_cards", "Several cards", "say when a second card pays", 10),
    Entry("40", "eight_bits", "FP8 KV", "judge scales and roundings of eight bits", 15),
    Entry("51", "kernel_xray", "Kernel x-ray", "read registers and SASS, no GPU", 12),
    Entry("53", "the_ladder", "The ladder", "go from naive to fast, step by step", 15),
    Entry(
        "54", "inside_the_fast_kernel", "Inside the kernel", "step it, break it, read a hang", 15
    ),
    Entry("55", "museum_of_bugs", "Museum of bugs", "name twelve bugs by their symptoms", 10),
    Entry("56", "hopper_to_blackwell", "To Blackwell", "say where S and O are on either card", 15),
    Entry("60", "empty_kernel", "An empty kernel", "divide registers among roles", 12),
    Entry("61", "tile_copy", "A copy with layouts", "say which thread copies what", 14),
    Entry("62", "swizzled_tile", "Swizzled tiles", "read columns without conflicts", 16),
    Entry("63", "page_load", "TMA of a page", "load a page by one instruction a box", 13),
    Entry("64", "one_barrier", "One mbarrier", "tell phases apart by a bit", 10),
    Entry("65", "stage_ring", "A ring of stages", "let a producer run ahead", 12),
    Entry("66", "scores", "Scores by wgmma", "multiply tiles, place the results", 14),
    Entry("67", "online_softmax", "Online softmax", "keep row max and sum in registers", 12),
    Entry("68", "values", "P V, transposed", "read V where K lies", 12),
    Entry("69", "split_keep_ab", "Split and merge", "write the skeleton of keep_ab", 15),
    Entry("70", "tiny_language_model", "A tiny model", "see a cache grow and drafts kept", 10),
    Entry("90", "benchmarks", "Benchmarks", "read and rerun every figure", 10),
)

#: themes by the first digit, in reading order
THEMES = {
    "0": "Start",
    "1": "Why MLA",
    "2": "Memory",
    "3": "Plans",
    "4": "Eight bits",
    "5": "Inside a kernel",
    "6": "Write the kernel",
    "7": "Put it to work",
    "9": "Numbers",
}

PATHS = {
    "everything": tuple(entry.number for entry in NOTEBOOKS),
    "30 minutes": ("00", "11", "31", "33"),
    "serve a model": ("00", "31", "34", "90"),
    "write a kernel": ("00", "20", "21", *map(str, range(60, 70))),
    "90 minutes": ("00", "10", "11", "22", "30", "31", "32", "33", "90"),
}

#: a card, the room between two, the column of themes, and cards beside each other: text stays
#: readable beside JupyterLab's file browser on a screen of 1280
_CARD, _GAP, _LEFT, _COLUMNS = (172, 64), 9, 122, 4


class WorkbookMap(explorer.Explorer):
    """Every notebook as a card, a theme from its own row on; the chosen path is numbered and
    outlined.
    """

    frames_over = "path"

    knobs = explorer.knobs(path=explorer.choice("path", list(PATHS), "30 minutes", "230px"))

    def figure(self, state: dict[str, Any]) -> Svg:
        path = PATHS[state["path"]]
        parts, done, y = [], solved_in(), 8
        for theme, name in THEMES.items():
            entries = [e for e in NOTEBOOKS if e.number[0] == theme]
            if entries:
                parts.append(label(0, y + _CARD[1] / 2, name, size=14, anchor="start"))
            for i, entry in enumerate(entries):
                x = _LEFT + i % _COLUMNS * (_CARD[0] + _GAP)
                parts.append(_card(x, y, entry, path, done))
                if i % _COLUMNS == _COLUMNS - 1 or entry is entries[-1]:
                    y += _CARD[1] + _GAP
        alt = f"Map of {len(NOTEBOOKS)} notebooks; path {state['path']}: {', '.join(path)}"
        return document(_LEFT + _COLUMNS * (_CARD[0] + _GAP), y, "".join(parts), alt)

    def note(self, state: dict[str, Any]) -> str:
        chosen = [e for e in NOTEBOOKS if e.number in PATHS[state["path"]]]
        stops = ", then ".join(
            f"<a href='{e.file}' target='_blank' style='color:{PAGE_LINK};"
            f"text-decoration:underline'>{e.number} {escape(e.title)}</a>"
            for e in chosen
        )
        return f"<div>{stops}: about {sum(e.minutes for e in chosen)} minutes.</div>"


def solved_in() -> dict[str, tuple[int, int]]:
    """(exercises solved on this machine, exercises) by number of the notebook."""
    known = progress.solved_on()
    counts: dict[str, tuple[int, int]] = {}
    for number in CHECKS:
        done, total = counts.get(number[:2], (0, 0))
        counts[number[:2]] = (done + (number in known), total + 1)
    return counts


def progress_table() -> Table:
    """Each theme's exercises, which of them are solved, and the last day on which one was."""
    known, rows = progress.solved_on(), []
    for theme, name in THEMES.items():
        ours = [number for number in CHECKS if number[0] == theme]
        days = {number: known[number] for number in ours if number in known}
        if ours:
            last = max(days.values(), default="")
            rows.append((name, f"{len(days)} of {len(ours)}", ", ".join(days), last))
    return table(("theme", "solved", "exercises", "last on"), rows)


def _card(
    x: float, y: float, entry: Entry, path: tuple[str, ...], solved: dict[str, tuple[int, int]]
) -> str:
    on = entry.number in path
    stroke, width = (BLUE, 3) if on else (GREY, 1)
    step = (
        f'<circle cx="{x + _CARD[0] - 12}" cy="{y + 12}" r="11" fill="{ORANGE}"/>'
        + label(x + _CARD[0] - 12, y + 12, str(path.index(entry.number) + 1), size=12, ink=INK)
        if on
        else ""
    )
    fill = PAGE_TINT if on else PAGE_PAPER
    done, total = solved.get(entry.number, (0, 0))
    if done and done == total:
        step += label(x + _CARD[0] - 34, y + 12, "✓", size=15)
    text = (
        f'<foreignObject x="{x + 9}" y="{y + 25}" width="{_CARD[0] - 18}" height="38">'
        f'<div xmlns="http://www.w3.org/1999/xhtml" style="font:12px {FONT};color:{PAGE_INK};'
        f'line-height:1.25">{escape(entry.after)}</div></foreignObject>'
    )
    return (
        f"<g><title>{escape(f'{entry.number} {entry.title}: {entry.after}')}</title>"
        f'<rect x="{x}" y="{y}" width="{_CARD[0]}" height="{_CARD[1]}" rx="7" fill="{fill}" '
        f'stroke="{stroke}" stroke-width="{width}"/>'
        f'<text x="{x + 9}" y="{y + 15}" font-size="13" font-weight="700" fill="{PAGE_INK}" '
        f'dominant-baseline="central">{escape(f"{entry.number} {entry.title}")}</text>'
        f"{text}{step}</g>"
    )


def doctor_table() -> Table:
    """Findings of `mla-lab doctor`, with a remedy for each missing part."""
    rows = [(f.topic, f.name, "yes" if f.there else "no", f.detail) for f in examine()]
    return table(("what", "name", "here", "detail"), rows)
