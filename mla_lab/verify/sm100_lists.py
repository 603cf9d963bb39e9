"""The calls of the SM100 kernel that `sm100` emulates: a published list cut down, and pairs.

The 396 configurations of FlashInfer's pull request 2743 (see `published`). Dtype, page size, 128
heads and query tokens are theirs. A batch of 2 or more is cut to 2 requests, and to 1 where there
are 4 query tokens and the batch is below 16. KV lengths are cut to splits of 3 KV tiles of 128
tokens: 1,024 and 4,096 to 2 splits, 8,192 to 3, each less 1 to 127 tokens. Two requests have equal
and different lengths ("var", their is_var_seq) in turn, so that both occur for each dtype, page
size, length and number of query tokens. One or two workers take all row tiles and splits, so that
each pair of CTAs has at least two work tiles. Every tenth configuration runs under four more
schedules.

And features in pairs: formats, page sizes, heads, query tokens, masks, sinks, scales in memory,
lengths, splits, pieces by a request's own length, schedules.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from ..core.problem import Problem
from ..emulate.calls import problem_for
from ..plan.config import KernelConfig
from .pairwise import Case, cover
from .published import HEADS, Configuration, configurations

KV_TILE, TILES_A_SPLIT = 128, 3
#: every so many configurations other schedules run too
EVERY = 10
SCHEDULES = ("greedy", "random", "late", "adverse")
#: `splits` of a `Run`
SPLITS: dict[str, int | None] = {"1": 1, "2": 2, "3": 3, "found": 0, "own length": None}
FACTORS: dict[str, tuple[str, ...]] = {
    "format": ("bf16", "fp16", "e4m3", "e4m3 to e4m3", "bf16 on e4m3"),
    "page": ("16", "32", "64", "128"),
    "heads": ("1", "16", "40", "128"),
    "q_len": ("1", "3", "8", "ragged"),
    "build": ("plain", "sinks", "scales", "tree"),
    "lengths": ("none and few", "a tile", "long"),
    "splits": tuple(SPLITS),
    "schedule": ("fair", "random", "adverse"),
}
LENGTHS = {"none and few": (0, 5), "a tile": (128, 65), "long": (700, 391)}
#: query tokens of the two requests of a ragged batch
RAGGED = (1, 3)
#: pieces of "own length", in blocks of 64 tokens: so short that the lengths above are cut
OWN_LENGTH = {"split_blocks": 2, "max_splits": 4}


@dataclass(frozen=True)
class Run:
    """One call of one build.

    splits: pieces a request; 0 where workers find their tiles from the lengths; None where each
    request is cut by its own length, and must have the bits alone that it has in the batch.
    """

    name: str
    config: KernelConfig
    problem: Problem
    splits: int | None
    workers: int
    seed: int
    schedules: tuple[str, ...] = field(default=("fair",))


def build_of(
    q_dtype: str, kv_format: str, page_size: int, build: str = "plain", out_dtype: str = ""
) -> KernelConfig:
    """The configuration of a build: plain, or with sinks, scales in memory, a packed mask."""
    options = {"plain": (), "sinks": (("features", 1),), "scales": (("scales", 1),), "tree": ()}
    return KernelConfig(
        "cute/mla_sm100",
        q_dtype=q_dtype,
        kv_format=kv_format,
        out_dtype=out_dtype or ("fp16" if q_dtype == "fp16" else "bf16"),
        page_size=page_size,
        tile_rows=128,
        cluster=2,
        mask="tree" if build == "tree" else "none",
        options=(*options[build], ("shaped", 1)),
    )


def cut_lengths(c: Configuration, index: int) -> tuple[int, ...]:
    """Lengths of the cut requests of a configuration, the `index`-th of the list."""
    whole = splits_of(c) * TILES_A_SPLIT * KV_TILE
    missing = 1 + 13 * index % (KV_TILE - 1)
    if c.batch < (16 if c.q_len == 4 else 2):
        return (whole - missing,)
    unlike = KV_TILE - missing if 2 * missing != KV_TILE else 1
    return (whole - missing, whole - (unlike if index % 2 else missing))


def splits_of(c: Configuration) -> int:
    """Pieces of a request of a configuration."""
    return 3 if c.kv_len == 8192 else 2


def published_runs() -> Iterator[Run]:
    """The 396 configurations, cut down."""
    for index, c in enumerate(configurations()):
        config = build_of(c.dtype, c.dtype, c.page_size)
        lengths, splits = cut_lengths(c, index), splits_of(c)
        var = "var" if len(set(lengths)) > 1 else "equal"
        items = len(lengths) * c.q_len * splits
        yield Run(
            f"{c.name}_{var}",
            config,
            problem_for(config, lengths, HEADS, c.q_len),
            splits,
            min(2, items // 2),
            index,
            ("fair", *SCHEDULES) if index % EVERY == 0 else ("fair",),
        )


def allowed(case: Any) -> bool:
    """Several rows of many heads take long: they are proved where lengths are short."""
    tokens = max(RAGGED) if case.get("q_len") == "ragged" else int(case.get("q_len", 1))
    return int(case.get("heads", 1)) * tokens <= 384 or case.get("lengths") != "long"


def feature_cases() -> list[Case]:
    """Cases in which every allowed pair of `FACTORS` occurs."""
    return cover(FACTORS, allowed)


def feature_runs() -> Iterator[Run]:
    """Features in pairs."""
    for index, case in enumerate(feature_cases()):
        q_dtype, _, other = case["format"].partition(" ")
        kind, _, dtype = other.partition(" ")
        kv_format, out = (dtype if kind == "on" else q_dtype), (dtype if kind == "to" else "")
        config = build_of(q_dtype, kv_format, int(case["page"]), case["build"], out)
        ragged = case["q_len"] == "ragged"
        tokens = 1 if ragged else int(case["q_len"])
        problem = problem_for(config, LENGTHS[case["lengths"]], int(case["heads"]), tokens)
        if ragged:
            problem = replace(problem, q_lens=RAGGED)
        splits = SPLITS[case["splits"]]
        name = "_".join(value.replace(" ", "-") for value in case.values())
        workers = 3 if splits is None else 0
        yield Run(name, config, problem, splits, workers, index, (case["schedule"],))
