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
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from ..api.contract_gqa import trtllm_batch_decode_with_kv_cache
from ..bench.ceilings import ceilings
from ..bench.environment import environment
from ..bench.rotation import MIN_LAUNCHES, ROTATION_BYTES
from ..bench.timers import Timer, timer_for
from ..core.problem import ELEMENT_BYTES
from ..core.revision import check_record
from ..reference.gqa import decode_gqa_reference
from ..reference.inputs_gqa import GqaInputs, GqaShape, make_gqa_inputs
from ..reference.tolerance import rel_error

ROUNDS, WARMUPS = 9, 2
WORKSPACE_BYTES = 128 << 20
FORM = "gqa 1"


@dataclass(frozen=True)
class GqaCase:
    """Equal requests; lengths in tokens."""

    batch: int
    q_len: int
    heads: int
    kv_heads: int
    kv_len: int
    head_dim: int = 128
    q_dtype: str = "bf16"
    kv_format: str = "bf16"
    page_size: int = 64

    @property
    def name(self) -> str:
        """Case name as in the benchmark, with both head counts and the head dim."""
        formats = {self.q_dtype, self.kv_format}
        types = "" if formats == {"bf16"} else f"_{self.q_dtype}_{self.kv_format}"
        heads = f"h{self.heads}x{self.kv_heads}_d{self.head_dim}"
        return f"b{self.batch}_q{self.q_len}_{heads}_kv{self.kv_len}{types}"

    @property
    def shape(self) -> GqaShape:
        """For `make_gqa_inputs`."""
        return GqaShape(
            q_lens=(self.q_len,) * self.batch,
            kv_lens=(self.kv_len,) * self.batch,
            heads=self.heads,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            q_dtype=self.q_dtype,
            kv_format=self.kv_format,
            page_size=self.page_size,
        )

    @property
    def kv_bytes(self) -> int:
        """Bytes of keys and values."""
        width = 2 * self.kv_heads * self.head_dim * ELEMENT_BYTES[self.kv_format]
        return self.batch * self.kv_len * width

    @property
    def bytes(self) -> int:
        """Least traffic: keys and values, queries, and a result of 16 bits."""
        rows = self.batch * self.q_len * self.heads * self.head_dim
        return self.kv_bytes + rows * (ELEMENT_BYTES[self.q_dtype] + ELEMENT_BYTES["bf16"])

    @property
    def flop(self) -> int:
        """Operations of QK and PV."""
        return 4 * self.batch * self.q_len * self.heads * self.kv_len * self.head_dim


#: group 8 and 1, both widths, both ends of the batch, drafts, and e4m3 caches
CASES = (
    GqaCase(64, 1, 64, 8, 8192),
    GqaCase(64, 1, 64, 8, 8192, q_dtype="e4m3", kv_format="e4m3"),
    GqaCase(64, 1, 64, 8, 8192, kv_format="e4m3"),
    GqaCase(16, 1, 64, 8, 8192),
    GqaCase(1, 1, 64, 8, 8192),
    GqaCase(1, 1, 64, 8, 131_072),
    GqaCase(128, 1, 64, 8, 1024),
    GqaCase(64, 4, 64, 8, 8192),
    GqaCase(64, 1, 16, 16, 8192),
    GqaCase(64, 1, 64, 8, 8192, head_dim=64),
)


def measure(
    cases: Iterable[GqaCase], path: Path, progress: Callable[[str], None] = lambda text: None
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
    case: GqaCase, timer: Timer, *, device: str = "cuda", rotation_bytes: int = ROTATION_BYTES
) -> dict[str, Any]:
    """One case: microseconds a launch, its raw rounds, and the worst copy's relative error."""
    copies = max(1, -(-rotation_bytes // case.kv_bytes))
    workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
    inputs = [
        make_gqa_inputs(case.shape, seed, device=device, workspace_bytes=1)
        for seed in range(copies)
    ]
    launches = [_launch(one, workspace) for one in inputs]
    errors = [
        rel_error(launch().double(), decode_gqa_reference(one).out)
        for launch, one in zip(launches, inputs, strict=True)
    ]
    repeats = max(1, -(-MIN_LAUNCHES // copies))
    replay = timer.ready(launches * repeats)
    for _ in range(WARMUPS):
        replay()
    rounds = [replay() / (copies * repeats) for _ in range(ROUNDS)]
    us = median(rounds)
    return {
        "case": case.name,
        "shape": asdict(case),
        "us": us,
        "rounds": rounds,
        "kv_copies": copies,
        "rel_error": max(errors),
        "bytes": case.bytes,
        "flop": case.flop,
        "tbps": case.bytes / us / 1e6,
        "tflops": case.flop / us / 1e6,
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
