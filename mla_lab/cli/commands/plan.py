"""`mla-lab plan`: split policies side by side on one problem, predicted for one card."""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ...core.errors import invalid, unsupported
from ._problem import add_problem_options, problem_of

if TYPE_CHECKING:
    from ...core.gpu import Gpu
    from ...core.problem import Problem
    from ...plan import Plan


#: row tiles that are planned: every policy then takes a second or two
MOST_ROW_TILES = 1 << 16
#: tiles of a plan that are simulated, at about 90 us each
MOST_SIMULATED = 20_000


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Register the command; returns its parser."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "plan", help="split policies side by side on one problem"
    )
    add_problem_options(parser)
    plan = parser.add_argument_group("plan")
    plan.add_argument("--gpu", default="H200", help="Hopper card to plan for (H200)")
    plan.add_argument("--tile-rows", type=int, default=64, help="query rows of a row tile (64)")
    plan.add_argument("--tile-kv", type=int, default=64, help="cached tokens of a block (64)")
    plan.add_argument("--cluster", type=int, default=1, help="CTAs that share a work tile (1)")
    plan.add_argument(
        "--policy",
        action="append",
        help="show this split policy, or rule of a call without a plan; repeatable (all)",
    )
    plan.add_argument("--schedule", default="persistent", help="persistent (default) or grid")
    plan.add_argument(
        "--tiles", action="store_true", help="print the work tiles of each plan as well"
    )
    plan.add_argument("--json", action="store_true", help="the table as JSON")
    return parser


def run(args: argparse.Namespace) -> None:
    """Print one line per policy, and per rule of a call without a plan."""
    from ...core.gpu import Gpu
    from ...plan import POLICIES, RULES

    if args.json and args.tiles:
        raise invalid("--tiles", "it with --json", "one of the two")
    if args.trace is None and args.seed:
        raise invalid("--seed", args.seed, "it with --trace, from which a step is drawn")
    if args.mode == "replay" and args.seed:
        raise invalid("--seed", args.seed, "it with --mode sample: a replay draws nothing")
    asked = problem_of(args)
    gpu = Gpu.preset(args.gpu, "sm_90a")
    if gpu.arch != "sm_90a":
        raise unsupported("--gpu", gpu.name, "Hopper cards: the simulator has no other pipeline")
    _check_tiles(asked.problem, args.tile_rows)
    for policy in args.policy or ():
        if policy not in (*POLICIES, *RULES):
            raise invalid("--policy", repr(policy), (*POLICIES, *RULES))
    plans = {}
    rows = []
    # all policies, and the rules of a call without a plan where they have such tiles
    rules = RULES if _has_rules(args, asked.problem) else ()
    for policy in args.policy or (*POLICIES, *rules):
        plans[policy], row = _row(asked.problem, policy, gpu, args)
        rows.append(row)
    if args.json:
        floor = gpu.roofline_time(asked.problem) * 1e6
        print(json.dumps({"card": gpu.name, "floor_us": floor, "policies": rows}, indent=1))
        return
    _print_table(asked.problem, asked.model, gpu, rows)
    if args.tiles:
        for plan in plans.values():
            print(f"\n{plan}")


def _has_rules(args: argparse.Namespace, problem: Problem) -> bool:
    """True if a call without a plan has such tiles."""
    from ...plan.pricing import TILE_KV

    return args.schedule == "persistent" and args.tile_kv == TILE_KV and not problem.top_k


def _check_tiles(problem: Problem, tile_rows: int) -> None:
    """InvalidInput for so many row tiles that planning would take minutes."""
    if tile_rows < 1:
        return  # the planner's own message
    tiles = sum(-(-q_len * problem.heads // tile_rows) for q_len in problem.q_lens)
    if tiles > MOST_ROW_TILES:
        got = f"{tiles} row tiles ({problem.batch} requests of {problem.heads} heads)"
        raise invalid("plan", got, f"up to {MOST_ROW_TILES} row tiles of --tile-rows rows")


def _row(
    problem: Problem, policy: str, gpu: Gpu, args: argparse.Namespace
) -> tuple[Plan, dict[str, Any]]:
    from ...core.gpu import H200
    from ...plan import RULES, make_plan, plan_without
    from ...simulate import constants_for, simulate

    start, workers = time.perf_counter(), gpu.workers(args.cluster)
    if policy in RULES:
        if not _has_rules(args, problem):
            got = f"{policy!r} with {args.schedule} tiles of {args.tile_kv} tokens"
            raise invalid("--policy", got, "persistent tiles of 64 tokens")
        plan = plan_without(problem, policy, args.tile_rows, workers)
    else:
        plan = make_plan(
            problem,
            tile_rows=args.tile_rows,
            tile_kv=args.tile_kv,
            num_workers=workers,
            policy=policy,
            schedule=args.schedule,
        )
    seconds = time.perf_counter() - start
    fitted = constants_for(args.tile_rows)
    # both of datasheets: only the H200's has a measured rate beside it
    read_tbps = fitted.read_tbps * gpu.hbm_tbps / H200.hbm_tbps
    constants = replace(fitted, card=gpu.name, sms=gpu.sms, read_tbps=read_tbps)
    timeline = None
    if plan.num_tiles <= MOST_SIMULATED:
        timeline = simulate(plan, constants, cluster=args.cluster)
    splits = plan.splits()
    return plan, {
        "policy": policy,
        "tiles": plan.num_tiles,
        "splits": [int(splits.min()), int(splits.max())],
        "partials": plan.num_partials,
        "workspace_bytes": plan.workspace.nbytes,
        "simulated_us": timeline and timeline.makespan,
        "busy": timeline and timeline.utilisation(),
        "planning_ms": seconds * 1e3,
    }


def _print_table(problem: Problem, model: str, gpu: Gpu, rows: list[dict[str, Any]]) -> None:
    lengths = problem.kv_lens
    rates = "the rates that it sustains" if gpu.ceilings else "the rates of its datasheet"
    print(
        f"{model}, batch {problem.batch}, q {max(problem.q_lens)}, kv {min(lengths)} to "
        f"{max(lengths)} ({sum(lengths)} tokens)\n"
        f"simulated on {gpu.name}; roofline at {rates}: "
        f"{gpu.roofline_time(problem) * 1e6:.1f} us\n\n"
        f"{'policy':<16}{'tiles':>7}{'splits':>10}{'partials':>10}{'workspace':>12}"
        f"{'simulated':>12}{'busy':>7}{'planned in':>12}"
    )
    for row in rows:
        low, high = row["splits"]
        splits = f"{low}" if low == high else f"{low}-{high}"
        print(
            f"{row['policy']:<16}{row['tiles']:>7}{splits:>10}{row['partials']:>10}"
            f"{row['workspace_bytes'] / 1e6:>9.1f} MB{_simulated(row)}"
            f"{row['planning_ms']:>9.1f} ms"
        )
    if any(row["simulated_us"] is None for row in rows):
        print(f"-  not simulated: more than {MOST_SIMULATED} tiles")


def _simulated(row: dict[str, Any]) -> str:
    """Two columns: time, and share of the time that workers are busy."""
    if row["simulated_us"] is None:
        return f"{'-':>12}{'-':>7}"
    return f" {row['simulated_us']:>8.1f} us{row['busy']:>7.0%}"
