"""Exercises of notebooks 30 to 39: waves, splits, merges, masks."""

from __future__ import annotations

from functools import cache

import numpy as np

from ...core.problem import Problem
from ...plan import make_plan
from ...plan.policies import fa3_splits
from ...simulate import constants_for, simulate
from .hints import Attempt, Check, need, number, parts

#: us of a launch, and how far off an answer may be with full waves and without (exercise 30.1)
LAUNCH_US, FULL_WAVES, PARTLY_FULL = 0.7, 0.03, 0.25
#: SMs of a card on which a launch is a large part of the time, and us of its tiles: `a` and `b`
FEW_SMS, SHORT_TILE = 4, (0.5, 0.25)


def _short_waves(attempt: Attempt) -> None:
    """Full waves of tiles as short as a launch: how often it is counted shows here, and whether
    the number of SMs counts.
    """
    a, b = SHORT_TILE
    for waves in (1, 3):
        tiles = waves * FEW_SMS
        mine = number(attempt(tiles, 1, a, b, FEW_SMS), "The time")
        right = LAUNCH_US + waves * (a + b)
        need(
            abs(mine / right - 1) < FULL_WAVES,
            f"{tiles} tiles of 1 block on {FEW_SMS} SMs, a = {a} us and b = {b} us: {mine:.2f} us "
            f"is too {'short' if mine < right else 'long'}; how many waves are that, and is the "
            "launch counted once?",
        )


@cache
def _simulated(batch: int, kv_len: int) -> float:
    plan = make_plan(Problem.uniform(batch, 1, kv_len, 128), policy="none", schedule="grid")
    return simulate(plan, constants_for(64).at_full_load()).makespan


def _waves(attempt: Attempt) -> str:
    short, long = _simulated(66, 640), _simulated(66, 1280)
    b = (long - short) / 10
    a = short - LAUNCH_US - 10 * b
    for batch, kv_len in ((66, 2048), (132, 2048), (67, 2048), (150, 4096)):
        tiles = 2 * batch
        mine = number(attempt(tiles, kv_len // 64, a, b, 132), "The time")
        ratio, full = mine / _simulated(batch, kv_len), not batch % 66
        far = f"{tiles} tiles of {kv_len // 64} blocks on 132 SMs: {mine:.1f} us is "
        far += "too short" if ratio < 1 else "too long"
        why = "how many waves are that, and is the launch counted once?"
        if not full:
            why = "the last wave is not full, and takes about as long as a full one"
        need(abs(ratio - 1) < (FULL_WAVES if full else PARTLY_FULL), f"{far}; {why}")
    _short_waves(attempt)
    return "Waves times the time of a tile, plus the launch: close to what the simulator says."


def _fa3(attempt: Attempt) -> str:
    cases = [(row_tiles, 128, 132) for row_tiles in (1, 2, 8, 30, 64, 110)]
    bounded = ((3, 4, 132), (1, 512, 132), (1, 128, 66), (1, 30, 132))
    for row_tiles, blocks, sms in (*cases, *bounded):
        right = fa3_splits(row_tiles=row_tiles, max_blocks=blocks, sms=sms)
        got = number(attempt(row_tiles, blocks, sms), "The number of splits")
        tiles, splits = ("s" if n != 1 else "" for n in (row_tiles, got))
        case = f"{row_tiles} row tile{tiles}, {blocks} blocks, {sms} SMs: {got:g} split{splits}, "
        need(
            got >= right,
            case + "too few: the efficiency is below 85 % of the best, or the waves are not "
            "rounded up",
        )
        need(
            got <= right,
            case
            + "too many: take the *fewest* that pass, and 1 where row tiles alone fill 80 % of "
            "the SMs or there are no more than 4 blocks; 128 splits are the most that are tried, "
            "and no more than there are SMs or blocks",
        )
    return "Your rule makes the same choices as FlashAttention-3."


def _merge(attempt: Attempt) -> str:
    none = -np.inf
    cases = (
        ([1.0], 0.0, [3.0], 0.0, [2.0], np.log(2), "two pieces of equal weight: out is their mean"),
        ([1.0], 0.0, [3.0], np.log(3), [2.5], np.log(4), "weigh each out by exp(lse)"),
        ([1.0], 1e3, [3.0], 1e3, [2.0], 1e3 + np.log(2), "subtract the larger lse before exp"),
        ([1.0], 0.0, [3.0], 1e3, [3.0], 1e3, "subtract the larger lse before exp"),
        ([1.0], 1e3, [3.0], 0.0, [1.0], 1e3, "subtract the larger lse before exp"),
        ([1.0], 5.0, [0.0], none, [1.0], 5.0, "a piece with lse minus infinity has weight zero"),
        ([0.0], none, [1.0], 5.0, [1.0], 5.0, "the first piece may be the empty one"),
        ([0.0], none, [0.0], none, [0.0], none, "two empty pieces give out 0, and no NaN"),
        ([1.0, 5.0], 0.0, [3.0, 9.0], 0.0, [2.0, 7.0], np.log(2), "weigh every number of out"),
    )
    for a, lse_a, b, lse_b, want_out, want_lse, hint in cases:
        with np.errstate(all="ignore"):
            out, lse = parts(attempt(a, lse_a, b, lse_b), "out", "lse")
        values = [number(value, "Each number of out") for value in np.ravel(out)]
        need(
            len(values) == len(want_out),
            f"out has as many numbers as out_a, here {len(want_out)}, and yours has {len(values)}",
        )
        need(np.allclose(values, want_out), f"lse {lse_a:g} and {lse_b:g}, out: {hint}")
        lse = number(lse, "lse")
        need(
            lse == want_lse or np.isclose(lse, want_lse),
            f"lse {lse_a:g} and {lse_b:g}, lse: the logarithm of the sum of both weights",
        )
    return "It survives an lse of 1000 on either side, one empty piece, and two."


def _invariant(attempt: Attempt) -> str:
    for blocks in (1, 7, 128, 5000):
        neighbours = [[], [64], [64] * 31, [64] * 127, [1] * 31, [9000] * 31]
        batches = [[blocks, *rest] for rest in neighbours]
        batches += [[*rest, blocks] for rest in neighbours]
        answers = {number(attempt(blocks, batch), "The number of splits") for batch in batches}
        need(
            len(answers) == 1,
            f"{blocks} blocks: the batch changes the number of splits, so it is not invariant",
        )
        (splits,) = answers
        need(splits == int(splits), f"{blocks} blocks: {splits:g} is no whole number of splits")
        need(splits >= 1, f"{blocks} blocks: a request has at least one split")
        need(splits <= blocks, f"{blocks} blocks: {splits:.0f} splits would leave empty ones")
        need(splits <= 32, f"{blocks} blocks: {splits:.0f} splits, and 32 are the most allowed")
    need(
        attempt(128, [128]) >= 4, "128 blocks: at least 4 splits, so that one request uses some SMs"
    )
    return "Whoever is beside it in the batch, a request is split in the same places."


def _path(attempt: Attempt, parents: list[int], good: list[bool]) -> list[int]:
    """A reader's path; copies are handed over, since an answer may write into its lists."""
    got = attempt(list(parents), list(good))
    need(isinstance(got, list | tuple), "Return a list of token numbers, from the root down")
    return list(got)


def _accepted(attempt: Attempt) -> str:
    tree = [-1, 0, 0, 1, 1]
    cases: tuple[tuple[list[bool], list[int], str], ...] = (
        ([True] * 5, [0, 1, 3], "all are good: of two paths of three tokens take the smaller end"),
        ([True, True, True, False, True], [0, 1, 4], "token 3 is rejected, 4 is not"),
        (
            [True, False, True, True, True],
            [0, 2],
            "tokens 3 and 4 count only if their parent 1 does",
        ),
        ([False, True, True, True, True], [], "without its root nothing of a tree is kept"),
    )
    for good, right, hint in cases:
        got = _path(attempt, tree, good)
        need(got == right, f"parents {tree}, good {[int(g) for g in good]}: {hint}")
    for parents, path, hint in (
        ([-1, -1, 1], [1, 2], "Two trees: a draft may have several roots, parent -1 each"),
        ([-1, 0, 0, 2], [0, 2, 3], "The longest path may go through a later child"),
        (
            [-1, -1, 1, 0],
            [1, 2],
            "Of equally long paths take the one that ends in the smaller number",
        ),
    ):
        got = _path(attempt, parents, [True] * len(parents))
        need(got == path, f"Parents {parents}, all good: {hint[0].lower()}{hint[1:]}")
    return "What is kept is what the large model would have written, several tokens a step."


def _yield(attempt: Attempt) -> str:
    for drafts in range(6):
        for chance in (0.0, 0.5, 0.7, 1.0):
            mine = number(attempt(drafts, chance), "The number of tokens")
            case = f"{drafts} drafts, accepted with {chance}: "
            right = sum(chance**i for i in range(drafts + 1))
            need(mine > 0.999, case + "the model's own token is always there")
            need(
                drafts < 2 or chance in (0.0, 1.0) or abs(mine - 1 - drafts * chance) > 1e-6,
                case + "a draft counts only if all before it were accepted",
            )
            need(abs(mine - right) < 1e-6, case + f"{mine:.4g} tokens are too many or too few")
    return "Each further draft yields less than the one before it, and costs as much or more."


def _visible(attempt: Attempt) -> str:
    for world in (1, 2, 5):
        for rank in range(world):
            for position in (0, 1, 4, 9, 4095):
                mine = number(attempt(position, rank, world), "The number of tokens")
                right = len(range(rank, position + 1, world))
                case = f"position {position}, rank {rank} of {world}: {mine:g} "
                need(mine == int(mine), case + "is no whole number of tokens")
                tokens = f"of the rank's tokens {rank}, {rank + world}, ... "
                need(mine <= right, case + f"is too many: {tokens}only those up to it count")
                itself = "the token at this position is on the rank, and sees itself"
                own = position % world == rank
                why = itself if own else f"{tokens}all up to the position count"
                need(mine == right, case + f"is too few: {why}")
    return "Right on every rank: over all ranks the counts add up to position + 1."


CHECKS: dict[str, Check] = {
    "30.1": _waves,
    "31.1": _fa3,
    "32.1": _merge,
    "33.1": _invariant,
    "34.1": _yield,
    "35.1": _accepted,
    "36.1": _visible,
}
