"""`mla-lab ranks`: decode context parallel on several GPUs, checked and timed against one."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from ._progress import bar
from ._words import numbers


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Options: the record, the ranks, batch sizes, lengths, heads."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "ranks", help="decode context parallel: several GPUs against one, with NCCL"
    )
    parser.add_argument("record", type=Path, help="JSON lines, appended to")
    parser.add_argument("--world", type=int, default=2, help="ranks, a GPU each (2)")
    parser.add_argument(
        "--device",
        choices=("cuda", "cpu"),
        default="cuda",
        help="cuda (default), or cpu, with gloo",
    )
    parser.add_argument(
        "--batch", type=numbers, default=(1, 2, 4, 8, 16), help="by comma (1,2,4,8,16)"
    )
    parser.add_argument(
        "--kv-len",
        type=numbers,
        default=(65536, 262144, 1048576),
        help="cached tokens of each request, by comma (65536,262144,1048576)",
    )
    parser.add_argument("--heads", type=int, default=128, help="query heads (128)")
    parser.add_argument("--rounds", type=int, default=21, help="timed rounds (21)")
    parser.add_argument(
        "--graph", action="store_true", help="time CUDA graphs in place of launches by the host"
    )
    return parser


def run(args: argparse.Namespace) -> int:
    """Measure, print a line a case; exit code 1 where a result is not one GPU's."""
    from ...bench.rank_steps import RankCases, measure

    sizes = (args.world, args.device, tuple(args.batch), tuple(args.kv_len))
    cases = RankCases(*sizes, heads=args.heads, rounds=args.rounds, graph=args.graph)
    with bar(f"{args.world} ranks", print) as shown:
        rows = measure(cases, args.record, shown.count)
    print(
        "  kv_len  batch  one, us  own call  gather  merge  exchange  in order  by peers  halves"
        "     error"
    )
    for row in rows:
        exchange, peers, halves = (
            f"{row[name]:{width}.1f}" if name in row else "-".rjust(width)
            for name, width in (("exchange_us", 9), ("peers_us", 9), ("halves_us", 7))
        )
        print(
            f"{row['kv_len']:8d} {row['batch']:6d} {row['alone_us']:8.1f} "
            f"{row['own_call_us']:9.1f} {row['gather_us']:7.1f} "
            f"{row['merge_us']:6.1f} {exchange} {row['in_order_us']:9.1f} {peers} "
            f"{halves} {row['out_error']:9.1e}"
        )
    return int(not all(row["ok"] for row in rows))
