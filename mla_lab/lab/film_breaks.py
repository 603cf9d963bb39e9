"""Ways to break the debugger's kernel: a few instructions of its PTX changed, each a real mistake.

Instructions are found by what they did in the whole kernel's film (who waited at which barrier, who
arrived), or by their source line, so that a recording made anew finds them again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, TypeAlias

from ..core.errors import invalid
from ..emulate.mutate import gone as gone
from ..emulate.ptx import Instruction, Place
from ..emulate.translate import Program
from . import film
from .source_lines import line_of

#: instruction index -> what stands there instead
Edits: TypeAlias = dict[int, Instruction]
NOTHING = "nothing"
PRODUCER, PV_WARPS, QK_WARPS = (0,), range(8), range(8, 12)


@dataclass(frozen=True)
class Break:
    """One change: a name for the menu, what is done in a sentence, and the edits."""

    name: str
    sentence: str
    edits: Callable[[], Edits]

    @property
    def places(self) -> list[Place]:
        """Source lines of what is changed, each once."""
        return list(dict.fromkeys(film.caller(pc) for pc in self.edits()))


def _code() -> list[Instruction]:
    return film.program().kernel.code


def _used(what: str, barrier: str, warps: Any) -> list[int]:
    """Instructions by which one of `warps` waits at, or arrives at, barriers of a name."""
    uses = whole().uses.items()
    return sorted(
        pc
        for pc, found in uses
        if any(u.what == what and u.barrier.startswith(barrier) and u.warp in warps for u in found)
    )


def _at(file: str, text: str, opcode: str) -> Iterator[int]:
    """Instructions of an opcode at, or right behind, source lines that contain `text`."""
    for pc, s in enumerate(_code()):
        if s.opcode.startswith(opcode):
            place = film.caller(pc)
            if place.file.endswith(file) and text in line_of(place):
                yield pc


def changed(s: Instruction, opcode: str = "", args: tuple[str, ...] = ()) -> Instruction:
    """An instruction with another opcode, or other operands."""
    opcode, args = opcode or s.opcode, args or s.args
    return replace(s, opcode=opcode, args=args, text=f"{opcode} {', '.join(args)};")


def _changed(pc: int, index: int, value: str) -> Instruction:
    s = _code()[pc]
    return changed(s, args=tuple(value if i == index else a for i, a in enumerate(s.args)))


def _without(pcs: Any) -> Edits:
    return {pc: gone(_code()[pc]) for pc in pcs}


def _swapped() -> Edits:
    """QK's wait for the first columns of a tile and that for the last ones, exchanged."""
    edits = {}
    for pc in _used("wait", "kv.full", QK_WARPS):
        chunk = next(iter(whole().uses[pc])).barrier[-2]
        address = _code()[pc].args[1].strip("[]")
        if chunk in "02":
            edits[pc] = _changed(pc, 1, f"[{address}+{16 if chunk == '0' else -16}]")
    return edits


def _shrunk() -> Edits:
    found = _at("producer.py", "if stage == cfg.stages", "setp.")
    return {pc: _changed(pc, 2, "2") for pc in found if _code()[pc].args[2] == "3"}


def _parity() -> Edits:
    return {pc: _changed(pc, 2, "1") for pc in _used("wait", "p.full", PV_WARPS)}


def _early() -> Edits:
    found = _at("mainloop_pv.py", "warpgroup.wait_group(0)", "wgmma.wait_group")
    return {pc: _changed(pc, 0, "1") for pc in found}


def _miscounted() -> Edits:
    inits = [pc for pc, s in enumerate(_code()) if s.opcode.startswith("mbarrier.init")]
    count = _code()[inits[film.STAGES * film.CHUNKS]].args[1]  # of kv.empty[0]
    return {pc: _changed(pc, 1, "4") for pc in inits if _code()[pc].args[1] == count}


_P_FENCE = "fence_view_async_shared()"
BREAKS = (
    Break(NOTHING, "The kernel as it ships.", dict),
    Break(
        "delete the arrive that frees a stage",
        "PV warps no longer arrive at kv.empty when they have read a tile.",
        lambda: _without(_used("arrive", "kv.empty", PV_WARPS)),
    ),
    Break(
        "delete the wait for a free stage",
        "The producer no longer waits at kv.empty before it issues the copy of the next tile.",
        lambda: _without(_used("wait", "kv.empty", PRODUCER)),
    ),
    Break(
        "swap two waits",
        "QK waits for the last columns of a tile where it should wait for the first.",
        _swapped,
    ),
    Break(
        "shrink the ring",
        "The producer goes back to stage 0 after two stages; the consumers count three.",
        _shrunk,
    ),
    Break(
        "wait for the other parity",
        "PV waits at p.full for parity 1, always: the phase before the first.",
        _parity,
    ),
    Break(
        "free a stage early",
        "PV leaves one wgmma-group in flight (wait_group 1) when it frees the stage.",
        _early,
    ),
    Break(
        "delete the proxy fences behind P",
        "P is stored by the warps and read by the tensor core, and no fence.proxy.async between.",
        lambda: _without(_at("mainloop_qk_softmax.py", _P_FENCE, "fence.proxy")),
    ),
    Break(
        "delete the wait for S",
        "Softmax reads the accumulator while the product that makes it runs.",
        lambda: _without(_at("mainloop_qk_softmax.py", "wait_group", "wgmma.wait_group")),
    ),
    Break(
        "count four arrivals for eight",
        "kv.empty is initialised for four warps; eight arrive.",
        _miscounted,
    ),
)
NAMES = tuple(b.name for b in BREAKS)


def named(name: str) -> Break:
    """The break of a name."""
    if name not in NAMES:
        raise invalid("break", repr(name), NAMES)
    return BREAKS[NAMES.index(name)]


@cache
def whole() -> film.Film:
    """The film of the kernel as it ships."""
    return film.shoot()


@cache
def broken_program(name: str) -> Program:
    """The translated kernel with a break."""
    return film.program().edited(named(name).edits())


#: films that were run, by break and schedule
_FILMS: dict[tuple[str, str], film.Film] = {}


def film_of(name: str = NOTHING, schedule: str = "fair") -> film.Film:
    """The film of a break under a schedule; it runs once."""
    key = named(name).name, schedule
    if key == (NOTHING, "fair"):
        return whole()
    if key not in _FILMS:
        broken = None if name == NOTHING else broken_program(name)
        _FILMS[key] = film.shoot(broken, schedule)
    return _FILMS[key]


def is_run(name: str, schedule: str) -> bool:
    """Whether a film is there already."""
    return (name, schedule) in {*_FILMS, (NOTHING, "fair")}
