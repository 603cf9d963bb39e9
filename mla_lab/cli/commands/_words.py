"""Lists by comma on a command line."""

from __future__ import annotations


def names(text: str) -> list[str]:
    """Words by comma."""
    return [name for name in text.split(",") if name]


def numbers(text: str) -> list[int]:
    """Whole numbers by comma."""
    return [int(number) for number in text.split(",")]
