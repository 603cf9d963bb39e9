"""`mla-lab decode`: plan one decode call, run it, judge it, and place it under the roofline."""

from __future__ import annotations

import argparse
import json
import textwrap
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from ...core.errors import invalid, unsupported
from ._problem import CallOptions, add_problem_options, problem_of
from ._progress import Bar, bar

if TYPE_CHECKING:
    from ...core.gpu import Gpu
    from ...core.problem import Problem
    from ...plan import Plan
    from ...reference.inputs import DecodeInputs
    from ._run import Judged, Measured

#: exit code for a result outside its bound; a wrong option is 2
OUT_OF_BOUND = 1


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Register the command; returns its parser."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "decode", help="plan and run one decode call, and compare it with the oracle"
    )
    add_problem_options(parser)
    run = parser.add_argument_group("run")
    run.add_argument("--backend", default="auto", help="auto (default), torch, cute or cuda")
    run.add_argument("--device", default=None, help="cpu or cuda (where there is a GPU)")
    run.add_argument("--policy", help="split policy of the plan (the backend's own choice)")
    run.add_argument(
        "--batch-invariant",
        action="store_true",
        help="the bits of a request do not depend on the rest of the batch",
    )
    run.add_argument(
        "--feature", action="append", default=[], help="sinks, tree_mask, ragged, ...; repeatable"
    )
    run.add_argument(
        "--calls",
        type=int,
        help="calls to run; of several the first is not timed (default: what 3 s hold)",
    )
    run.add_argument("--no-check", action="store_true", help="skip the oracle")
    run.add_argument("--gpu", default="H200", help="card of the roofline (H200)")
    run.add_argument("--json", action="store_true", help="the result as JSON")
    return parser


def run(args: argparse.Namespace) -> int:
    """Run the call and print the result; 1 where it is outside its bound."""
    from ...core.gpu import Gpu
    from ._run import check_memory

    if args.calls is not None and args.calls < 1:
        raise invalid("--calls", args.calls, "1 or more")
    options = problem_of(args)
    roof = Gpu.preset(args.gpu)
    device = _device(args.device)
    check_memory(options.problem, device, not args.no_check)
    with bar("making inputs", print, quiet=args.json) as shown:
        inputs = _inputs(options, args, device)
        plan, backend, measured, judged = _run(inputs, args, device, shown)
    report = {
        "model": options.model,
        "lengths": {"from": options.lengths, "kv_lens": options.problem.kv_lens},
        "problem": asdict(options.problem),
        "plan": _plan_report(plan),
        "time": {
            "median_s": measured.median_seconds,
            "calls": len(measured.seconds),
            "backend": backend,
            "device": device,
        },
        "error": judged and _error_report(judged),
        "roofline": _roofline_report(options.problem, roof),
        "memory": _memory_report(inputs, plan, measured),
    }
    if args.json:
        print(json.dumps(report, indent=1))
    else:
        _print(report, plan, options)
    return 0 if judged is None or judged.good else OUT_OF_BOUND


def _run(
    inputs: DecodeInputs, args: argparse.Namespace, device: str, shown: Bar
) -> tuple[Plan, str, Measured, Judged | None]:
    """Plan, name of the backend, timed calls, and the check of the last call by the oracle."""
    import torch

    from ...api.decode import decode
    from ._run import judge, measure

    arguments = _arguments(inputs, args)
    plan, backend = _plan(arguments, args)
    arguments["workspace_buffer"] = torch.zeros(
        plan.workspace.nbytes, dtype=torch.uint8, device=device
    )
    shown.phase("calls", args.calls)
    measured = measure(
        lambda: decode(**arguments, plan=plan, backend=backend), device, args.calls, shown.count
    )
    if args.no_check:
        return plan, backend, measured, None
    shown.phase("oracle in float64, requests", inputs.problem.batch)
    return plan, backend, measured, judge(inputs, measured.out, measured.lse, shown.count)


def _device(wanted: str | None) -> str:
    import torch

    if wanted not in (None, "cpu", "cuda"):
        raise invalid("--device", repr(wanted), "cpu, cuda")
    here = torch.cuda.is_available()
    if wanted == "cuda" and not here:
        raise unsupported("--device", "cuda", "cpu: torch finds no GPU here")
    return wanted or ("cuda" if here else "cpu")


def _inputs(options: CallOptions, args: argparse.Namespace, device: str) -> DecodeInputs:
    """Random tensors of the problem, without a workspace."""
    from ...reference.inputs import make_inputs

    features = {"lse", *args.feature}
    inputs = make_inputs(options.problem, args.seed, features, device=device, workspace_bytes=0)
    if "device_scales" not in features:
        inputs = replace(inputs, bmm1_scale=options.softmax_scale)
    return inputs


def _arguments(inputs: DecodeInputs, args: argparse.Namespace) -> dict[str, Any]:
    """Arguments of the native call, which allocates its workspace."""
    from ...core.kv_cache import storage

    problem, query = inputs.problem, inputs.query
    # the contract's default out is bf16; a narrower rounding than the query's would be judged here
    dtype, width = storage(problem.out_dtype, problem.latent_dim)
    out = query.new_empty((*query.shape[:-1], width), dtype=dtype)
    arguments = inputs.contract_args() | {"batch_invariant": args.batch_invariant, "out": out}
    del arguments["workspace_buffer"]
    return arguments


def _plan(arguments: dict[str, Any], args: argparse.Namespace) -> tuple[Plan, str]:
    """The plan of `--policy`, or else the backend's own; and the backend's name.

    A backend that plans on the device gets the plan that it would choose for these lengths.
    """
    from ...api.decode import make_plan as plan_of
    from ...api.decode import prepare
    from ...backends import gpu_of
    from ...call.decode_args import native_args
    from ...core.gpu import H200
    from ...plan import Plan, choose, make_plan

    call, backend = prepare(native_args(**arguments, backend=args.backend))
    problem = replace(call.problem, kv_lens=tuple(arguments["seq_lens"].tolist()))
    if args.policy is not None:
        return make_plan(problem, policy=args.policy), backend.name
    planned = plan_of(call, backend)
    if isinstance(planned, Plan):
        return planned, backend.name
    gpu = gpu_of(call.form.device) or H200
    return choose(problem, gpu, args.batch_invariant).plan(problem), backend.name


def _plan_report(plan: Plan) -> dict[str, Any]:
    splits = plan.splits()
    return {
        "policy": plan.policy,
        "schedule": plan.schedule,
        "tiles": plan.num_tiles,
        "workers": plan.num_workers,
        "splits": [int(splits.min()), int(splits.max())],
        "partials": plan.num_partials,
    }


def _error_report(judged: Judged) -> dict[str, Any]:
    return {
        "relative": judged.out.relative,
        "greatest": judged.out.greatest,
        "sdpa": judged.sdpa._asdict(),
        "allowed_ratio": judged.allowed_ratio,
        "lse": judged.lse,
        "lse_tolerance": judged.lse_tolerance,
        "good": judged.good,
    }


def _roofline_report(problem: Problem, roof: Gpu) -> dict[str, Any]:
    return {
        "card": roof.name,
        "flops": problem.flops(),
        "bytes": problem.bytes(),
        "intensity": problem.intensity(),
        "ridge": roof.ridge(problem.q_dtype),
        "bound": roof.bound(problem),
        "floor_us": roof.roofline_time(problem) * 1e6,
    }


def _memory_report(inputs: DecodeInputs, plan: Plan, measured: Measured) -> dict[str, Any]:
    cache = inputs.kv_cache
    return {
        "cache_bytes": cache.numel() * cache.element_size(),
        "workspace_bytes": plan.workspace.nbytes,
        "peak_extra_bytes": measured.peak_bytes,
    }


def _print(report: dict[str, Any], plan: Plan, options: CallOptions) -> None:
    problem, time, roof = options.problem, report["time"], report["roofline"]
    lengths = textwrap.fill(
        ", ".join(map(str, problem.kv_lens)),
        88,
        initial_indent=" " * 10,
        subsequent_indent=" " * 10,
    )
    rate = roof["flops"] / time["median_s"] / 1e9
    print(
        f"call      {options.model}, batch {problem.batch}, q {max(problem.q_lens)}, "
        f"{problem.q_dtype} over {problem.kv_format}, pages of {problem.page_size}\n"
        f"lengths   {options.lengths}, {sum(problem.kv_lens)} tokens:\n{lengths}\n"
        f"{plan.summary()}\n"
        f"time      {time['median_s'] * 1e3:.1f} ms, median of {time['calls']}; backend "
        f"{time['backend']} on {time['device']}, {rate:.0f} GFLOP/s\n"
        f"error     {_error_line(report['error'])}\n"
        f"roofline  {roof['intensity']:.0f} operations a byte against {roof['card']}'s ridge of "
        f"{roof['ridge']:.0f}: {roof['bound']} side, at least {roof['floor_us']:.1f} us there\n"
        f"memory    {_memory_line(report['memory'])}"
    )


def _error_line(error: dict[str, Any] | None) -> str:
    if error is None:
        return "not checked"
    verdict = "within" if error["good"] else "OUTSIDE"
    sdpa = error["sdpa"]
    return (
        f"{error['relative']:.2e} relative, {error['greatest']:.2e} at most; torch SDPA in the "
        f"same precision {sdpa['relative']:.2e} and {sdpa['greatest']:.2e}; {verdict} "
        f"{error['allowed_ratio']:.0f}x of it\n"
        f"          lse {error['lse']:.1e}, allowed {error['lse_tolerance']:.0e}"
    )


def _memory_line(memory: dict[str, Any]) -> str:
    peak = memory["peak_extra_bytes"]
    extra = "unknown here" if peak is None else f"{max(0, peak) / 1e6:.0f} MB"
    return (
        f"cache {memory['cache_bytes'] / 1e6:.0f} MB, workspace "
        f"{memory['workspace_bytes'] / 1e6:.1f} MB, peak beyond what was there {extra}"
    )
