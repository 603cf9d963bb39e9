"""Twelve bugs of MLA kernels, each run on the spot: in a shipped kernel, or in a model of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from ..emulate import EmulatedKernel, Fault, Finding, Options
from ..emulate.calls import NAMES as ARGUMENTS
from ..emulate.calls import Call, is_right
from ..emulate.ptx import Instruction, Place
from ..emulate.recorded import Recording, load
from ..reference.mla import decode_reference
from . import film_breaks
from .film import CTA_REGISTERS, is_own, own_place, recording
from .film_breaks import changed, gone
from .museum_models import MODELS, listing, run
from .museum_texts import TEXTS
from .source_lines import line_of
from .tables import Table, table

#: builds of the recorded calls that are broken here
SPLIT = "cute_keep_ab_sm90_shaped1"
CLUSTER = "cute_swap_ab_sm90_tile_rows-8_cluster-8_mask-causal_fused_merge2_grid1_shaped1"
PLANNED = "cute_swap_ab_sm90_tile_rows-16_mask-causal_fused_merge2_shaped1"
#: registers that a thread of QK requests, more than there are
TOO_MANY = 232
#: arguments of a launch, and columns of a plan's tiles
SEQ_LENS, TILES = 8, 10
FIRST_BLOCK, LAST_BLOCK, SPLIT_IDX = 2, 3, 4


@dataclass(frozen=True)
class Outcome:
    """What a run said: findings, whether the result is right, and what else was computed."""

    findings: tuple[Finding, ...]
    right: bool
    detail: str = ""

    @property
    def kind(self) -> str:
        """Kind of the first finding, "" where all checks were silent."""
        return self.findings[0].kind if self.findings else ""


@dataclass(frozen=True)
class Bug:
    """An exhibit. `seen`: the kind of finding that reports it, "" where no check can see it."""

    name: str
    seen: str
    broken: Callable[[], Outcome]
    mended: Callable[[], Outcome]

    @property
    def text(self) -> tuple[str, str, str]:
        """(where it comes from, its symptom, what mends it or why no check sees it)."""
        return TEXTS[self.name]

    def lines(self) -> list[str]:
        """The model's listing, or nothing for a bug in a shipped kernel."""
        return listing(MODELS[self.name].broken) if self.name in MODELS else []


def _emulated(kernel: EmulatedKernel, call: Call) -> Outcome:
    kernel.options, kernel.names = Options(check=True), ARGUMENTS
    try:
        kernel(*call.args)
    except Fault as fault:
        return Outcome((*kernel.run.findings, fault.finding), False)
    return Outcome(tuple(kernel.run.findings), is_right(call))


def _edited(of: Recording, edits: dict[int, Instruction]) -> Outcome:
    kernel, call = of.kernel(), of.call()
    (program,) = kernel.programs.values()
    if edits:
        kernel.programs = {program.kernel.name: program.edited(edits)}
    made = _emulated(kernel, call)
    return Outcome(made.findings, made.right, _errors(call))


def _errors(call: Call) -> str:
    out, lse = call.errors()
    if not math.isfinite(out):
        return "NaN where the oracle has numbers"
    return f"relative error of out {out:.1e}, of lse {lse:.1e}"


def _code(of: Recording) -> list[Instruction]:
    (program,) = of.kernel().programs.values()
    return program.kernel.code


def _lines(of: Recording, file: str, text: str) -> Iterator[tuple[int, Instruction]]:
    for pc, s in enumerate(_code(of)):
        if s.place.file.endswith(file) and text in line_of(s.place):
            yield pc, s


def _tail_kept() -> dict[int, Instruction]:
    """No zeros over V behind the last token."""
    found = _lines(load(SPLIT), "mainloop_qk_softmax.py", "autovec_copy(zero")
    return {pc: gone(s) for pc, s in found if s.opcode.startswith("st.shared")}


def _rounded_max() -> dict[int, Instruction]:
    """The first row max, too, is a whole power of two."""
    edits, code = {}, _code(recording())
    for pc, _ in _lines(recording(), "mainloop_qk_softmax.py", "NO_SCORE), top,"):
        if code[pc].opcode.startswith("setp"):
            at = next(i for i in range(pc, pc + 5) if code[i].opcode.startswith("selp.f32"))
            target, top = code[at].args[:2]
            edits[at] = changed(code[at], opcode="cvt.rpi.f32.f32", args=(target, top))
    return edits


def _half_the_arrivals() -> dict[int, Instruction]:
    """Ranks that merge wait for as many arrivals as there are splits, though twice as many come."""
    found = _lines(load(CLUSTER), "swap_ab_cooperative.py", "while seen < arrivals_of")
    loads = [pc for pc, s in found if s.opcode.startswith("ld.acquire")]
    code, splits = _code(load(CLUSTER)), str(load(CLUSTER).splits)
    return {pc + 1: changed(code[pc + 1], args=(*code[pc + 1].args[:2], splits)) for pc in loads}


def _greedy_registers() -> dict[int, Instruction]:
    code = _code(recording())
    rises = [pc for pc, s in enumerate(code) if s.opcode.startswith("setmaxnreg.inc")]
    return {pc: changed(code[pc], args=(str(TOO_MANY),)) for pc in rises}


def _registers(broken: bool) -> Outcome:
    held = film_breaks.whole().held(film_breaks.whole().end)
    total = 32 * (sum(held[:8]) + 4 * (TOO_MANY if broken else held[8]))
    over = "more than" if total > CTA_REGISTERS else "within"
    detail = f"{total:,} registers, {over} the {CTA_REGISTERS:,} of the CTA's launch"
    made = _edited(recording(), _greedy_registers() if broken else {})
    return Outcome(made.findings, made.right, detail)


def _stale_plan(broken: bool) -> Outcome:
    """The second pieces are of a newer plan than the first, so that a block lies between them."""
    of = load(PLANNED)
    call = of.call()
    if broken:
        tiles = call.args[TILES]
        later = tiles[:, SPLIT_IDX] == 1
        tiles[later, FIRST_BLOCK] += 1
    made = _emulated(of.kernel(), call)
    return Outcome(made.findings, made.right, _errors(call))


def _single_key(broken: bool) -> Outcome:
    """One cached token: its weight is 1, and the result is its V."""
    of = recording()
    call = of.call()
    call.args[SEQ_LENS].fill_(1)
    call.args[TILES][:, LAST_BLOCK] = 1
    call.expected = decode_reference(replace(call.inputs, seq_lens=call.args[SEQ_LENS]))
    kernel = of.kernel()
    if broken:
        (program,) = kernel.programs.values()
        kernel.programs = {program.kernel.name: program.edited(_rounded_max())}
    made = _emulated(kernel, call)
    off = (call.out.double() - call.expected.out.reshape(call.out.shape)).abs().max()
    return Outcome(made.findings, made.right, f"one key: largest error of out {float(off):.1e}")


def _bug(name: str, seen: str, made: Callable[[bool], Outcome]) -> Bug:
    return Bug(name, seen, cache(lambda: made(True)), cache(lambda: made(False)))


def _of_film(name: str, schedule: str = "fair") -> Callable[[bool], Outcome]:
    def filmed(broken: bool) -> Outcome:
        made = film_breaks.film_of(name if broken else film_breaks.NOTHING, schedule)
        return Outcome(made.findings, made.right)

    return filmed


def _of_edits(of: Callable[[], Recording], edits: Callable[[], Any]) -> Callable[[bool], Outcome]:
    return lambda broken: _edited(of(), edits() if broken else {})


def _of_model(name: str) -> Callable[[bool], Outcome]:
    def modelled(broken: bool) -> Outcome:
        model = MODELS[name]
        text = model.broken if broken else model.mended
        found = run(text, model, name.replace(",", "").replace(" ", "_"))
        return Outcome(tuple(found), not found)

    return modelled


BUGS = (
    _bug("a phase lapped", "parity alias", _of_model("a phase lapped")),
    _bug("a missing proxy fence", "proxy fence", _of_film("delete the proxy fences behind P")),
    _bug("a stage freed early", "race", _of_film("free a stage early", "adverse")),
    _bug("one buffer, one barrier a tile", "race", _of_model("one buffer, one barrier a tile")),
    _bug("a unit outside its stage", "race", _of_model("a unit outside its stage")),
    _bug("half the arrivals", "race", _of_edits(lambda: load(CLUSTER), _half_the_arrivals)),
    _bug("a flag before its data", "race", _of_model("a flag before its data")),
    _bug("a worker behind the last item", "out of bounds",
         _of_model("a worker behind the last item")),
    _bug("0 x NaN", "", _of_edits(lambda: load(SPLIT), _tail_kept)),
    _bug("P that is never exactly 1", "", _single_key),
    _bug("a stale plan", "", _stale_plan),
    _bug("registers that are not there", "", _registers),
)  # fmt: skip
NAMES = tuple(bug.name for bug in BUGS)
#: what is changed for bugs that no finding gives a place
_CHANGED: dict[str, tuple[Callable[[], Recording], Callable[[], dict[int, Instruction]]]] = {
    "0 x NaN": (lambda: load(SPLIT), _tail_kept),
    "P that is never exactly 1": (recording, _rounded_max),
    "registers that are not there": (recording, _greedy_registers),
}


def changed_places(name: str) -> list[Place]:
    """Source lines that a bug of `_CHANGED` changes, each once."""
    if name not in _CHANGED:
        return []
    of, edits = _CHANGED[name]
    code = _code(of())
    near = [[code[pc - back].place for back in range(3)] for pc in edits()]
    own = [next((p for p in ps if is_own(p)), ps[0]) for ps in near]
    return list(dict.fromkeys(own))


def museum_table() -> Table:
    """Each exhibit: where it comes from, what the emulator said, its first line, and the result
    where the bug stands in a whole kernel."""
    rows = []
    for bug in BUGS:
        made = bug.broken()
        place = str(own_place(made.findings[0])) if made.findings else ""
        result = "" if bug.lines() else ("right" if made.right else "wrong")
        rows.append((bug.name, bug.text[0], made.kind or "nothing", place, result))
    return table(("bug", "from", "found", "first at", "result"), rows)
