"""Bits of a card beside those of the emulator that rounds like it: launches and single opcodes.

    mla-lab verify card-bits RECORD              on a card: every recorded call, twice, and probes
    mla-lab verify card-bits RECORD --compare    anywhere: what the emulator makes of the same
    mla-lab verify card-bits RECORD --today      the same, by the kernels of this source

A record holds a digest for each row of a launch's out, the bits of its lse, and those of each
probe's results (see `card_probes`). The recorded calls, with the PTX that ran, stand beside it as
an archive of the same name.
"""

from __future__ import annotations

import base64
import hashlib
import shutil
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..core.errors import unsupported
from ..emulate import EmulatedKernel, Options
from ..emulate.calls import Call, make_call
from ..emulate.recorded import Recording, load, recordings, shipped
from ..jit import compile as compiled
from ..jit import load as loaded
from . import card_probes
from .emulated import digest, digest_of
from .record import Row, head_row

SEEDS = (0, 1)


def rows() -> Iterator[Row]:
    """Launches and probes on the current card."""
    if not torch.cuda.is_available():
        raise unsupported("device", "no CUDA device", "a Hopper card")
    named = recordings()
    yield head_row("card-bits", "cuda", len(SEEDS) * len(named) + len(card_probes.names()))
    for name in named:
        recording = load(name)
        artifact = compiled(recording.config, "sm_90a")
        for seed in SEEDS:
            call = _call(recording, seed)
            there = _moved(call.args)
            loaded(artifact)(*there)
            torch.cuda.synchronize()
            bits = bits_of(there[2].cpu(), there[3].cpu())
            yield {"kind": "case", "launch": name, "seed": seed, "ptx": digest(artifact), **bits}
    for name in card_probes.names():
        found = card_probes.answer(name, card_probes.on_card)
        yield {"kind": "case", "probe": name, "bits": packed(found)}


def keep_calls(record: Path) -> None:
    """Leave the recorded calls that `rows` ran beside their record."""
    shutil.copyfile(shipped(), record.with_suffix(".zip"))


def compare(
    record: Sequence[dict[str, Any]], archive: Path | None = None, today: bool = False
) -> Iterator[Row]:
    """Of each row of a record, how many values the emulator has alike.

    archive: the recorded calls that ran; without it those that ship.
    today: by the kernels of this source, whatever ran.
    """
    for row in record[1:]:
        if "probe" in row:
            ours = card_probes.answer(row["probe"], card_probes.on_emulator)
            same = int((ours == unpacked(row["bits"])).sum())
            yield {"name": row["probe"], "same": same, "of": ours.size}
        else:
            yield _compared(row, archive, today)


def _compared(row: dict[str, Any], archive: Path | None, today: bool) -> Row:
    recording = load(row["launch"], archive)
    call = _call(recording, row["seed"])
    kernel = recording.kernel(Options("card"))
    if today or digest_of(recording.text) != row["ptx"]:
        artifact = compiled(recording.config, "sm_90a")
        if not today and digest(artifact) != row["ptx"]:
            raise unsupported("record", f"another build of {recording.name}", "this source's")
        kernel = EmulatedKernel.of(artifact, Options("card"))
    kernel(*call.args)
    ours = bits_of(call.out, call.lse)
    alike = [a == b for key in ("out", "lse") for a, b in zip(ours[key], row[key], strict=True)]
    return {"name": f"{recording.name}, seed {row['seed']}", "same": sum(alike), "of": len(alike)}


def bits_of(out: Tensor, lse: Tensor) -> dict[str, list[str]]:
    """A digest for each row of out, and the bits of each lse."""
    flat = out.contiguous().view(torch.uint8).reshape(lse.numel(), -1).numpy()
    digests = [hashlib.sha256(row.tobytes()).hexdigest()[:12] for row in flat]
    words = lse.contiguous().view(torch.int32).flatten().tolist()
    return {"out": digests, "lse": [f"{word & 0xFFFFFFFF:08x}" for word in words]}


def packed(bits: np.ndarray) -> str:
    """32-bit words as text."""
    return base64.b64encode(zlib.compress(bits.tobytes(), 9)).decode()


def unpacked(text: str) -> np.ndarray:
    """And back."""
    return np.frombuffer(zlib.decompress(base64.b64decode(text)), np.uint32)


def _call(recording: Recording, seed: int) -> Call:
    return make_call(recording.config, recording.problem, recording.splits, seed)


def _moved(args: Sequence[Any]) -> tuple[Any, ...]:
    """Arguments on the card."""
    return tuple(
        arg.cuda() if isinstance(arg, Tensor) else _moved(arg) if isinstance(arg, tuple) else arg
        for arg in args
    )


def summary(found: Sequence[Row]) -> str:
    """Rows that are alike bit for bit, and those that are not."""
    wrong = [row for row in found if row["same"] != row["of"]]
    lines = [f"{row['name']}: {row['same']} of {row['of']} alike" for row in wrong]
    return "\n".join([*lines, f"{len(found) - len(wrong)} of {len(found)} bit for bit"])
