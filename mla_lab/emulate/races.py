"""Races by happens-before, missing proxy fences, and reads of what nobody wrote.

Each warp, each warp's products, each warp's cp.async copies and each mbarrier is an agent with a
clock that counts its accesses. A warp carries two vectors over all agents: what of theirs happened
before, and what of that an asynchronous unit may see as well, since a fence.proxy.async stood
between. Barriers hand vectors on. Each word of shared memory, or each part of one that is used in
parts, remembers who wrote it last and when, and when each agent last read it; an access that is not
ordered behind those is a race under every schedule, whatever came first in this one.

What a copy of TMA writes belongs to the mbarrier on which it completes: the phase number is the
clock, and a warp that has waited for the phase has seen the bytes.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np

from .arithmetic import some
from .barriers import Mbarrier
from .exits import Exits
from .findings import Fault, Finding, finding
from .flight import Flight
from .gang import Gang, member_lanes
from .global_checks import GlobalChecks
from .machine import Machine
from .parts import CtaLike
from .proxy_fences import ProxyFences
from .ptx import SIZES, Place
from .shadow import (
    AGENTS,
    ALL_LANES,
    COPIES,
    FENCED,
    LET_GO,
    PRODUCTS,
    SEEN,
    TAKEN,
    UNITS,
    Shadow,
    lane_bits,
    least_store,
    since,
)
from .tensor_checks import TensorChecks
from .tiles import ELEMENT_BYTES, operand_words, quarter_words
from .wgmma import Issued

Row = np.ndarray
#: mbarriers of a CTA
MAX_BARRIERS = 96
#: in place of a lane, where several read a word
SEVERAL = 32
#: findings kept of one run
MAX_FINDINGS = 200


class Checker:
    """Watches one launch; `findings` in the order in which they were met, each once."""

    def __init__(self, strict: bool = False, stop: bool = False) -> None:
        self.strict, self.stop = strict, stop
        self.findings: list[Finding] = []
        self._known: set[tuple[Any, ...]] = set()
        self.flight = Flight(self)
        self.tensor = TensorChecks(self)
        #: how often instructions name each register
        self._uses: Counter[str] | None = None

    # life of a launch

    def begin(self, machine: Machine) -> None:
        """Number the agents of a launch."""
        self.machine = machine
        gangs = [g for cta in machine.ctas for g in cta.gangs]
        self.size = AGENTS * len(gangs) + MAX_BARRIERS * len(machine.ctas) + 1
        self.barriers = AGENTS * len(gangs)
        self.places: list[list[int]] = [[] for _ in range(self.size)]
        self.names: dict[int, str] = {}
        self.levels = TAKEN + 1 if self.strict else LET_GO
        self.vectors = np.zeros((len(gangs), self.levels, self.size), np.int32)
        #: vectors at the last fence of a cluster's scope or more
        self.at_fence = np.zeros_like(self.vectors)
        #: clock of the last meeting of a warp's threads
        self.met = np.zeros(len(gangs), np.int64)
        #: accesses of shared memory since then: (clock, lanes)
        self.recent: list[list[tuple[int, int]]] = [[] for _ in gangs]
        #: meetings of some lanes since then: (lanes, clock, clock of the cp.async copies)
        self.parts_met: list[list[tuple[int, int, int]]] = [[] for _ in gangs]
        #: clock of a warp's cp.async copies that had landed when its threads last met
        self.copies_met = np.zeros(len(gangs), np.int64)
        least = least_store(machine.ctas[0].program.kernel, shared=True) if machine.ctas else 4
        self.shadows = {id(cta): Shadow(cta.shared.size, least) for cta in machine.ctas}
        self.globals = GlobalChecks(self, machine.memory.bytes.size)
        #: mbarriers that a warp has initialised since its last fence
        self.hidden: dict[int, list[Mbarrier]] = {}
        self.commits: list[list[int]] = [[] for _ in gangs]
        self.copy_commits: list[list[int]] = [[] for _ in gangs]
        self.exits = Exits(self, machine)
        self.proxies = ProxyFences(self)
        for i, g in enumerate(gangs):
            g.agent = i
            self.names[AGENTS * i] = g.name
            for part, what in UNITS.items():
                self.names[AGENTS * i + part] = f"a {what} of {g.name}"
        if machine.before_block is None:
            machine.before_block = self.flight.before_block

    def at_exit(self, g: Gang) -> None:
        """All threads of a warp have exited."""
        last = len(g.cta.program.kernel.code) - 1
        self.exits.at_exit(g)
        self.tensor.at_exit(g)
        if g.issued:
            self.note(g, g.issued[0].product.pc, "open at exit", "a product that nobody committed")
        if g.copies or any(g.copy_groups):
            self.note(g, last, "open at exit", "cp.async copies that nobody waited for")

    def finish(self, machine: Machine) -> None:
        """The launch is over."""
        self.tensor.finish(machine)
        self.exits.finish(machine)
        for cta in machine.ctas:
            for bar in cta.mbarriers.values():
                if bar.bytes:
                    g = cta.gangs[0]
                    text = f"{bar.bytes} transaction bytes are left on {bar.name}"
                    pc = self.places[bar.agent][-1] if self.places[bar.agent] else 0
                    self.note(g, pc, "bytes left", text)

    def close(self) -> None:
        """Let go of the parts that hold this in turn: clocks of a launch can be gigabytes, for
        which the garbage collector would not come soon enough."""
        for part in ("flight", "tensor", "globals", "exits", "proxies"):
            vars(self).pop(part, None)

    def note(
        self, g: Gang, pc: int, kind: str, text: str, others: tuple[tuple[str, Place], ...] = ()
    ) -> None:
        """Keep a finding, once for each pair of lines."""
        made = finding(g, pc, kind, text, others)
        where: Any = made.place if made.place.line else made.instruction
        key = (kind, where, tuple(place for _, place in others))
        if key not in self._known and len(self.findings) < MAX_FINDINGS:
            self._known.add(key)
            self.findings.append(made)
            if self.stop:
                raise Fault(made)

    # clocks

    def tick(self, g: Gang, pc: int, part: int = 0) -> int:
        """A new access of an agent of a warp; its clock."""
        agent = AGENTS * g.agent + part
        self.places[agent].append(pc)
        clock = len(self.places[agent])
        if not part:
            self.vectors[g.agent, SEEN, agent] = clock
        return clock

    def _bar_tick(self, bar: Mbarrier, pc: int) -> int:
        places, clock = self.places[bar.agent], bar.phase + 1
        places.extend([pc] * (clock - len(places)))
        places[clock - 1] = pc
        return clock

    def where(self, agent: int, clock: int) -> tuple[str, Any]:
        places = self.places[agent]
        pc = places[min(clock, len(places)) - 1] if places else 0
        return self.names[agent], self.machine.ctas[0].program.kernel.code[pc].place

    def takes(self, g: Gang, vector: Row | None) -> None:
        """A warp learns what a barrier collected."""
        if vector is not None:
            self.learn(g, vector)
        self.warp_sync(g)

    def learn(self, g: Gang, vector: Row) -> None:
        """What lies before an event now lies before the warp's next access."""
        mine = self.vectors[g.agent, :TAKEN]
        np.maximum(mine, vector[:TAKEN], out=mine)

    def joined(self, vector: Row | None, g: Gang, relaxed: bool = False) -> Row:
        """What a barrier has collected, with this warp's share."""
        self.warp_sync(g)
        mine = self.at_fence[g.agent] if relaxed else self.vectors[g.agent]
        return mine.copy() if vector is None else np.maximum(vector, mine)

    def warp_sync(self, g: Gang, members: int = ALL_LANES) -> None:
        """The threads of a warp meet, all or those of a member mask."""
        clock = len(self.places[AGENTS * g.agent])
        copies = int(self.vectors[g.agent, SEEN, AGENTS * g.agent + COPIES])
        if members != ALL_LANES:
            self.parts_met[g.agent].append((members, clock, copies))
            inside = [found for found in self.recent[g.agent] if found[1] & ~members]
            self.recent[g.agent] = inside
            return
        self.copies_met[g.agent] = copies
        self._meets(g, clock)

    def _meets(self, g: Gang, clock: int) -> None:
        self.met[g.agent] = max(self.met[g.agent], clock)
        self.parts_met[g.agent] = [part for part in self.parts_met[g.agent] if part[1] > clock]
        self.recent[g.agent] = [found for found in self.recent[g.agent] if found[0] > clock]

    def fence(self, g: Gang, kind: str) -> None:
        """fence.mbarrier_init shows mbarriers that were initialised to asynchronous units; it and
        others, but for `ProxyFences`, order relaxed accesses, of CTAs that `kind`, the scope,
        reaches."""
        if kind == "init":
            self.shows_barriers(g)
        mine, everybody, cluster = self.vectors[g.agent], len(self.machine.ctas), len(g.cta.peers)
        reach = {"cta": 1, "cluster": cluster, "init": cluster}.get(kind, everybody)
        if reach >= cluster:
            self.at_fence[g.agent] = mine
        if reach == everybody:
            self.globals.fence(g, kind == "sc")

    def shows_barriers(self, g: Gang) -> None:
        """Asynchronous units see the mbarriers that a warp has initialised."""
        for bar in self.hidden.pop(g.agent, ()):
            bar.shown = True

    # mbarriers

    def initialises(self, g: Gang, bar: Mbarrier, pc: int) -> None:
        """mbarrier.init"""
        taken = sum(b.agent >= 0 for b in bar.cta.mbarriers.values())
        index = [id(cta) for cta in self.machine.ctas].index(id(bar.cta))
        bar.agent = self.barriers + MAX_BARRIERS * index + min(taken, MAX_BARRIERS - 1)
        self.names[bar.agent] = f"a copy to {bar.name}"
        bar.made = (AGENTS * g.agent, self.tick(g, pc))
        bar.released = np.zeros((self.levels, self.size), np.int32)
        self.hidden.setdefault(g.agent, []).append(bar)
        shadow = self.shadows[id(bar.cta)]
        words = shadow.cells_of(slice(bar.offset >> 2, (bar.offset >> 2) + 2))
        if not shadow.barrier[words].all():
            self._ordered_write(g, shadow, words, pc)
        shadow.barrier[words], shadow.writer[words], shadow.when[words] = True, -1, 0

    def invalidates(self, cta: CtaLike, offset: int) -> None:
        """mbarrier.inval: its place may be written again."""
        shadow = self.shadows[id(cta)]
        shadow.barrier[shadow.cells_of(slice(offset >> 2, (offset >> 2) + 2))] = False

    def uses(self, g: Gang, bar: Mbarrier, pc: int) -> None:
        """Any operation on an mbarrier must come after its initialisation."""
        agent, clock = bar.made
        if self.vectors[g.agent, SEEN, agent] < clock:
            text = f"{bar.name} is used, and its initialisation is not ordered before"
            self.note(g, pc, "race", text, (self.where(agent, clock),))

    def releases(self, g: Gang, bar: Mbarrier, relaxed: bool, pc: int, threads: Row) -> None:
        """mbarrier.arrive by some threads of a warp: what others did since the warp met is not
        ordered before, unless they arrived in this phase after they did it."""
        if bar.cta is not g.cta:
            self.exits.uses(g, bar.cta, (AGENTS * g.agent, self.tick(g, pc)), pc)
        mine = self.at_fence[g.agent] if relaxed else self.vectors[g.agent]
        earlier = [] if relaxed else bar.arrivals.setdefault(g.agent, [])
        earlier.append((len(self.places[AGENTS * g.agent]), lane_bits(g.lane[threads])))
        loose = next((c for c, lanes in self.recent[g.agent] if lanes & ~since(earlier, c)), 0)
        if loose:
            mine = mine.copy()
            np.minimum(mine[:, AGENTS * g.agent], loose - 1, out=mine[:, AGENTS * g.agent])
        np.maximum(bar.released, mine, out=bar.released)

    def completes(self, bar: Mbarrier) -> None:
        """A phase of an mbarrier is complete."""
        bar.arrivals.clear()
        bar.completed = bar.released.copy()
        bar.completed[:, bar.agent] = bar.phase

    def acquires(self, g: Gang, bar: Mbarrier) -> None:
        """A wait has ended. Threads wait alone: a warp has met as far as its arrivals brought."""
        if bar.completed is not None:
            self.learn(g, bar.completed)
            own = bar.completed[SEEN]
            self._meets(g, int(own[AGENTS * g.agent]))
            met = max(int(self.copies_met[g.agent]), int(own[AGENTS * g.agent + COPIES]))
            self.copies_met[g.agent] = met

    # shared memory

    def read(self, g: Gang, cta: CtaLike, where: tuple[Row, int], active: Any, pc: int) -> None:
        """Threads of a warp read `where` = (offsets, bytes each)."""
        shadow = self.shadows[id(cta)]
        words = shadow.cells(where[0], self._bytes_used(g, where[1], pc))
        clock, agent = self.tick(g, pc), AGENTS * g.agent
        self.exits.uses(g, cta, (agent, clock), pc)
        self.recent[g.agent].append((clock, lane_bits(g.lane[active])))
        writer, when = shadow.writer[words], shadow.when[words]
        self._unwritten(g, shadow, words, pc)
        late = when > self.vectors[g.agent, SEEN][writer]
        if some(late):
            self._race(g, pc, "read", shadow, words, (writer, when, late))
        self._inside(g, pc, shadow, words, active)
        shadow.reads_of(agent)[words] = clock

    def _bytes_used(self, g: Gang, n: int, pc: int) -> int:
        """Of the `n` bytes of a load, those of words up to the last whose register anything uses:
        compilers load the padding of a struct with its members."""
        program = g.cta.program
        instruction = program.kernel.code[pc]
        if instruction.parts[0] != "ld" or not instruction.parts[-2].startswith("v"):
            return n
        if self._uses is None:
            self._uses = Counter(name for names in program.named for name in names)
        found = [name.strip() for name in instruction.args[0].strip("{}").split(",")]
        last = max((i for i, name in enumerate(found) if self._uses[name] > 1), default=0)
        return min(n, -(-(last + 1) * SIZES[instruction.parts[-1]] // 4) * 4)

    def write(self, g: Gang, cta: CtaLike, where: tuple[Row, int], active: Any, pc: int) -> None:
        """Threads of a warp write `where` = (offsets, bytes each)."""
        shadow = self.shadows[id(cta)]
        words = shadow.cells(*where)
        clock, agent = self.tick(g, pc), AGENTS * g.agent
        self.exits.uses(g, cta, (agent, clock), pc)
        self.recent[g.agent].append((clock, lane_bits(g.lane[active])))
        self._ordered_write(g, shadow, words, pc)
        shadow.writer[words], shadow.when[words] = agent, clock
        lanes = g.lane[active]
        shadow.lane[words] = lanes[:, None] if len(lanes) == len(where[0]) else -1

    def _ordered_write(self, g: Gang, shadow: Shadow, words: Any, pc: int) -> None:
        vector = self.vectors[g.agent, SEEN]
        over = shadow.barrier[words]
        if some(over):
            at = shadow.byte(words, int(over.reshape(-1).argmax()))
            self.note(g, pc, "barrier", f"byte {at} of shared memory, an mbarrier's, is written")
        writer, when = shadow.writer[words], shadow.when[words]
        late = when > vector[writer]
        if some(late):
            self._race(g, pc, "write", shadow, words, (writer, when, late))
        readers, reads = shadow.readers()
        if len(readers):
            found = reads[:, words].reshape(len(readers), -1)
            after = found > vector[readers][:, None]
            if some(after):
                row, column = np.argwhere(after)[0]
                other = self.where(int(readers[row]), int(found[row, column]))
                at = shadow.byte(words, int(column))
                text = f"byte {at} of shared memory is written, and its read is not ordered before"
                self.note(g, pc, "race", text, (other,))

    def _race(
        self, g: Gang, pc: int, what: str, shadow: Shadow, words: Any, found: tuple[Row, Row, Row]
    ) -> None:
        writer, when, late = (x.reshape(-1) for x in found)
        i = int(late.argmax())
        text = f"byte {shadow.byte(words, i)} of shared memory: this {what} and the write below it "
        text += "are not ordered"
        self.note(g, pc, "race", text, (self.where(int(writer[i]), int(when[i])),))

    def _unwritten(self, g: Gang, shadow: Shadow, words: Any, pc: int) -> None:
        writer = shadow.writer[words]
        if some(writer < 0):
            at = shadow.byte(words, int((writer.reshape(-1) < 0).argmax()))
            text = f"byte {at} of shared memory, which nobody has written, is read"
            self.note(g, pc, "unwritten", text)

    def _inside(self, g: Gang, pc: int, shadow: Shadow, words: Row, active: Any) -> None:
        """A word from another thread of the warp, which it has not met since."""
        lanes = g.lane[active]
        if len(lanes) != len(words):  # a row of ldmatrix goes to several lanes
            lanes = np.full(len(words), SEVERAL)
        self._other_lane(g, pc, shadow, words, lanes)

    def alone(self, g: Gang, cta: CtaLike, words: slice, lane: int, pc: int) -> None:
        """A lane issues a copy of words, which other lanes of its warp may have written."""
        shadow = self.shadows[id(cta)]
        every = shadow.cells_of(np.arange(words.start, words.stop))[None]
        self._other_lane(g, pc, shadow, every, np.array([lane]))

    def _other_lane(self, g: Gang, pc: int, shadow: Shadow, words: Row, lanes: Row) -> None:
        writer, when, lane = shadow.writer[words], shadow.when[words], shadow.lane[words]
        for part, met in ((0, self.met[g.agent]), (COPIES, self.copies_met[g.agent])):
            agent = AGENTS * g.agent + part
            fresh = (writer == agent) & (when > met)
            if not some(fresh):
                continue
            wrong = fresh & (lane != lanes[:, None]) & (lane >= 0)
            for members, *clocks in self.parts_met[g.agent]:
                inside = np.append(member_lanes(members), False)
                both = inside[lane] & inside[lanes][:, None]
                wrong &= ~both | (when > clocks[part // COPIES])
            if some(wrong):
                clock = int(when.reshape(-1)[int(wrong.reshape(-1).argmax())])
                text = "another thread of the warp wrote this; no bar.warp.sync stands between"
                self.note(g, pc, "race", text, (self.where(agent, clock),))

    # asynchronous units

    def _visible(self, g: Gang, shadow: Shadow, words: Any, pc: int, what: str) -> None:
        """Writes that an asynchronous unit meets must be ordered before it, and fenced."""
        writer, when = shadow.writer[words].reshape(-1), shadow.when[words].reshape(-1)
        late = when > self.vectors[g.agent, FENCED][writer]
        if not some(late) or not some(late := late & ~self.proxies.shows(g, shadow, words)):
            return
        racing = late & (when > self.vectors[g.agent, SEEN][writer])
        i = int((racing if some(racing) else late).argmax())
        at = shadow.byte(words, i)
        kind = "race" if some(racing) else "proxy fence"
        text = f"no fence.proxy.async between a write to byte {at} of shared memory and {what}"
        if kind == "race":
            text = f"byte {at} of shared memory: this {what} and the write are not ordered"
        self.note(g, pc, kind, text, (self.where(int(writer[i]), int(when[i])),))

    def copy_in(
        self, g: Gang, cta: CtaLike, words: slice, bar: Mbarrier, pc: int, generic: bool = False
    ) -> None:
        """A copy that completes on `bar` will write words of a CTA's shared memory."""
        shadow = self.shadows[id(cta)]
        words = shadow.cells_of(words)
        if not any(other.fragments for other in cta.gangs):
            self.note(g, pc, "out of bounds", f"CTA {cta.name} has exited; a copy writes to it")
        if not bar.shown:
            text = f"no fence.mbarrier_init between the initialisation of {bar.name} and a copy"
            self.note(g, pc, "proxy fence", text, (self.where(*bar.made),))
        self._ordered_write(g, shadow, words, pc)
        if not generic:
            self._visible(g, shadow, words, pc, "a copy over it")
        shadow.writer[words], shadow.when[words] = bar.agent, self._bar_tick(bar, pc)
        self.exits.uses(g, cta, (bar.agent, bar.phase + 1), pc)

    def copy_out(self, g: Gang, cta: CtaLike, words: slice, bar: Mbarrier, pc: int) -> None:
        """A copy that completes on `bar` will read words of a CTA's shared memory."""
        self.unit_reads(g, cta, words, (bar.agent, bar.phase + 1), (pc, "a copy of it"))
        self._bar_tick(bar, pc)

    def product(self, g: Gang, issued: Issued) -> None:
        """A wgmma was issued: it reads shared memory until it is done."""
        p, size = issued.product, ELEMENT_BYTES[issued.product.kind]
        operands = [operand_words(issued.b, p.n, p.k, size, p.b_transposed)]
        if isinstance(issued.a, int):
            quarter = g.first // 32 % 4
            operands.append(quarter_words(issued.a, quarter, p.k, size, p.a_transposed))
        self.product_reads(g, g.cta, operands, p.pc, self.tick(g, p.pc, PRODUCTS))

    def product_reads(
        self, g: Gang, cta: CtaLike, operands: list[Row], pc: int, clock: int
    ) -> None:
        """A product of a warp, at `clock` of its products, reads words of a CTA's shared memory."""
        reader = AGENTS * g.agent + PRODUCTS
        for words in operands:
            self.unit_reads(g, cta, words, (reader, clock), (pc, "a product"))

    def unit_reads(
        self, g: Gang, cta: CtaLike, words: Any, reader: tuple[int, int], where: tuple[int, str]
    ) -> None:
        """An asynchronous unit, (agent, clock), reads words that somebody must have written, in
        order and fenced; `where` is the instruction and what reads."""
        shadow, (agent, clock), (pc, what) = self.shadows[id(cta)], reader, where
        words = shadow.cells_of(words)
        self._unwritten(g, shadow, words, pc)
        self._visible(g, shadow, words, pc, what)
        shadow.reads_of(agent)[words] = clock

    def wgmma_commit(self, g: Gang) -> None:
        """wgmma.commit_group"""
        agent = AGENTS * g.agent + PRODUCTS
        self.commits[g.agent].append(len(self.places[agent]))

    def wgmma_wait(self, g: Gang, left: int) -> None:
        """wgmma.wait_group: all but the last `left` groups are done, of the whole warp group, since
        the ISA makes one group per warp group; where `strict`, the warp's own rows alone.
        """
        for other in [g] if self.strict else g.team:
            commits, agent = self.commits[other.agent], AGENTS * other.agent + PRODUCTS
            done = len(self.commits[g.agent]) - left
            if done > 0:
                seen = self.vectors[g.agent, :, agent]
                np.maximum(seen, commits[done - 1], out=seen)

    def cp_async(self, g: Gang, offsets: Row, n: int, where: tuple[int, Row]) -> None:
        """Threads of a warp start copies of `n` bytes; `where` is the instruction and the lanes."""
        (pc, lanes), shadow = where, self.shadows[id(g.cta)]
        words = shadow.cells(offsets, n)
        clock, agent = self.tick(g, pc, COPIES), AGENTS * g.agent + COPIES
        self._ordered_write(g, shadow, words, pc)
        shadow.writer[words], shadow.when[words] = agent, clock
        shadow.lane[words] = lanes[:, None]

    def cp_commit(self, g: Gang) -> None:
        """cp.async.commit_group"""
        self.copy_commits[g.agent].append(len(self.places[AGENTS * g.agent + COPIES]))

    def cp_wait(self, g: Gang, left: int) -> None:
        """cp.async.wait_group"""
        commits, agent = self.copy_commits[g.agent], AGENTS * g.agent + COPIES
        if len(commits) > left:
            seen = self.vectors[g.agent, SEEN, agent]
            self.vectors[g.agent, SEEN, agent] = max(seen, commits[len(commits) - left - 1])

    def cp_settle(self, g: Gang) -> None:
        """All copies of a warp count for the arrival that follows."""
        agent = AGENTS * g.agent + COPIES
        self.vectors[g.agent, SEEN, agent] = len(self.places[agent])
