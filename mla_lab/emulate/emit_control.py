"""Python of branches, barriers, fences, and operations across the threads of a warp."""

from __future__ import annotations

from ..core.errors import unsupported
from .ptx import Instruction
from .writer import ALL_LANES, Lines, Writer, emits, members_of

REDUCTIONS = {"add": "add", "max": "maximum", "min": "minimum", "and": "bitwise_and"}
REDUCTIONS |= {"or": "bitwise_or", "xor": "bitwise_xor"}


def _members(s: Instruction, pc: int) -> Lines:
    """That those who execute it are in its member mask, where that is not the whole warp."""
    members = members_of(s)
    return [f"only_members(g, {members}, MASK, {pc})"] if members != ALL_LANES else []


@emits("bra")
def _bra(w: Writer, s: Instruction, pc: int) -> Lines:
    target = w.block_at[w.kernel.labels[s.args[0]]]
    if s.guard is None:
        return [f"return {target}"]
    taken = w.row(s.guard, "pred")
    return [f"return g.branch({taken}, m, {s.negated}, {target}, {w.next_block(pc)})"]


@emits("ret", "exit")
def _exit(w: Writer, s: Instruction, pc: int) -> Lines:
    if s.guard is None:
        return ["return EXIT"]
    taken = w.row(s.guard, "pred")
    return [f"return g.branch({taken}, m, {s.negated}, EXIT, {w.next_block(pc)})"]


@emits("trap", "brkpt")
def _trap(w: Writer, s: Instruction, pc: int) -> Lines:
    return [f"g.trap({pc}, MASK)"]


@emits("shfl")
def _shfl(w: Writer, s: Instruction, pc: int) -> Lines:
    target, _, valid = s.args[0].partition("|")
    found = w.row(valid, "pred") if valid else "None"
    a, b, c = (w.value(x, "u32") for x in s.args[1:4])
    out = w.row(target, "u32")
    how = f"({a}, {b}, {c}), {s.parts[2]!r}, MASK, {pc}"
    return [*_members(s, pc), f"shfl(g, {out}, {found}, {how})"]


@emits("vote")
def _vote(w: Writer, s: Instruction, pc: int) -> Lines:
    kind = "u32" if s.parts[2] == "ballot" else "pred"
    what = f"{w.row(s.args[0], kind)}, {w.predicate(s.args[1])}, {s.parts[2]!r}, {members_of(s)}"
    return [*_members(s, pc), f"vote(g, {what}, MASK)"]


@emits("elect")
def _elect(w: Writer, s: Instruction, pc: int) -> Lines:
    leader, _, elected = s.args[0].partition("|")
    row = w.row(leader, "u32") if leader != "_" else "None"
    elected = w.row(elected, "pred")
    return [*_members(s, pc), f"elect(g, {row}, {elected}, {members_of(s)}, MASK)"]


@emits("redux")
def _redux(w: Writer, s: Instruction, pc: int) -> Lines:
    kind = s.parts[-1].replace("b", "u")
    target, value = w.row(s.args[0], kind), w.value(s.args[1], kind)
    what = f"{target}, {value}, {REDUCTIONS[s.parts[2]]}, {members_of(s)}"
    return [*_members(s, pc), f"redux(g, {what}, MASK)"]


@emits("movmatrix")
def _movmatrix(w: Writer, s: Instruction, pc: int) -> Lines:
    return [f"movmatrix(g, {w.row(s.args[0], 'u32')}, {w.value(s.args[1], 'u32')}, MASK)"]


@emits("bar", "barrier")
def _bar(w: Writer, s: Instruction, pc: int) -> Lines:
    if s.parts[1] == "warp":
        return [*_members(s, pc), f"g.machine.checker.warp_sync(g, {members_of(s)})"]
    after = w.next_block(pc)
    if s.parts[1] == "cluster":
        if s.parts[2] == "wait":
            return [f"return cluster_wait(g, m, {after}, {pc})"]
        return [f"return cluster_arrive(g, m, {'relaxed' in s.parts}, {after}, {pc})"]
    if s.parts[1] == "red":
        count = w.value(s.args[2], "u32") if len(s.args) > 3 else "None"
        target, flag = w.row(s.args[0], "pred"), w.value(s.args[-1], "pred")
        where = f"{w.value(s.args[1], 'u32')}, {count}"
        red = f"({target}, {flag}, {'and' in s.parts})"
        return [f"return named_sync(g, {where}, m, {after}, {pc}, {red})"]
    count = w.value(s.args[1], "u32") if len(s.args) > 1 else "None"
    function = "named_arrive" if s.parts[1] == "arrive" else "named_sync"
    return [f"return {function}(g, {w.value(s.args[0], 'u32')}, {count}, m, {after}, {pc})"]


@emits("mbarrier")
def _mbarrier(w: Writer, s: Instruction, pc: int) -> Lines:
    kind, args = s.parts[1], s.args
    if kind == "init":
        return [f"mbarrier_init(g, {w.address(args[0])}, {w.value(args[1], 'u32')}, MASK, {pc})"]
    if kind == "inval":
        return [f"mbarrier_inval(g, {w.address(args[0])}, MASK, {pc})"]
    if kind == "expect_tx":
        nbytes = w.value(args[1], "u32")
        return [f"mbarrier_expect(g, {w.address(args[0])}, {nbytes}, MASK, {pc})"]
    if kind == "arrive":
        count = nbytes = "None"
        if "expect_tx" in s.parts:
            nbytes = w.value(args[2], "u32")
        elif len(args) > 2:
            count = w.value(args[2], "u32")
        what = f"{count}, {nbytes}, {'relaxed' in s.parts}"
        return [f"mbarrier_arrive(g, {w.address(args[1])}, {what}, MASK, {pc})"]
    if kind in ("try_wait", "test_wait") and "parity" in s.parts:
        if not w.matters(args[0], pc):
            return [f"mbarrier_polled(g, {w.address(args[1])}, MASK, {pc})"]
        passed, parity = w.row(args[0], "pred"), w.value(args[2], "u32")
        how = f"({pc}, {kind == 'try_wait'}, {'relaxed' in s.parts})"
        where = f"{passed}, {w.address(args[1])}, {parity}, m, {w.next_block(pc)}"
        return [f"return mbarrier_wait(g, {where}, {how})"]
    raise unsupported("instruction", s.opcode, "mbarriers waited for by parity")


@emits("fence", "membar")
def _fence(w: Writer, s: Instruction, pc: int) -> Lines:
    # memory is always in order here; checks note what a fence orders
    if "async" in s.opcode:
        # a fence of global memory alone shows nothing of shared memory, which is what checks follow
        shows = f"g.machine.checker.proxies.fence(g, MASK, {pc})"
        return ["pass" if "global" in s.parts else shows]
    scope = next((p for p in s.parts if p in ("cta", "cluster")), "")
    kind = "init" if "mbarrier_init" in s.opcode else scope
    kind = kind or ("sc" if s.parts[0] == "membar" or "sc" in s.parts else "memory")
    return [f"g.machine.checker.fence(g, {kind!r})"]


@emits("setmaxnreg", "prefetch", "nanosleep", "griddepcontrol", "applypriority")
def _nothing(w: Writer, s: Instruction, pc: int) -> Lines:
    """No effect on what is computed: launches follow each other, registers are not counted."""
    return ["pass"]
