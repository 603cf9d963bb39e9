"""`mla-lab live`: measure on this card, refresh `data/`, execute every notebook on it."""

from __future__ import annotations

import argparse
import shutil
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ...core.errors import invalid, unsupported
from ...core.resources import data_dir
from ...core.revision import check_record
from ._live_steps import STEPS, TRACES, LiveOptions, Step
from ._progress import Steps
from ._words import names

#: card of the records
CARD = "H200"


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Register the command; returns its parser."""
    steps = "; ".join(f"{step.name}: {step.what}" for step in STEPS)
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "live",
        help="measure on an H200, refresh data/, execute the notebooks live",
        description=f"Steps, in order: {steps}. Without a card only costs, simulator and pages "
        "can run.",
    )
    known = ", ".join(step.name for step in STEPS)
    parser.add_argument("--only", type=names, default=[], help=f"by comma, of {known}")
    parser.add_argument("--skip", type=names, default=[], help="by comma")
    parser.add_argument("--into", type=Path, help="folder to refresh; default: this data/")
    parser.add_argument("--traces", type=Path, help=f"folder with {' and '.join(TRACES)}")
    parser.add_argument(
        "--short", action="store_true", help="few cases and rounds, to try it; needs --into"
    )
    return parser


def chosen(only: list[str], skip: list[str]) -> list[Step]:
    """The steps that are asked for, in their order. Raises InvalidInput for a name of none."""
    known = tuple(step.name for step in STEPS)
    for word in (*only, *skip):
        if word not in known:
            raise invalid("step", repr(word), known)
    found = [s for s in STEPS if (not only or s.name in only) and s.name not in skip]
    if not found:
        raise invalid("steps", "none left", "one at least")
    return found


def check_card(steps: list[Step]) -> None:
    """Raises Unsupported, in a sentence, where a step needs a card that is not here."""
    needing = [step.name for step in steps if step.card]
    if not needing:
        return
    from ...core.gpu import Gpu

    card = Gpu.here()
    if card != Gpu.preset(CARD):  # neither a GH200 nor a slice
        free = ",".join(step.name for step in STEPS if not step.card)
        raise unsupported(
            ", ".join(needing),
            "a CPU alone" if card is None else f"{card.name} with {card.sms} SMs",
            f"a machine with a whole NVIDIA {CARD}, whose times these records are; here: "
            f"mla-lab live --only {free}",
        )


def folder(into: Path | None, short: bool) -> Path:
    """The folder that is refreshed: one that is new starts as a copy of the package's data."""
    if into is None:
        if short:
            raise invalid("--short", "no --into", "another folder: few rounds replace no record")
        return data_dir()
    if into.exists() and not into.is_dir():
        raise invalid("--into", str(into), "a folder, or one that is made")
    if not into.exists():
        shutil.copytree(data_dir(), into)
    return into.resolve()


def run(args: argparse.Namespace) -> None:
    """Runs the chosen steps in order; the first that fails ends the run.

    Raises InvalidInput where the package's own records would be of changed code.
    """
    if find_spec("mla_lab.studies") is None:
        raise unsupported("live", "an installed wheel, without its measurements", "a checkout")
    steps = chosen(args.only, args.skip)
    check_card(steps)
    if args.traces is not None and not args.traces.is_dir():
        raise invalid("--traces", str(args.traces), "a folder")
    into = folder(args.into, args.short)
    top = Path(__file__).resolve().parents[3]
    ours = top if (top / "README.md").is_file() and args.into is None else None
    options = LiveOptions(into, args.short, ours, args.traces)
    for record in (record for step in steps for record in step.records):
        check_record(options.record(record))
    shown = Steps(sum(step.commands for step in steps))
    for number, step in enumerate(steps, 1):
        print(f"== {number} of {len(steps)}, {step.name}: {step.what}", flush=True)
        shown.begin(step.name)
        start = time.perf_counter()
        step.run(options)
        shown.end(step.commands)
        print(f"== {step.name}: {time.perf_counter() - start:.0f} s", flush=True)
    print(f"refreshed {into}: {', '.join(step.name for step in steps)}")
