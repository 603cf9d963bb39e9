"""`mla-lab ranks`: decode context parallel on several GPUs, checked and timed against one."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Options: the record, the ranks, batch sizes, lengths, heads."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "ranks", help="decode context parallel: several GPUs against one, with NCCL"
    )
    parser.add_argument("record", type=Path, help="JSON lines, appended to")
    parser.add_argument("--world", type=int, default=2, help="ranks, a GPU each")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: by gloo")
    parser.add_argument("--batch", type=_numbers, default=(1, 2, 4, 8, 16), help="by comma")
    parser.add_argument("--kv-len", type=_numbers, default=(65536, 262144, 1048576), help="tokens")
    parser.add_argument("--heads", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=21)
    return parser


def run(args: argparse.Namespace) -> int:
    """Measure, print a line a case; exit code 1 where a result is not one GPU's."""
    from ...bench.rank_steps import RankCases, measure

    cases = RankCases(
        args.world, args.device, args.batch, args.kv_len, heads=args.heads, rounds=args.rounds
    )
    rows = measure(cases, args.record)
    print("  kv_len  batch   one, us  step, us  own call  merge   out error")
    for row in rows:
        print(
            f"{row['kv_len']:8d} {row['batch']:6d} {row['alone_us']:9.1f} {row['step_us']:9.1f} "
            f"{row['own_call_us']:9.1f} {row['merge_us']:6.1f}   {row['out_error']:.1e}"
        )
    return int(not all(row["ok"] for row in rows))
