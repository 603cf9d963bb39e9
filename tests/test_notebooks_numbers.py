"""Every quantity in the prose of a notebook is computed here, from code or from its record."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest
import torch

from mla_lab import lab
from mla_lab.bench.cases import uniform_case
from mla_lab.bench.records import Row, problem_of, results
from mla_lab.bench.rotation import LEAST_BYTES, MANY
from mla_lab.core import kv_cache, masks
from mla_lab.core.gpu import H200
from mla_lab.core.problem import Problem
from mla_lab.lab import banks, film, film_breaks, ladder_facts, mla_math, session
from mla_lab.lab.checks import plans
from mla_lab.lab.explorers.budget import MOST_REGISTERS, WARPGROUP
from mla_lab.lab.explorers.neighbour import (
    PLAIN_RECORD,
    first_request_plan,
    invariance_costs,
    pieces,
)
from mla_lab.lab.measuring import ANCHOR, headline_rows, measured_card, runs
from mla_lab.lab.policies import FA3_SHARE
from mla_lab.lab.predicted import partial_mb
from mla_lab.lab.roofline import intensity
from mla_lab.lab.steps.catalogue import TILE, WIDTH
from mla_lab.lab.tile_homes import THREADS
from mla_lab.plan import make_plan
from mla_lab.plan.policies import fa3_splits
from mla_lab.simulate import constants_for, simulate

from .notebook_runner import NOTEBOOKS

ALL = sorted(NOTEBOOKS.glob("*.ipynb"))
ROOT = Path(__file__).resolve().parents[1]
#: a number with a unit, the kind that can be wrong
QUANTITY = re.compile(
    r"(?<![\w.])\d[\d,]*(?:\.\d+)?(?:x\b|\s?%|\s?(?:us|microseconds?|TB/s|TFLOP/s|MB|GB|KB|bytes?|"
    r"times|watts|W|clocks|MHz|registers|threads|multiply-adds)\b)"
)

ROW, STAGE = 576 * 2, 64 * 576 * 2
#: bytes of a query token's out and lse with 128 heads; of NVLink on an H200, one way a second
SENT, NVLINK = 128 * (512 * 2 + 4), 900e9 / 2
BIG, FEW_HEADS, ALONE = "b64_q1_h128_kv2048", "b64_q1_h16_kv4096", "b1_q1_h128_kv8192"
PAGES_RECORD = "h200_plain_pages.jsonl"
#: sizes that any notebook may state
SIZES = (
    f"{kv_cache.token_bytes('bf16'):,} bytes",
    f"{kv_cache.token_bytes('bf16')} bytes",
    f"{kv_cache.token_bytes('fp8_656')} bytes",
    f"{kv_cache.token_bytes('fp8_656')} bytes**",
    f"{64 * 2} bytes",
    f"{banks.VECTOR_BYTES} bytes",
    f"{THREADS} threads",
    f"{H200.smem_per_block // 1024} KB",
    f"{STAGE // 1024} KB",
)


def greedy_splits(neighbours: int, length: int) -> int:
    return len(pieces(first_request_plan("greedy", neighbours, length)))


@cache
def claims(number: str) -> tuple[str, ...]:
    """What the prose of a notebook must say, each number computed."""
    expand = 128 * (192 + 128) * 2
    made = {
        "00": (
            f"16 heads x 4096 tokens x {576 + 512} multiply-adds",
            f"{16 * 4096 * (576 + 512) / 1e6:.0f} million multiply-adds over "
            f"{4096 * 576 / 1e6:.1f} million numbers",
            f"is used {16 * (576 + 512) / 576:.0f} times",
        ),
        "10": (
            f"caches {expand:,} bytes",
            f"the {expand:,} bytes of ordinary attention",
            f"than MLA, {2 * (192 + 128)} bytes",
            f"2 x {mla_math.LATENT} x ({mla_math.NOPE} + {mla_math.VALUE}) operations",
        ),
        "11": (f"rows x {intensity(1):.2f} operations per byte",),
        "21": (
            f"each {banks.BANK_BYTES} bytes wide",
            f"Padding each row by {banks.VECTOR_BYTES} bytes",
            "rows of 64 bytes, or of 32",
            "Try 256 bytes a row",
            f"rows of 24 numbers in bf16, {24 * 2} bytes",
        ),
        "22": (
            f"take {_pages('keep_ab')} times as long on pages of 16 as on 64",
            f"and {_pages('swap_ab')} times with swap_ab",
            f"(H200, {runs(PAGES_RECORD)[-1].date}, `{PAGES_RECORD}`)",
        ),
        "30": (
            f"the launch {plans.LAUNCH_US} microseconds",
            f"forgives {plans.FULL_WAVES * 100:.0f} %, and {plans.PARTLY_FULL * 100:.0f} % where",
        ),
        "31": (
            f"(`greedy`) makes {greedy_splits(0, 8192)}",
            f"The cache itself is {8192 * ROW / 1e6:.1f} MB",
            f"reach {FA3_SHARE * 100:.0f} % of the best",
            f"at least {FA3_SHARE * 100:.0f} % of the best",
            "fill 80 % of the SMs",
        ),
        "32": (
            f"13 splits of 128 rows are {_merge_mb():.1f} MB of partials in fp32, and "
            f"{_merge_mb() / 2:.1f} MB in keep_ab's fp16",
        ),
        "33": (
            f"split into {greedy_splits(0, 8192)}, {greedy_splits(3, 8192)}, "
            f"{greedy_splits(63, 4096)} and {greedy_splits(63, 8192)} pieces",
            f"take {_plain_invariant()} times as long",
        ),
        "35": (f"{masks.words_per_row(32) * 2} bytes".replace("4", "four", 1),),
        "36": (
            f"128 x 512 numbers of 2 bytes, and `lse`, 128 numbers of 4 bytes: {SENT:,} bytes",
            f"with {NVLINK / 1e9:.0f} GB/s one way, moves the {SENT / 1e3:.0f} KB of one request "
            f"in {SENT / NVLINK * 1e6:.1f} us",
            "4 bytes of data and a flag of 4 bytes together",
            f"A word of {torch.int32.itemsize} bytes comes whole",
        ),
        "51": (
            f"**{H200.registers_per_sm:,} registers**",
            f"address {MOST_REGISTERS} of them",
            f"{H200.smem_per_block:,} bytes",
            "64 x 576 x 2 bytes",
            f"over {WARPGROUP} threads needs {64 * 64 // WARPGROUP} of them",
        ),
        "53": (
            f"does {2 * 16 * 8 * 16} operations where a warp's FMA does {2 * 32}",
            f"be {16 * 8 * 16 // 32} times faster",
            "sectors of 32 bytes",
            f"load of {32 * 2} useful bytes",
            "x 32 bytes",
            "units of 1024 bytes",
            f"({_gain(FEW_HEADS, 2)} and {_gain(ALONE, 2)} times as fast in the other two cases)",
        ),
        "54": (
            f"{_counts()['p.full[0]']} threads have stored P",
            f"{_counts()['p.empty[0]']} threads have read",
            f"tile of {film.recording().config.tile_kv} tokens",
        ),
        "60": (f"An SM has {H200.registers_per_sm:,} registers",),
        "62": (f"after eight rows, {8 * 64 * 2:,} bytes",),
        "64": (f"*{TILE * WIDTH:,} bytes pending*",),
        "66": (
            f"would take {64 * WIDTH // 2 // WARPGROUP} registers a thread as an operand, "
            f"and {64 * 576 // 2 // WARPGROUP} at the real width",
        ),
        "90": (
            f"copies of the KV cache: {_method()['rotation_bytes'] / 1e6:,.0f} MB in all",
            f"{_method()['rotation_bytes'] / _l2_bytes():.0f} times the L2 cache",
            f"or {MANY} copies where those are smaller, and at least {LEAST_BYTES / 1e6:.0f} MB",
            f"Its floor is {measured_card().roofline_time(_alone()) * 1e6:.1f} us: the products",
            f"the cache takes {8192 * ROW / measured_card().read_tbps / 1e6:.1f} us",
            "Claims under 3 %",
            "the larger of 3 %",
        ),
    }
    return (*made.get(number, ()), *SIZES)


def _counts() -> dict[str, int]:
    return {name: bar.expected for name, bar in film_breaks.whole().barriers.items()}


def _method() -> dict[str, float]:
    method: dict[str, float] = headline_rows()[0]["method"]
    return method


def _l2_bytes() -> int:
    size: int = headline_rows()[0]["environment"]["card"]["l2_bytes"]
    return size


def _alone() -> Problem:
    return uniform_case(1, 1, 128, 8192).problem


def _range(ratios: Iterable[float]) -> str:
    found = sorted(ratios)
    return f"{found[0]:.2f} to {found[-1]:.2f}"


def _gain(case: str, step: int) -> str:
    return f"{ladder_facts.rungs(case)[step].gain:.2f}"


def _pages(kernel: str) -> str:
    """Time of a plain bf16 call on pages of 16 over that on pages of 64."""
    (run,) = runs(PAGES_RECORD)
    us = {row["case"]: row["us"] for row in results(run.rows, "ok")}
    return _range(
        row["us"] / us[row["case"].removesuffix("_p16")]
        for row in results(run.rows, "ok")
        if re.fullmatch(r"b\d+_q1_h\d+_kv8192_p16", row["case"])
        and row["notes"]["kernel"].startswith(f"cute_{kernel}_sm90")
    )


def _plain_invariant() -> str:
    costs = invariance_costs(PLAIN_RECORD)
    return _range(cost for case, cost in costs.items() if re.fullmatch(r"b\d+_q1_h\d+_kv\d+", case))


def _merge_mb() -> float:
    problem = Problem.uniform(1, 1, 13 * 64, 128)
    return partial_mb(make_plan(problem, tile_rows=64, policy="fixed", num_splits=13))


def prose(path: Path) -> str:
    return re.sub(r"\s+", " ", session.prose(path))


def spans(text: str, said: str) -> Iterator[range]:
    for found in re.finditer(re.escape(said), text):
        yield range(found.start(), found.end() + 1)


@pytest.mark.parametrize("path", ALL, ids=lambda p: p.stem)
def test_each_quantity_in_prose_is_computed_here(path: Path) -> None:
    text, number = prose(path), path.name[:2]
    covered = [span for said in claims(number) for span in spans(text, said)]
    for found in QUANTITY.finditer(text):
        inside = any(found.start() in span and found.end() in span for span in covered)
        around = text[max(0, found.start() - 40) : found.end() + 20]
        assert inside, f"no claim computes '{found[0]}' in '...{around}...'"


@pytest.mark.parametrize("path", ALL, ids=lambda p: p.stem)
def test_each_computed_claim_is_in_the_prose(path: Path) -> None:
    text = prose(path)
    for said in set(claims(path.name[:2])) - set(SIZES):
        assert said in text


def test_words_for_numbers_hold() -> None:
    """Sentences whose numbers are words, each with the comparison that it makes."""
    big = ladder_facts.rungs(BIG)
    whole = (big[0].us or 0) / (big[-1].us or 1)
    assert 250 < whole < 300, "53: nine ideas and a factor of almost three hundred"
    assert len(big) == 10
    assert (big[5].predicted_gain or 0) > 2 * (big[5].gain or 0), "53: more than twice what came"
    paper, card = (big[8].predicted_gain or 0) - 1, (big[8].gain or 0) - 1
    assert 0 < card < paper / 2, "53: the recorded gain of step 8 is a fraction"
    assert (ladder_facts.rungs(FEW_HEADS)[4].gain or 2) < 1, "53: tensor cores made it slower"
    assert (ladder_facts.rungs(ALONE)[7].gain or 0) > 10, "53: worth more than ten"
    assert 1.6 < _whole_requests(67) / _whole_requests(66) < 2, "30: nearly twice as long"
    read = measured_card().memory_time(uniform_case(1, 1, 128, 8192).problem) * 1e6
    assert 1.8 < read < 2.3, "90: about two microseconds"
    assert _method()["rounds"] == 9, "90: nine rounds"
    assert fa3_splits(106, 128, 132) == 1 < fa3_splits(44, 128, 132), "31: 80 % of the SMs"
    assert masks.pack(masks.chain(2)).element_size() == 2, "35: 16-bit words"
    sides = {n: {_side(b, n) for b in (1, 4, 16, 64, 128)} for n in (1024, 8192)}
    assert sides == {1024: {"memory"}, 8192: {"compute"}}, "11: `batch` no, `cached` yes"
    assert not _below_floor(headline_rows()), "11: no time of that run"
    below = _below_floor(row for run in runs(ANCHOR) for row in run.rows)
    assert all(ratio > 0.95 for ratio in below), "11: by a few per cent"
    assert 3 * STAGE <= H200.smem_per_block < 3 * STAGE * 9 // 8, "21: padding leaves two stages"


def _side(batch: int, kv_len: int) -> str:
    """Of 16 heads and 6 draft tokens on the roofline's chart."""
    state = {"batch": batch, "kv_len": kv_len, "heads": 16, "drafts": 6, "kv_format": "bf16"}
    return measured_card().bound(lab.RooflineExplorer().problem(state))


def _below_floor(rows: Iterable[Row]) -> list[float]:
    """Times over the floor of the H200 as the plain call's run measured it, where below 1."""
    calls = (row for row in rows if row["kind"] == "result" and row["status"] == "ok")
    dense = (row for row in calls if not row["features"])
    ratios = (row["us"] / measured_card().roofline_time(problem_of(row)) / 1e6 for row in dense)
    return [ratio for ratio in ratios if ratio < 1]


def _whole_requests(batch: int) -> float:
    plan = make_plan(Problem.uniform(batch, 1, 2048, 128), policy="none", schedule="grid")
    return simulate(plan, constants_for(64).at_full_load()).makespan


@pytest.mark.parametrize("path", ALL, ids=lambda p: p.stem)
def test_files_that_the_prose_names_exist(path: Path) -> None:
    for name in re.findall(r"`((?:mla_lab|kernels|data|notebooks)/[\w./*-]+)`", prose(path)):
        assert (ROOT / name).exists(), name
    for name in re.findall(r"`(step\d_\w+\.cuh)`", prose(path)):
        assert (ROOT / "kernels/ladder" / name).exists(), name
