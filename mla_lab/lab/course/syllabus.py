"""The course: eight sessions over the notebooks, with what comes before and what one can do after.

Notebooks, their minutes and their exercises come from the map and the list of checks; a session
adds goals, prerequisites and an order.
"""

from __future__ import annotations

from dataclasses import dataclass

from ...core.markdown import markdown_table
from ..checks import CHECKS
from ..workbook_map import NOTEBOOKS, Entry

#: minutes of a session, and of them for questions about the session before
MINUTES, RECAP = 90, 10

#: what the whole course takes for granted
PREREQUISITES = (
    "Python functions and NumPy arrays: slices, broadcasting, a matrix product.",
    "What softmax and attention compute; session 1 repeats both in a few lines.",
    "From session 5 on: threads, warps and shared memory, as any first GPU course has them.",
    "No GPU and no CUDA installation. Sessions 6 and 7 compile kernels and need `g++`.",
)


@dataclass(frozen=True)
class Session:
    """One meeting: its notebooks in order, `needs` the numbers of sessions before it."""

    number: int
    title: str
    notebooks: tuple[str, ...]
    needs: tuple[int, ...]
    before: str
    goals: tuple[str, ...]

    @property
    def entries(self) -> tuple[Entry, ...]:
        """Its notebooks on the map, in the order of the session."""
        known = {entry.number: entry for entry in NOTEBOOKS}
        return tuple(known[number] for number in self.notebooks)

    @property
    def exercises(self) -> tuple[str, ...]:
        """Numbers of its exercises, such as "31.1"."""
        return tuple(n for entry in self.notebooks for n in CHECKS if n[:2] == entry)

    @property
    def minutes(self) -> int:
        """What its notebooks take to read and play through."""
        return sum(entry.minutes for entry in self.entries)

    @property
    def for_talk(self) -> int:
        """Minutes left for talk and for exercises that take longer."""
        return MINUTES - RECAP - self.minutes


SESSIONS = (
    Session(
        1,
        "Why MLA, and what limits it",
        ("00", "10", "11"),
        (),
        "Matrix products and softmax in NumPy.",
        (
            "derive the width of a cached row, and why keys and values share it",
            "place a decode call on a roofline and name its limit",
            "say when another draft token costs nothing",
        ),
    ),
    Session(
        2,
        "Where bytes lie",
        ("20", "21", "22"),
        (1,),
        "Row-major and column-major order.",
        (
            "read, compose and divide layouts as functions",
            "count bank conflicts and choose a swizzle that has none",
            "follow a block table from a token to the box that TMA loads",
        ),
    ),
    Session(
        3,
        "Plans for many SMs",
        ("30", "31", "32"),
        (1,),
        "Session 1; nothing of session 2 is used.",
        (
            "predict when the last wave leaves SMs idle",
            "compare split policies and name the inputs of each",
            "merge partial softmax results, an empty one included",
        ),
    ),
    Session(
        4,
        "Serving: drafts, formats, the same bits",
        ("33", "35", "36", "40", "70", "34"),
        (1, 3),
        "Splits and their merge (session 3).",
        (
            "say which batch changed the bits of a request, and prevent it",
            "pack a draft tree into a mask, and see drafts accepted by a model",
            "divide a cache among cards, and say when that pays",
            "weigh cache formats and draft lengths for a day of traffic",
        ),
    ),
    Session(
        5,
        "From a formula to a fast kernel",
        ("51", "53", "90"),
        (1, 2),
        "Banks and swizzles (session 2); threads, warps and shared memory.",
        (
            "read registers, shared memory and machine code of a kernel without a GPU",
            "name the limit that each step of an optimisation removes",
            "judge whether a measured difference is more than noise",
        ),
    ),
    Session(
        6,
        "Write the kernel: memory",
        ("60", "61", "62", "63", "64"),
        (2, 5),
        "Layouts and swizzles (session 2).",
        (
            "divide threads and registers among roles",
            "copy tiles by layout, with swizzle, and by TMA",
            "guard a load by an mbarrier and tell its phases apart",
        ),
    ),
    Session(
        7,
        "Write the kernel: arithmetic",
        ("65", "66", "67", "68", "69"),
        (3, 6),
        "One mbarrier (session 6) and the merge (session 3).",
        (
            "keep a producer ahead of its consumers by a ring of stages",
            "multiply tiles by wgmma and keep the online softmax in registers",
            "split a request over CTAs and merge their partials",
        ),
    ),
    Session(
        8,
        "Break it, mend it, move it",
        ("54", "55", "56"),
        (6, 7),
        "A ring of stages (session 7).",
        (
            "step a shipped kernel and say what each warp waits for",
            "name a synchronisation bug by its symptom",
            "say what changes when the accumulator moves to tensor memory",
        ),
    ),
)


def syllabus(to_notebooks: str = "../../notebooks/") -> str:
    """The sessions as Markdown; `to_notebooks` is the way to their folder."""
    return "\n\n".join(_section(session, to_notebooks) for session in SESSIONS)


def overview() -> str:
    """What holds for all sessions, as Markdown."""
    return "\n".join(f"- {line}" for line in PREREQUISITES)


def exercise_table() -> str:
    """A row a session and its exercises."""
    rows = ((f"{s.number} {s.title}", ", ".join(s.exercises)) for s in SESSIONS)
    return markdown_table(("session", "exercises"), rows)


def _section(session: Session, to_notebooks: str) -> str:
    needs = ", ".join(map(str, session.needs))
    before = session.before + (
        f" Needs session{'s' * (len(session.needs) > 1)} {needs}." * bool(needs)
    )
    goals = "\n".join(f"- {goal}" for goal in session.goals)
    rows = [
        (
            f"[{e.number} {e.title}]({to_notebooks}{e.file})",
            e.after,
            e.minutes,
            ", ".join(n for n in session.exercises if n[:2] == e.number),
        )
        for e in session.entries
    ]
    notebooks = markdown_table(("notebook", "afterwards you can", "minutes:", "exercises"), rows)
    return (
        f"## Session {session.number}: {session.title}\n\n"
        f"**Before.** {before}\n\n**Afterwards you can**\n\n{goals}\n\n"
        f"{notebooks}\n\n"
        f"**Time.** Questions {RECAP} minutes, notebooks with their exercises {session.minutes}, "
        f"talk and what took longer {session.for_talk}."
    )
