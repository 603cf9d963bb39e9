"""The CUDA C++ decode kernel of any architecture on the CPU: pairs of its features, as a record.

The kernel is compiled with nvcc and run in the emulator with all checks on; inputs hold NaN where a
correct call does not read. What PTX says is what is proved: registers, timing and the rounding of
a card's matrix units are not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from .. import jit
from ..core.problem import Problem
from ..emulate import EmulatedKernel, Fault, Options
from ..emulate.calls import DTYPES, EIGHT_BITS, LOG2_E, SIXTEEN_BITS
from ..plan.xqa import MLA_DIMS, TILE_ROWS, config_for
from ..reference.inputs import DecodeInputs, make_inputs
from ..reference.mla import decode_reference
from ..reference.tolerance import error, lse_error
from .pairwise import Case, cover
from .record import Row, head_row

#: level -> what it means; pieces are (most pieces, keys of a piece): up to 8 of 16 groups merge as
#: a cluster, else through the workspace
PIECES = {"one": (1, 512), "cluster": (3, 128), "workspace": (10, 64)}
LENGTHS = {"short": (60, 17), "long": (300, 129), "empty": (0, 200)}
QUERIES = {"one": (1, 1), "three": (3, 3), "ragged": (1, 3)}
SCHEDULES = ("fair", "greedy", "random", "adverse")
FACTORS: dict[str, tuple[str, ...]] = {
    "formats": ("bf16", "fp16", "e4m3", "bf16 e4m3"),
    "heads": ("5", "16", "40"),
    "queries": tuple(QUERIES),
    "page_size": ("16", "32", "64", "128"),
    "lengths": tuple(LENGTHS),
    "pieces": tuple(PIECES),
    "mask": ("causal", "tree"),
    "extras": ("plain", "sinks", "device scales"),
    "lse": ("none", "natural", "base 2"),
    "tables": ("shared", "separate"),
    "schedule": SCHEDULES,
}


def allowed(case: Mapping[str, str]) -> bool:
    """Whether a case may exist: values in pages of their own are compiled for bf16 here."""
    separate = case.get("tables") == "separate"
    return not separate or case.get("formats", "bf16") == "bf16"


def cases() -> list[Case]:
    """Cases in which every allowed pair of levels occurs."""
    return cover(FACTORS, allowed)


def formats_of(case: Mapping[str, str]) -> tuple[str, str]:
    """Types of query and cache."""
    query, _, cache = case["formats"].partition(" ")
    return query, cache or query


def inputs_of(case: Mapping[str, str], seed: int) -> DecodeInputs:
    """Poisoned inputs of a case."""
    query, cache = formats_of(case)
    problem = Problem(
        q_lens=QUERIES[case["queries"]],
        kv_lens=LENGTHS[case["lengths"]],
        heads=int(case["heads"]),
        q_dtype=query,
        kv_format=cache,
        out_dtype="bf16" if query == "e4m3" else query,
        page_size=int(case["page_size"]),
    )
    features = {"device scales": ["sinks", "device_scales"], "sinks": ["sinks", "scales"]}
    names = ["lse", *features.get(case["extras"], [])]
    names += ["tree_mask"] if case["mask"] == "tree" else []
    names += ["separate_tables"] if case["tables"] == "separate" else []
    return make_inputs(problem, seed, names, workspace_bytes=64)


def _between(inputs: DecodeInputs, pieces: int) -> list[Tensor]:
    """Partials and counters; empty where nothing is split."""
    p = inputs.problem
    if pieces == 1:
        return [torch.empty(0), torch.empty(0), torch.empty(0, dtype=torch.int32)]
    groups = p.batch * -(-max(p.q_lens) * p.heads // TILE_ROWS)
    slots = groups * pieces
    return [
        torch.full((slots, TILE_ROWS, p.latent_dim), torch.nan),
        torch.full((slots, TILE_ROWS), torch.nan),
        torch.zeros(groups, dtype=torch.int32),
    ]


def arguments(
    case: Mapping[str, str], inputs: DecodeInputs
) -> tuple[tuple[Any, ...], Tensor, Tensor]:
    """The arguments of the kernel's launch, and out and lse among them."""
    p, (pieces, tokens) = inputs.problem, PIECES[case["pieces"]]
    out = torch.full((*inputs.query.shape[:-1], p.latent_dim), 7.0).to(DTYPES[p.out_dtype])
    lse = torch.full((p.total_q, p.heads) if case["lse"] != "none" else (0,), 7.0)
    between = _between(inputs, pieces)
    scales = (inputs.bmm1_scale, inputs.bmm2_scale)
    numbers = [0.0 if isinstance(s, Tensor) else float(s) for s in scales]
    tensors = [s.view(1) if isinstance(s, Tensor) else torch.empty(0) for s in scales]
    begins = inputs.cum_seq_lens_q
    mask = inputs.mask if inputs.mask is not None else torch.empty(0, dtype=torch.uint16)
    sinks = inputs.sinks if isinstance(inputs.sinks, Tensor) else torch.empty(0)
    begin = begins if begins is not None else torch.empty(0, dtype=torch.int32)
    lse_scale = LOG2_E if case["lse"] == "base 2" else 1.0
    args = (
        *(inputs.query, inputs.kv_cache, inputs.kv_cache, out, lse, *between),
        *(inputs.block_tables, inputs.seq_lens, begin, mask, sinks, *tensors, *numbers),
        *(lse_scale, max(p.q_lens), -1, pieces, tokens, False, False),
    )
    return args, out, lse


def run_case(case: Mapping[str, str], arch: str, seed: int = 0) -> Row:
    """The row of a case: "ok", "wrong" (results, or what a check found), or "failed"."""
    began, inputs = perf_counter(), inputs_of(case, seed)
    config = config_for(MLA_DIMS, formats_of(case), arch, separate=case["tables"] == "separate")
    options = Options(check=True, schedule=case["schedule"], seed=seed)
    kernel = EmulatedKernel.of(jit.compile(config, arch), options)
    args, out, lse = arguments(case, inputs)
    row: Row = {
        "kind": "case",
        "name": ", ".join(case[name] for name in FACTORS),
        "build": config.name(),
    }
    found: list[str] = []
    try:
        kernel(*args)
        expected = decode_reference(inputs)
        row["out_error"] = error(out, expected.out.reshape(out.shape)).relative
        base = LOG2_E if case["lse"] == "base 2" else 1.0
        row["lse_error"] = lse_error(lse / base, expected.lse) if lse.numel() else 0.0
        bounds = EIGHT_BITS if "e4m3" in case["formats"] else SIXTEEN_BITS
        right = row["out_error"] <= bounds[0] and row["lse_error"] <= bounds[1]
        row["status"] = "ok" if right and not kernel.run.findings else "wrong"
    except Fault as fault:
        row["status"], found = "failed", [str(fault)]
    found += [str(finding) for finding in kernel.run.findings]
    if found:
        row["findings"] = found
    return {**row, "seconds": round(perf_counter() - began, 2)}


def rows(arch: str, first: int | None, say: Callable[[str], None]) -> Iterator[Row]:
    """A record of the first so many cases, or of all."""
    chosen = cases()[:first]
    yield head_row(f"xqa --arch {arch}", "cpu", len(chosen))
    for case in chosen:
        row = run_case(case, arch)
        say(f"{row['status']} {row['name']}")
        yield row
