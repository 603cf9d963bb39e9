"""Host time of a call: `python -m mla_lab.studies.host_cost RECORD` on a card.

Layer by layer: the attention kernel's entry with prepared arguments; the native call with a plan, a
workspace and an out; the contract's name with the same; both without a plan, as an engine calls,
and batch invariant. For comparison torch's `add(out=)`. Medians over rounds in which each is called
in turn, so that a slow phase of the host affects all; no call waits for the device during a round,
and a round is shorter than the device's queue.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from ..api import decode
from ..api.contract import trtllm_batch_decode_with_kv_cache_mla
from ..backends.cute.backend import CuteBackend
from ..backends.cute.families import costs
from ..backends.cute.launch import Launch
from ..call.decode_args import native_args
from ..core.errors import unsupported
from ..core.gpu import Gpu
from ..core.problem import Problem
from ..core.revision import Revision, check_record
from ..plan import choose
from ..reference.inputs import make_inputs
from ..verify.target_figures import ADD, PLAIN_CALL

ROUNDS, CALLS = 50, 100
#: small, so that the device never falls behind the host
PROBLEM = Problem.uniform(4, 1, 128, 128)


def measure() -> dict[str, float]:
    """Microseconds a call, by name. Raises Unsupported without a card that runs the kernels."""
    gpu = Gpu.here()
    if gpu is None:
        raise unsupported("device", "no GPU", "a GPU that the CuTe backend runs on")
    calls = _calls(gpu)
    return medians_us(calls, torch.cuda.synchronize)


def medians_us(calls: dict[str, Callable[[], Any]], settle: Callable[[], None]) -> dict[str, float]:
    """Medians over rounds of the mean host time of each call; `settle` empties the queue."""
    rounds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(ROUNDS):
        for name, call in calls.items():
            settle()
            start = time.perf_counter()
            for _ in range(CALLS):
                call()
            rounds[name].append((time.perf_counter() - start) / CALLS * 1e6)
    settle()
    return {name: statistics.median(times) for name, times in rounds.items()}


def _calls(gpu: Gpu) -> dict[str, Callable[[], Any]]:
    inputs = make_inputs(PROBLEM, device="cuda", workspace_bytes=128 << 20)
    plan = choose(PROBLEM, gpu, costs=costs()).plan(PROBLEM)
    out = torch.empty(*inputs.query.shape[:-1], 512, dtype=torch.bfloat16, device="cuda")
    contract = {**inputs.contract_args(), "out": out, "backend": "cute"}
    native = {name: value for name, value in contract.items() if name != "qk_nope_head_dim"}
    a = torch.zeros(8, device="cuda")
    kernel, arguments = _bare({**native, "plan": plan}, gpu)
    decode_mla = trtllm_batch_decode_with_kv_cache_mla
    return {
        ADD: lambda: torch.add(a, a, out=a),
        "kernel entry": lambda: kernel(*arguments),
        "native call, plan": _written_out(decode.decode, **native, plan=plan),
        "contract's name, plan": _written_out(decode_mla, **contract, plan=plan),
        "native call, no plan": _written_out(decode.decode, **native),
        PLAIN_CALL: _written_out(decode_mla, **contract),
        "contract's name, batch invariant": _written_out(
            decode_mla, **contract, batch_invariant=True
        ),
    }


def _written_out(function: Callable[..., Any], **named: Any) -> Callable[[], Any]:
    """A call with literal keywords, as in an engine: unpacking a dictionary in each call costs half
    a microsecond.
    """
    values = {f"value_{name}": value for name, value in named.items()}
    text = ", ".join(f"{name}=value_{name}" for name in named)
    made: Callable[[], Any] = eval(f"lambda: function({text})", {"function": function, **values})
    return made


def _bare(named: dict[str, Any], gpu: Gpu) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The attention kernel's entry, with the arguments that the native call passes."""
    backend = named.pop("backend")
    call, runner = decode.prepare(native_args(**named, backend=backend))
    plan: Any = decode.make_plan(call, runner)
    if not isinstance(runner, CuteBackend):
        raise unsupported("backend", runner.name, "cute")
    launch = Launch.of(call, plan, decode.allocate(call, plan), gpu)
    seen: list[tuple[Any, ...]] = []
    kernel, launch.attend = launch.attend, lambda *arguments: seen.append(arguments)
    launch.enqueue()(call.args, call.out, None)
    return kernel, seen[0]


def main() -> None:
    """Print the figures, and append them to the record that is named."""
    parser = argparse.ArgumentParser(prog="python -m mla_lab.studies.host_cost")
    parser.add_argument("record", type=Path, help="JSON lines, appended to")
    record = parser.parse_args().record
    check_record(record)
    figures = measure()
    bare = figures["kernel entry"]
    for name, us in figures.items():
        print(f"{name:32} {us:7.2f} us" + (f"  {us - bare:+6.2f}" if "call" in name else ""))
    today, commit = datetime.now(UTC).date().isoformat(), Revision.here().commit
    row = {"date": today, "commit": commit, "host_us": figures}
    with record.open("a", encoding="utf-8") as file:
        file.write(json.dumps({**row, "card": torch.cuda.get_device_name()}) + "\n")


if __name__ == "__main__":
    main()
