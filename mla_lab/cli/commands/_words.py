"""Words of a command line: lists by comma, seeds, devices."""

from __future__ import annotations

from argparse import ArgumentTypeError

from ...core.errors import invalid, unsupported

#: what torch's generators take
SEEDS = range(-(2**63), 2**64)


def names(text: str) -> list[str]:
    """Words by comma."""
    return [name for name in text.split(",") if name]


def numbers(text: str) -> list[int]:
    """Whole numbers by comma."""
    try:
        return [int(number) for number in text.split(",")]
    except ValueError:
        raise ArgumentTypeError(f"got {text!r}; supported: whole numbers, as 1,16") from None


def check_seed(seed: int) -> None:
    """Refuse a seed that no generator takes."""
    if seed not in SEEDS:
        raise invalid("--seed", seed, f"{SEEDS.start} to {SEEDS.stop - 1}")


def device_of(wanted: str | None) -> str:
    """The device of `--device`, which is here; without one the GPU, or the CPU where there is none.

    Raises InvalidInput, Unsupported.
    """
    import torch

    if wanted is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    kind, colon, number = wanted.partition(":")
    if kind not in ("cpu", "cuda") or (colon and not (kind == "cuda" and number.isdecimal())):
        raise invalid("--device", repr(wanted), "cpu, cuda, cuda:N")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if kind == "cuda" and int(number or 0) >= count:
        raise unsupported("--device", wanted, f"cpu; torch finds {count} GPUs here")
    return wanted
