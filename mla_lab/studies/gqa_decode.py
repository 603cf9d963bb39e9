"""GQA decode timed on a card: `python -m mla_lab.studies.gqa_decode RECORD`.

The method is the benchmark's: one CUDA graph whose launches rotate over KV copies of at least
240 MB in all, medians of replays over launches, every copy's output checked against the float64
reference, what the card reads in the same run beside it. One JSON line a case.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from ..api.contract_gqa import trtllm_batch_decode_with_kv_cache
from ..bench.ceilings import ceilings
from ..bench.checks import LIMITS
from ..bench.environment import environment
from ..bench.rotation import LEAST_BYTES, MIN_LAUNCHES
from ..bench.timers import Timer, timer_for
from ..core.errors import unsupported
from ..core.problem import ELEMENT_BYTES
from ..core.revision import check_record
from ..reference.gqa import decode_gqa_reference
from ..reference.inputs_gqa import GqaInputs, GqaShape, make_gqa_inputs
from ..reference.tolerance import rel_error

ROUNDS, WARMUPS = 9, 2
WORKSPACE_BYTES = 128 << 20
FORM = "gqa 2"
#: group 8 and 1, both widths, both ends of the batch, drafts, and e4m3 caches
CASES = (
    GqaShape.uniform(64, 1, 8192, 64, 8),
    GqaShape.uniform(64, 1, 8192, 64, 8, q_dtype="e4m3", kv_format="e4m3"),
    GqaShape.uniform(64, 1, 8192, 64, 8, kv_format="e4m3"),
    GqaShape.uniform(16, 1, 8192, 64, 8),
    GqaShape.uniform(1, 1, 8192, 64, 8),
    GqaShape.uniform(1, 1, 131_072, 64, 8),
    GqaShape.uniform(128, 1, 1024, 64, 8),
    GqaShape.uniform(64, 4, 8192, 64, 8),
    GqaShape.uniform(64, 1, 8192, 16, 16),
    GqaShape.uniform(64, 1, 8192, 64, 8, head_dim=64),
)


def name_of(case: GqaShape) -> str:
    """Name of equal requests as in the benchmark, with both head counts and the head dim."""
    formats = {case.q_dtype, case.kv_format}
    types = "" if formats == {"bf16"} else f"_{case.q_dtype}_{case.kv_format}"
    heads = f"h{case.heads}x{case.kv_heads}_d{case.head_dim}"
    return f"b{len(case.q_lens)}_q{case.q_lens[0]}_{heads}_kv{case.kv_lens[0]}{types}"


def kv_bytes(case: GqaShape) -> int:
    """Bytes of keys and values."""
    width = 2 * case.kv_heads * case.head_dim * ELEMENT_BYTES[case.kv_format]
    return sum(case.kv_lens) * width


def least_bytes(case: GqaShape) -> int:
    """Least traffic: keys and values, queries, and a result of 16 bits."""
    elements = sum(case.q_lens) * case.heads * case.head_dim
    return kv_bytes(case) + elements * (ELEMENT_BYTES[case.q_dtype] + ELEMENT_BYTES["bf16"])


def flop(case: GqaShape) -> int:
    """Operations of QK and PV."""
    pairs = sum(q * kv for q, kv in zip(case.q_lens, case.kv_lens, strict=True))
    return 4 * pairs * case.heads * case.head_dim


def measure(
    cases: Iterable[GqaShape], path: Path, progress: Callable[[str], None] = lambda text: None
) -> None:
    """Appends a line for each case to `path`. Raises what a call and `check_record` raise."""
    check_record(path)
    device = torch.device("cuda")
    here = {"environment": environment(device), "ceilings": ceilings(device)}
    timer = timer_for(device)
    with path.open("a", encoding="utf-8") as file:
        for case in cases:
            row = {"form": FORM, "time": _now(), **here, **time_case(case, timer)}
            file.write(json.dumps(row) + "\n")
            file.flush()
            progress(_line(row))


def time_case(
    case: GqaShape, timer: Timer, *, device: str = "cuda", rotation_bytes: int = LEAST_BYTES
) -> dict[str, Any]:
    """One case: microseconds a launch, its raw rounds, and the worst copy's relative error. Raises
    Unsupported where that exceeds the benchmark's bound for a peer.
    """
    copies = max(1, -(-rotation_bytes // kv_bytes(case)))
    workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
    inputs = [
        make_gqa_inputs(case, seed, device=device, workspace_bytes=1) for seed in range(copies)
    ]
    launches = [_launch(one, workspace) for one in inputs]
    errors = [
        rel_error(launch().double(), decode_gqa_reference(one).out)
        for launch, one in zip(launches, inputs, strict=True)
    ]
    if not max(errors) <= LIMITS[case.q_dtype]:
        got = f"a relative error of {max(errors):.1e}"
        raise unsupported(name_of(case), got, f"one up to {LIMITS[case.q_dtype]:.0e}")
    repeats = max(1, -(-MIN_LAUNCHES // copies))
    replay = timer.ready(launches * repeats)
    for _ in range(WARMUPS):
        replay()
    rounds = [replay() / (copies * repeats) for _ in range(ROUNDS)]
    us, moved, operations = median(rounds), least_bytes(case), flop(case)
    return {
        "case": name_of(case),
        "shape": asdict(case),
        "us": us,
        "rounds": rounds,
        "kv_copies": copies,
        "rel_error": max(errors),
        "bytes": moved,
        "flop": operations,
        "tbps": moved / us / 1e6,
        "tflops": operations / us / 1e6,
    }


def _launch(inputs: GqaInputs, workspace: Tensor) -> Callable[[], Tensor]:
    """A call by the contract's name, into a 16-bit out of its own."""
    eight_bit = inputs.query.dtype is torch.float8_e4m3fn
    out = torch.empty_like(inputs.query, dtype=torch.bfloat16 if eight_bit else None)
    arguments = {**inputs.contract_args(), "workspace_buffer": workspace, "out": out}
    if inputs.query.is_cuda:
        arguments["backend"] = "cuda"

    def launch() -> Tensor:
        trtllm_batch_decode_with_kv_cache(**arguments)
        return out

    return launch


def _line(row: dict[str, Any]) -> str:
    ceiling = row["ceilings"]["read_tbps"] if row["ceilings"] else float("nan")
    return (
        f"{row['case']:40} {row['us']:9.1f} us {row['tbps']:6.2f} TB/s "
        f"({row['tbps'] / ceiling:4.0%} of the read) {row['tflops']:6.0f} TFLOP/s "
        f"error {row['rel_error']:.1e}"
    )


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def main() -> None:
    """Measure every case into the record that is named."""
    parser = argparse.ArgumentParser(prog="python -m mla_lab.studies.gqa_decode")
    parser.add_argument("record", type=Path, help="JSON lines, appended to")
    record = parser.parse_args().record
    measure(CASES, record, lambda text: print(text, file=sys.stderr, flush=True))


if __name__ == "__main__":
    main()
