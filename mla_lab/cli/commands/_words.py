"""Words of a command line: lists by comma, seeds."""

from __future__ import annotations

from ...core.errors import invalid

#: what torch's generators take
SEEDS = range(-(2**63), 2**64)


def names(text: str) -> list[str]:
    """Words by comma."""
    return [name for name in text.split(",") if name]


def numbers(text: str) -> list[int]:
    """Whole numbers by comma."""
    return [int(number) for number in text.split(",")]


def check_seed(seed: int) -> None:
    """Refuse a seed that no generator takes."""
    if seed not in SEEDS:
        raise invalid("--seed", seed, f"{SEEDS.start} to {SEEDS.stop - 1}")
