"""Options that describe a decode call, for the commands that plan or run one."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from math import isfinite

from ...core.errors import invalid
from ...core.models import MODELS, Model, get_model
from ...core.problem import ELEMENT_BYTES, KV_FORMATS, Problem
from ._words import check_seed

DEFAULT_HEADS = 128
DEFAULT_BATCH = 8
DEFAULT_KV_LEN = 4096
DEFAULT_STEP_MS = 30.0
#: larger problems would take minutes and gigabytes before the first output
MOST_REQUESTS = 1 << 20
#: lengths and page ids are int32 in the kernels
MOST = 2**31 - 1
#: softmax scale without a model: DeepSeek's 128 + 64 query columns before absorption
PLAIN_SCALE = 192**-0.5


@dataclass(frozen=True)
class CallOptions:
    """The decode call of the command's options, and the source of its lengths."""

    problem: Problem
    softmax_scale: float
    #: "deepseek-v3, 128 heads" and "given", or the trace and how it was read
    model: str
    lengths: str


def add_problem_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that `problem_of` reads."""
    shape = parser.add_argument_group("shape")
    shape.add_argument("--model", metavar="NAME", help=f"one of {', '.join(MODELS)}")
    shape.add_argument("--tp", type=int, default=1, help="tensor-parallel ranks of the model")
    shape.add_argument(
        "--heads", type=int, help=f"query heads, instead of a model (default {DEFAULT_HEADS})"
    )
    shape.add_argument("--batch", type=int, help=f"requests (default {DEFAULT_BATCH})")
    shape.add_argument("--q-len", type=int, default=1, help="new tokens a request (default 1)")
    shape.add_argument(
        "--kv-len",
        type=_lengths,
        metavar="N[,N...]",
        help=f"cached tokens: one length for all, or one a request (default {DEFAULT_KV_LEN})",
    )
    shape.add_argument(
        "--dtype", default="bf16", choices=sorted(ELEMENT_BYTES), help="dtype of the query (bf16)"
    )
    shape.add_argument("--kv-format", choices=KV_FORMATS, help="format of the cache (as the query)")
    shape.add_argument("--page-size", type=int, default=64, help="tokens a page (default 64)")
    trace = parser.add_argument_group("lengths from a serving trace, instead of --kv-len")
    trace.add_argument(
        "--trace",
        metavar="FILE",
        help='Azure CSV or Mooncake JSONL; "synthetic" is the shipped one',
    )
    trace.add_argument(
        "--mode",
        choices=("sample", "replay"),
        help="sample: --batch requests drawn at random (default); replay: the requests that were "
        "decoding at the time --at",
    )
    trace.add_argument(
        "--at", type=float, help="replay: seconds into the trace (default: its middle)"
    )
    trace.add_argument(
        "--step-ms", type=float, help="replay: milliseconds that a decode step takes (30)"
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="seed of everything that is drawn at random (0)"
    )


def _lengths(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"got {text!r}; supported: 4096 or 512,4096") from error


def problem_of(args: argparse.Namespace) -> CallOptions:
    """The call that the options describe. Raises InvalidInput where they contradict each other or
    name a size that no kernel takes.
    """
    _check_sizes(args)
    _check_formats(args)
    _check_trace_options(args)
    model = _model(args)
    heads = DEFAULT_HEADS if args.heads is None else args.heads
    if model:
        heads = model.heads_per_rank(args.tp)
    kv_lens, source = _given_lengths(args) if args.trace is None else _trace_lengths(args)
    problem = Problem(
        q_lens=(args.q_len,) * len(kv_lens),
        kv_lens=kv_lens,
        heads=heads,
        q_dtype=args.dtype,
        kv_format=args.kv_format or args.dtype,
        # results of an 8-bit query are bf16, as the contract's default
        out_dtype="bf16" if args.dtype == "e4m3" else args.dtype,
        page_size=args.page_size,
    )
    name = f"{model.title}, {heads} heads a rank" if model else f"{heads} heads"
    return CallOptions(problem, model.softmax_scale if model else PLAIN_SCALE, name, source)


def _check_sizes(args: argparse.Namespace) -> None:
    sizes = {"--heads": args.heads, "--q-len": args.q_len, "--page-size": args.page_size}
    for name, value in [*sizes.items(), *(("--kv-len", n) for n in args.kv_len or ())]:
        if value is not None and value > MOST:
            raise invalid(name, value, f"up to {MOST}")
    if args.q_len < 1:
        raise invalid("--q-len", args.q_len, "1 or more")
    if args.batch is not None and not 1 <= args.batch <= MOST_REQUESTS:
        raise invalid("--batch", args.batch, f"1 to {MOST_REQUESTS} requests")


def _check_formats(args: argparse.Namespace) -> None:
    """Refuse a cache that no call takes under such a query."""
    eight_bits = {"bf16": ("e4m3", "fp8_656"), "e4m3": ()}.get(args.dtype, ("fp8_656",))
    if args.kv_format not in (None, args.dtype, *eight_bits):
        taken = ", ".join((args.dtype, *eight_bits))
        raise invalid("--kv-format", f"{args.kv_format} under {args.dtype}", taken)


def _check_trace_options(args: argparse.Namespace) -> None:
    """Refuse what would have no effect without a trace, or but for its replay."""
    check_seed(args.seed)
    if args.trace is None and args.mode is not None:
        raise invalid("--mode", args.mode, "a mode with --trace")
    for name, value in {"--at": args.at, "--step-ms": args.step_ms}.items():
        if value is not None and args.mode != "replay":
            raise invalid(name, value, "a time with --mode replay")
    if args.step_ms is not None and not 0 < args.step_ms < float("inf"):
        raise invalid("--step-ms", args.step_ms, "milliseconds above 0")
    if args.at is not None and not isfinite(args.at):
        raise invalid("--at", args.at, "a finite time in seconds")


def _model(args: argparse.Namespace) -> Model | None:
    if args.model is None:
        if args.tp != 1:
            raise invalid("--tp", args.tp, "1 without a model")
        return None
    if args.heads is not None:
        raise invalid("--heads", f"{args.heads} beside --model", "one of them")
    return get_model(args.model)


def _given_lengths(args: argparse.Namespace) -> tuple[tuple[int, ...], str]:
    kv_lens: tuple[int, ...] = args.kv_len or (DEFAULT_KV_LEN,)
    batch = args.batch
    if batch is None:
        batch = len(kv_lens) if len(kv_lens) > 1 else DEFAULT_BATCH
    if len(kv_lens) not in (1, batch):
        raise invalid("--kv-len", f"{len(kv_lens)} lengths", f"one, or --batch ({batch}) of them")
    return (kv_lens * batch if len(kv_lens) == 1 else kv_lens), "given"


def _trace_lengths(args: argparse.Namespace) -> tuple[tuple[int, ...], str]:
    from ...workload import load_trace, replay, sample, shipped_trace

    if args.kv_len is not None:
        raise invalid("--kv-len", "lengths beside --trace", "one of them")
    if args.seed < 0:
        raise invalid("--seed", args.seed, "0 or more")
    trace = shipped_trace() if args.trace == "synthetic" else load_trace(args.trace)
    if args.mode == "replay":
        if args.batch is not None:
            raise invalid("--batch", f"{args.batch} with --mode replay", "the batch at that time")
        at = trace.duration_s / 2 if args.at is None else args.at
        step_ms = DEFAULT_STEP_MS if args.step_ms is None else args.step_ms
        step = replay(trace, at, step_ms / 1e3)
        if not len(step):
            raise invalid("--at", f"{at:g} s, when no request is decoding", "another time")
        how = f"replay at {at:g} s, {step_ms:g} ms a token"
    else:
        step = sample(trace, DEFAULT_BATCH if args.batch is None else args.batch, args.seed)
        how = f"sample of {len(step)} steps, seed {args.seed}"
    # the drafts of a longer query are cached too
    kv_lens = tuple(length + args.q_len - 1 for length in step.kv_lens)
    return kv_lens, f"{how}, from {trace.name}"
