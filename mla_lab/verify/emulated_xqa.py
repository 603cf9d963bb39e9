"""The CUDA C++ decode kernel of any architecture on the CPU, as a record: pairs of its features,
and the published list.

The kernel is compiled with nvcc and run in the emulator with all checks on; inputs hold NaN where a
correct call does not read. What PTX says is what is proved: registers, timing and the rounding of
a card's matrix units are not.

It takes all 396 configurations of `published`. A block has one row tile and one piece, and reads
the length of its own request alone; so each dtype, page size and number of query tokens is run once
with 2 and once with 3 pieces, of 3 tiles of 64 keys less 1 to 63, and a row says for how many
configurations it stands. One query token has two requests of unlike lengths, more have one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from itertools import chain
from time import process_time
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import jit
from ..call.feature_operands import LOG2_E
from ..core.kv_cache import DTYPES
from ..core.problem import Problem
from ..emulate import EmulatedKernel, Fault, Options
from ..emulate.calls import EIGHT_BITS, SIXTEEN_BITS
from ..plan.xqa import MLA_DIMS, TILE_KEYS, TILE_ROWS, config_for
from ..reference.inputs import DecodeInputs, make_inputs
from ..reference.mla import decode_reference
from ..reference.tolerance import error, lse_error
from .pairwise import Case, cover
from .published import HEADS, configurations
from .record import Row, head_row

#: level -> what it means; pieces are (most pieces, keys of a piece): up to 8 of 16 groups merge as
#: a cluster, else through the workspace
PIECES = {"one": (1, 512), "cluster": (3, 128), "workspace": (10, 64)}
LENGTHS = {"short": (60, 17), "long": (300, 129), "empty": (0, 200)}
QUERIES = {"one": (1, 1), "three": (3, 3), "ragged": (1, 3)}
#: keys of a piece of a published shape
KEYS = 3 * TILE_KEYS
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


class Shape(NamedTuple):
    """What is left of a published configuration when it is cut down."""

    dtype: str
    page_size: int
    q_len: int
    pieces: int

    def problem(self, index: int) -> Problem:
        """The cut problem; lengths differ by `index`."""
        whole, missing = self.pieces * KEYS, 1 + 13 * index % (TILE_KEYS - 1)
        lengths = (whole - missing, whole - TILE_KEYS + missing)[: 2 if self.q_len == 1 else 1]
        return Problem(
            q_lens=(self.q_len,) * len(lengths),
            kv_lens=lengths,
            heads=HEADS,
            q_dtype=self.dtype,
            kv_format=self.dtype,
            out_dtype="bf16",
            page_size=self.page_size,
        )


def shapes() -> Counter[Shape]:
    """Cut shapes, each with how many of the 396 configurations it stands for."""
    found = ((c, 3 if c.kv_len == 8192 else 2) for c in configurations())
    return Counter(Shape(c.dtype, c.page_size, c.q_len, pieces) for c, pieces in found)


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
    inputs: DecodeInputs, most: int, tokens: int, lse_base: str
) -> tuple[tuple[Any, ...], Tensor, Tensor]:
    """The arguments of a launch in pieces of `tokens` keys, `most` of them at most, and out and lse
    among them."""
    p = inputs.problem
    out = torch.full((*inputs.query.shape[:-1], p.latent_dim), 7.0).to(DTYPES[p.out_dtype])
    lse = torch.full((p.total_q, p.heads) if lse_base != "none" else (0,), 7.0)
    between = _between(inputs, most)
    scales = (inputs.bmm1_scale, inputs.bmm2_scale)
    numbers = [0.0 if isinstance(s, Tensor) else float(s) for s in scales]
    tensors = [s.view(1) if isinstance(s, Tensor) else torch.empty(0) for s in scales]
    begins = inputs.cum_seq_lens_q
    mask = inputs.mask if inputs.mask is not None else torch.empty(0, dtype=torch.uint16)
    sinks = inputs.sinks if isinstance(inputs.sinks, Tensor) else torch.empty(0)
    begin = begins if begins is not None else torch.empty(0, dtype=torch.int32)
    lse_scale = LOG2_E if lse_base == "base 2" else 1.0
    args = (
        *(inputs.query, inputs.kv_cache, inputs.kv_cache, out, lse, *between),
        *(inputs.block_tables, inputs.seq_lens, begin, mask, sinks, *tensors, *numbers),
        *(lse_scale, max(p.q_lens), -1, most, tokens, False, False),
    )
    return args, out, lse


def run_case(case: Mapping[str, str], arch: str, seed: int = 0) -> Row:
    """The row of a case: "ok", "wrong" (results, or what a check found), or "failed"."""
    config = config_for(MLA_DIMS, formats_of(case), arch, separate=case["tables"] == "separate")
    options = Options(check=True, schedule=case["schedule"], seed=seed)
    kernel = EmulatedKernel.of(jit.compile(config, arch), options)
    name = ", ".join(case[factor] for factor in FACTORS)
    row = _emulate(kernel, inputs_of(case, seed), PIECES[case["pieces"]], case["lse"])
    return {"kind": "case", "name": name, "build": config.name(), **row}


def run_shape(shape: Shape, stands_for: int, arch: str, index: int) -> Row:
    """The same of a published shape, the `index`-th."""
    config = config_for(MLA_DIMS, (shape.dtype, shape.dtype), arch)
    schedule = SCHEDULES[index % len(SCHEDULES)]
    options = Options(check=True, schedule=schedule, seed=index)
    kernel = EmulatedKernel.of(jit.compile(config, arch), options)
    inputs = make_inputs(shape.problem(index), index, ["lse"], workspace_bytes=64)
    row = _emulate(kernel, inputs, (shape.pieces, KEYS), "natural")
    return {
        "kind": "case",
        "name": f"published, {', '.join(map(str, shape))}",
        "stands_for": stands_for,
        "kv_lens": inputs.problem.kv_lens,
        "schedule": schedule,
        "build": config.name(),
        **row,
    }


def _emulate(
    kernel: EmulatedKernel, inputs: DecodeInputs, pieces: tuple[int, int], lse_base: str
) -> Row:
    """Status, errors, findings and CPU seconds of a call."""
    began, found = process_time(), []
    args, out, lse = arguments(inputs, *pieces, lse_base)
    row: Row = {}
    try:
        kernel(*args)
        expected = decode_reference(inputs)
        row["out_error"] = error(out, expected.out.reshape(out.shape)).relative
        base = LOG2_E if lse_base == "base 2" else 1.0
        row["lse_error"] = lse_error(lse / base, expected.lse) if lse.numel() else 0.0
        bounds = EIGHT_BITS if inputs.problem.kv_format == "e4m3" else SIXTEEN_BITS
        right = row["out_error"] <= bounds[0] and row["lse_error"] <= bounds[1]
        row["status"] = "ok" if right and not kernel.run.findings else "wrong"
    except Fault as fault:
        row["status"], found = "failed", [str(fault)]
    found += [str(finding) for finding in kernel.run.findings]
    if found:
        row["findings"] = found
    return {**row, "cpu_seconds": round(process_time() - began, 2)}


def rows(arch: str, first: int | None, say: Callable[[str], None]) -> Iterator[Row]:
    """A record of the first so many cases and published shapes, or of all."""
    chosen, cut = cases()[:first], list(shapes().items())[:first]
    yield head_row(f"xqa --arch {arch}", "cpu", len(chosen) + len(cut))
    made = (run_case(case, arch) for case in chosen)
    published = (run_shape(*shape, arch, index) for index, shape in enumerate(cut))
    for row in chain(made, published):
        say(f"{row['status']} {row['name']} {row['cpu_seconds']} s")
        yield row
