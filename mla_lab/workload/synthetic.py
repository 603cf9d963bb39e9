"""A small trace of our own making, for tests and for machines without the public ones.

Arrivals form a Poisson process of `RATE` requests a second. Input lengths are log-normal with
median 1,024 and sigma 1.1, output lengths log-normal with median 160 and sigma 0.8, independent of
each other, rounded and clipped: the shape, not the figures, of the public traces (medians of 1,020
and 129 tokens in Azure's conversation trace). Draws are Python's `random.Random(seed).random()`,
whose stream is the same in every version, through the inverse of the distribution function.

`data/runtime/synthetic_trace.csv` and `.jsonl` hold the same requests in both schemas:

    python -c "from mla_lab.workload.synthetic import write; write('data')"
"""

from __future__ import annotations

import json
import math
import random
from datetime import datetime, timedelta
from pathlib import Path
from statistics import NormalDist

import numpy as np

from ..core.errors import invalid
from .loaders import AZURE_COLUMNS
from .trace import Trace

REQUESTS, SEED = 240, 20
RATE = 2.0
INPUT = (1024, 1.1, 16, 32768)
OUTPUT = (160, 0.8, 1, 2048)
START = datetime(2026, 1, 1)
#: tokens of one of Mooncake's prompt blocks
HASH_BLOCK = 512


def synthetic_trace(requests: int = REQUESTS, seed: int = SEED) -> Trace:
    """The trace described above; arrivals are whole milliseconds, as in Mooncake's schema. Raises
    InvalidInput for no request.
    """
    if requests < 1:
        raise invalid("requests", requests, "1 or more")
    uniform = random.Random(seed).random
    clock, rows = 0.0, []
    for _ in range(requests):
        rows.append((round(clock * 1e3) / 1e3, _draw(uniform(), INPUT), _draw(uniform(), OUTPUT)))
        clock -= math.log(1.0 - uniform()) / RATE
    arrival, inputs, outputs = zip(*rows, strict=True)
    return Trace(
        "synthetic_trace",
        np.array(arrival),
        np.array(inputs, dtype=np.int64),
        np.array(outputs, dtype=np.int64),
    )


def _draw(u: float, law: tuple[int, float, int, int]) -> int:
    median, sigma, least, most = law
    # u is 0 once in 2^53 draws, where the inverse is not defined
    normal = NormalDist().inv_cdf(max(u, 2.0**-53))
    return min(max(round(median * math.exp(sigma * normal)), least), most)


def write(folder: str | Path, trace: Trace | None = None) -> tuple[Path, Path]:
    """`synthetic_trace.csv` (Azure's schema) and `.jsonl` (Mooncake's) in `folder`."""
    trace = trace or synthetic_trace()
    rows = list(
        zip(
            trace.arrival_s.tolist(),
            trace.input_lens.tolist(),
            trace.output_lens.tolist(),
            strict=True,
        )
    )
    table, lines = Path(folder) / "synthetic_trace.csv", Path(folder) / "synthetic_trace.jsonl"
    csv_rows = [",".join(AZURE_COLUMNS)]
    json_rows, next_block = [], 0
    for arrival, tokens_in, tokens_out in rows:
        moment = START + timedelta(milliseconds=round(arrival * 1e3))
        csv_rows.append(f"{moment.isoformat(' ', 'milliseconds')}0000,{tokens_in},{tokens_out}")
        blocks = -(-tokens_in // HASH_BLOCK)
        row = {
            "timestamp": round(arrival * 1e3),
            "input_length": tokens_in,
            "output_length": tokens_out,
            "hash_ids": list(range(next_block, next_block + blocks)),
        }
        json_rows.append(json.dumps(row))
        next_block += blocks
    table.write_text("\n".join(csv_rows) + "\n", encoding="utf-8")
    lines.write_text("\n".join(json_rows) + "\n", encoding="utf-8")
    return table, lines


def shipped_trace() -> Trace:
    """The trace as `data/` ships it."""
    from ..core.resources import data_dir
    from .loaders import load_mooncake

    return load_mooncake(data_dir() / "runtime/synthetic_trace.jsonl")
