"""The steps of `mla-lab live`: which records each makes, by which commands, and what it needs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...core.errors import MlaLabError

ANCHOR, ANATOMY, HOST = "h200_anchor", "h200_anatomy", "host_cost"
PLAIN, PLAIN_TRACES, UNIFORM = "h200_plain", "h200_plain_traces", "h200_plain_uniform"
PLANNED_TRACES = "h200_traces"
PLAIN_PEERS = "--peers mla-lab-plain,flashinfer-fa3,flashmla,fa3-qv"
ANCHOR_PEERS = (
    "--peers mla-lab,torch-eager,triton-split-kv,flashinfer-fa3,flashmla,fa3-qv,fa3-qv-32"
)
#: the rotation is that of the records to which the cost model's constants were fitted
SWEEP = "bench sweep RECORD --rotation-mb 120"
SWEEPS = ("h200_sweep", "h200_sweep_drawn")
HELD_OUT, EIGHT_SWEEP = "h200_sweep_heldout", "h200_sweep_eight_bits"
PLAIN_HELD_OUT = "h200_plain_heldout"
#: our calls: the plain one and the one with a host plan
OWN = "--peers mla-lab-plain,mla-lab --rounds 5 --quick"
TRACE_PEERS = "--peers mla-lab-plain,mla-lab,flashmla,flashinfer-fa3,fa3-qv --rounds 5"
#: the plain call without peers
PLAIN_ALONE = "bench run RECORD --peers mla-lab-plain --rounds 5 --quick"
#: samples of two serving traces; TRACES are their files
TRACE_CASES = "--cases trace --trace TRACES --model deepseek-v2-lite,deepseek-v3"
FORMATS = "--formats bf16,e4m3,bf16:e4m3,bf16:fp8_656"
#: sparse calls: the plain one, our two kernels that gather tokens one by one, and FlashMLA
SPARSE = (
    "bench run RECORD --kv-len 32768 --formats bf16:fp8_656 --rounds 7 --quick "
    "--peers mla-lab-plain,mla-lab-cute-gathered,mla-lab-cute-keep-ab-gather,flashmla"
)
SPARSE_BF16 = SPARSE.replace("bf16:fp8_656", "bf16")
CUDA = "bench run RECORD --peers mla-lab-cuda --quick --kv-len 8192 --batch 1,64,128"
#: record -> commands that make it, one after the other; RECORD is where, LENGTHS are the mean
#: lengths of the samples that the record then has
COMMANDS = {
    "h200_sweep": [f"{SWEEP} --cases anchor"],
    "h200_sweep_drawn": [f"{SWEEP} --cases drawn"],
    HELD_OUT: [f"{SWEEP} --cases heldout"],
    EIGHT_SWEEP: [
        "bench sweep RECORD --batch 1,4,16,64,128 --heads 16,32,64,128 --kv-len 1024,8192 "
        "--formats bf16:e4m3,bf16:fp8_656,e4m3 --rotation-mb 240"
    ],
    ANCHOR: [f"bench run RECORD --cases anchor {ANCHOR_PEERS} --parts 3 --power"],
    PLAIN: [f"bench run RECORD --cases anchor {PLAIN_PEERS},mla-lab-plain-tight --quick"],
    PLAIN_HELD_OUT: [f"bench run RECORD --cases heldout {PLAIN_PEERS} --rounds 5 --quick"],
    "h200_plain_eight_bits": [
        "bench run RECORD --peers mla-lab-plain,mla-lab-plain-tight --rounds 5 --quick "
        f"--batch 1,4,16,64,128 --heads 16,128 --kv-len 8192 {FORMATS}"
    ],
    "h200_plain_invariant": [
        f"{PLAIN_ALONE} --batch 64,128 --heads 16,64,128 --kv-len 1024,4096,8192 --batch-invariant",
        f"{PLAIN_ALONE} --cases anchor --only b128_q1_h(16|128)_kv4096_gauss --batch-invariant",
    ],
    PLAIN_TRACES: [
        f"bench run RECORD {TRACE_CASES} --requests 16,64,128 {PLAIN_PEERS} --rounds 5 --quick"
    ],
    UNIFORM: [f"{PLAIN_ALONE} {TRACE_CASES} --requests 16,64,128 --uniform"],
    PLANNED_TRACES: [
        f"bench run RECORD {TRACE_CASES} {TRACE_PEERS}",
        f"bench run RECORD {OWN} --batch 128 --heads 16,128 --kv-len LENGTHS",
    ],
    "h200_formats": [
        f"bench run RECORD {OWN} --batch 16,64,128 --heads 16,128 --kv-len 1024,8192 "
        "--page-size 16,32,64,128",
        f"bench run RECORD {OWN} --batch 16,64,128 --heads 16,128 --kv-len 1024,8192 "
        "--q-dtype bf16,fp16 --parts 3",
    ],
    "h200_plain_pages": [
        f"{PLAIN_ALONE} --batch 1,4,16,64 --heads 16,128 --kv-len 8192 --page-size 1,16,64 "
        f"{FORMATS}"
    ],
    "h200_sparse": [
        f"{SPARSE} --batch 1,4,16,64,128 --heads 16,64,128 --q-len 1,2 --top-k 2048",
        f"{SPARSE} --batch 4,16,64,128 --heads 32,64,128 --top-k 1024 --no-ceilings",
        f"{SPARSE} --batch 4,16,64,128 --heads 32,64,128 --top-k 512 --no-ceilings",
    ],
    "h200_sparse_bf16": [
        f"{SPARSE_BF16} --batch 1,4,16,64,128 --heads 16,32,64,128 --top-k 2048",
        f"{SPARSE_BF16} --batch 4,64 --heads 128 --q-len 2 --top-k 2048 --no-ceilings",
        f"{SPARSE_BF16} --batch 4,64 --heads 64,128 --top-k 512 --no-ceilings",
    ],
    "h200_sparse_power": [
        f"{SPARSE} --batch 64,128 --heads 64,128 --top-k 2048 --power --no-ceilings"
    ],
    "h200_invariant": [
        f"bench run RECORD {OWN} --batch 64,128 --heads 16,64,128 --kv-len 1024,4096,8192 "
        "--batch-invariant",
        f"bench run RECORD {OWN} --cases anchor --only gauss|b(1|16)_q1_h(16|128)_kv8192$ "
        "--batch-invariant",
    ],
    "h200_eight_bits": [
        f"bench run RECORD {OWN} --batch 1,4,64,128 --heads 16,128 --kv-len 8192 {FORMATS}",
        f"bench run RECORD {OWN} --cases twin",
        f"bench run RECORD {OWN} --batch 64 --q-len 1,2 --heads 16,128 --kv-len 8192 "
        f"--top-k 2048 {FORMATS}",
    ],
    "h200_cuda": [
        f"{CUDA} --heads 16,64,128",
        f"{CUDA} --heads 16,64,128 --q-dtype e4m3 --kv-format e4m3",
        f"{CUDA} --heads 16,128 --kv-format e4m3",
    ],
    "pairwise": ["verify pairwise RECORD"],
    "h200_published": ["verify published RECORD"],
    "h200_features": ["verify costs RECORD"],
    "soak": ["verify soak RECORD"],
    "h200_card_bits": ["verify card-bits RECORD"],
    "h200_rank_kernels": ["bench rank-kernels RECORD"],
    "ladder": ["ladder --record RECORD --rounds 9"],
}
#: records of sparse calls
SPARSE_RECORDS = ("h200_sparse", "h200_sparse_bf16", "h200_sparse_power")
#: records of the samples
TRACED = (PLAIN_TRACES, UNIFORM, PLANNED_TRACES)
#: record -> module that makes it, given where
MODULES = {
    "h200_eight_bit_errors": "verify.rounding",
    "sanitizer": "verify.sanitizer",
    "h200_gqa": "studies.gqa_decode",
    "h200_rounding": "studies.xqa_rounding",
    ANATOMY: "studies.call_anatomy",
}
TRACES = ("azure_llm_2023_conv.csv", "mooncake_conversation.jsonl")
#: a short run: a few cases of each regime, few rounds, our calls alone; of traces one seed
SHORT = r"--rounds 3 --peers mla-lab --quick --only ^b(1|16|128)_q1_h(16|128)_kv(1024|8192)"
SHORT_HELD_OUT = "--rounds 3 --peers mla-lab-plain --only ^b[1-4]_"
SHORT_SWEEP = r"--rounds 3 --per-tile 2 --only ^b(1|16|128)_q1_h(16|128)_kv(1024|8192)$"
SHORT_TRACES = "--seeds 0"
SHORT_SPARSE = "--rounds 3 --peers mla-lab-plain --batch 64 --q-len 1"
SHORT_ANATOMY = "b1_q1_h128_kv8192"


class StepFailed(MlaLabError, RuntimeError):
    """A step ended with an error of its own, which stands above."""


@dataclass(frozen=True)
class LiveOptions:
    """Options of a run: folder to refresh, short or whole run, checkout whose pages are filled, and
    folder of serving traces.
    """

    into: Path
    short: bool = False
    checkout: Path | None = None
    traces: Path | None = None

    def python(self, *arguments: str) -> None:
        """Run this interpreter on `arguments`, with its data in `into`.

        Raises StepFailed where it does not end well.
        """
        env = {**os.environ, "MLA_LAB_DATA": str(self.into)}
        code = subprocess.run([sys.executable, *arguments], env=env).returncode
        if code:
            raise StepFailed(f"live: {' '.join(arguments)} ended with code {code}")

    def record(self, name: str) -> Path:
        """Where a record lies."""
        return self.into / "records" / f"{name}.jsonl"


@dataclass(frozen=True)
class Step:
    """One step: what it refreshes, whether it needs a card, and the records that it makes."""

    name: str
    what: str
    card: bool
    run: Callable[[LiveOptions], None]
    records: tuple[str, ...] = ()
    #: how many commands it runs, to which its time is taken to be proportional
    commands: int = 1


def _made(options: LiveOptions, name: str) -> None:
    """Make a record in a temporary file, which replaces the old one when it is complete."""
    if name in TRACED and options.traces is None:
        print(f"no --traces FOLDER with {' and '.join(TRACES)}: the rows stay as they were")
        return
    new = options.record(name).with_suffix(".jsonl.new")
    new.unlink(missing_ok=True)
    if name in MODULES:
        only = ("--only", SHORT_ANATOMY) if options.short and name == ANATOMY else ()
        options.python("-m", f"mla_lab.{MODULES[name]}", str(new), *only)
    else:
        for line in COMMANDS[name]:
            words = [_filled(word, options, new) for word in line.split()]
            options.python("-m", "mla_lab", *words, *_shorter(options, name, line))
    if name == ANATOMY:
        _keep_others(new, options.record(name))
    else:
        new.replace(options.record(name))


def _filled(word: str, options: LiveOptions, new: Path) -> str:
    """A word of a command, with what its placeholder stands for."""
    if word == "RECORD":
        return str(new)
    if word == "TRACES" and options.traces:
        return ",".join(str(options.traces / name) for name in TRACES)
    if word == "LENGTHS":
        return ",".join(map(str, sorted(set(_mean_lengths(new)))))
    return word


def _shorter(options: LiveOptions, name: str, line: str) -> list[str]:
    if not options.short:
        return []
    if name in TRACED:
        return SHORT_TRACES.split() if "--cases trace" in line else []
    own = {PLAIN_HELD_OUT: SHORT_HELD_OUT, **dict.fromkeys(SPARSE_RECORDS, SHORT_SPARSE)}
    if name in own:
        return own[name].split()
    kinds = {"bench run": SHORT, "bench sweep": SHORT_SWEEP, "verify pairwise": "--first 3"}
    kinds |= {"verify soak": "--seconds 9", "bench rank-kernels": "--batch 16 --rounds 3"}
    kinds |= {"verify published": "--batch 2", "verify costs": "--features sinks"}
    return next((more for verb, more in kinds.items() if line.startswith(verb)), "").split()


def _keep_others(new: Path, old: Path) -> None:
    """New rows replace old rows of the same key; rows of peers that are not installed stay."""
    if not new.exists():
        print("no stamped builds, and no compiler to make them: the rows stay as they were")
        return
    lines = [*(old.read_text().splitlines() if old.exists() else ()), *new.read_text().splitlines()]
    rows = {_taken(json.loads(line)): line for line in lines}
    old.write_text("".join(line + "\n" for line in rows.values()))
    new.unlink()


def _taken(row: dict[str, Any]) -> tuple[Any, ...]:
    """What a row of the anatomy is of."""
    return tuple(row.get(name) for name in ("case", "peer", "kind", "lanes"))


def _mean_lengths(record: Path) -> Iterator[int]:
    """The mean length of each sample, rounded."""
    from ...bench.records import problem_of, read, results

    for row in results(read(record), "ok"):
        lengths = problem_of(row).kv_lens
        yield round(sum(lengths) / len(lengths))


def _costs(options: LiveOptions) -> None:
    """The cost model's constants: 16 bits from two sweeps, eight bits from their own."""
    fitted = [str(options.record(name)) for name in SWEEPS if options.record(name).exists()]
    judged = ["--judge", str(options.record(HELD_OUT))] if not options.short else []
    options.python("-m", "mla_lab", "bench", "fit", *fitted, *judged)
    options.python("-m", "mla_lab", "bench", "fit", str(options.record(EIGHT_SWEEP)))


def _host(options: LiveOptions) -> None:
    options.python("-m", "mla_lab.studies.host_cost", str(options.record(HOST)))


def _simulator(options: LiveOptions) -> None:
    options.python("-m", "mla_lab.simulate.fit", str(options.record(ANCHOR)))


def _notebooks(options: LiveOptions) -> None:
    jobs = "6" if options.short else "1"
    keep = str(options.into / "executed")
    options.python("-m", "mla_lab.lab.run_all", "--keep", keep, "--jobs", jobs)


def _pages(options: LiveOptions) -> None:
    if options.checkout is None:
        print("no README beside this package: nothing to fill")
        return
    options.python("-m", "mla_lab.lab.documents", str(options.checkout))


def _measuring(name: str, what: str, *records: str) -> Step:
    """A step that makes records, one after the other."""

    def run(options: LiveOptions) -> None:
        for record in records:
            _made(options, record)

    count = sum(len(COMMANDS.get(record, "1")) for record in records)
    return Step(name, what, True, run, records, count)


#: in the order in which they depend on each other
STEPS = (
    _measuring("sweep", "our own variants of each case", *SWEEPS, HELD_OUT, EIGHT_SWEEP),
    Step("costs", "the cost model by which a call chooses its kernel", False, _costs, commands=2),
    _measuring(
        "plain",
        "the plain call beside the peers that are installed",
        PLAIN,
        PLAIN_HELD_OUT,
        "h200_plain_eight_bits",
        "h200_plain_invariant",
    ),
    _measuring("plain-traces", "samples of serving traces", PLAIN_TRACES),
    _measuring("plain-uniform", "those samples beside uniform batches", UNIFORM),
    _measuring("record", "calls with a host plan beside the same peers", ANCHOR),
    _measuring("traces", "the same with a host plan", PLANNED_TRACES),
    _measuring(
        "formats",
        "formats, page sizes, batch invariance, eight-bit caches",
        "h200_formats",
        "h200_plain_pages",
        "h200_invariant",
        "h200_eight_bits",
    ),
    _measuring(
        "sparse",
        "sparse calls over 656-byte and bf16 tokens beside FlashMLA, and their power",
        *SPARSE_RECORDS,
    ),
    _measuring(
        "verify",
        "every pair of features, published shapes, errors, costs, sanitizer, a soak, a card's bits",
        "pairwise",
        "h200_published",
        "h200_eight_bit_errors",
        "h200_features",
        "sanitizer",
        "soak",
        "h200_card_bits",
    ),
    _measuring("cuda", "the CUDA backend, MLA and GQA", "h200_cuda", "h200_gqa", "h200_rounding"),
    _measuring(
        "rank-kernels",
        "the merge of ranks and a rank's mask, beside PyTorch's",
        "h200_rank_kernels",
    ),
    _measuring("ladder", "the ladder's steps", "ladder"),
    _measuring("anatomy", "where the time of a call goes, by stamped builds", ANATOMY),
    Step("host", "host time of a call", True, _host, (HOST,)),
    Step("simulator", "the simulator's constants and its error table", False, _simulator),
    Step("notebooks", "every notebook, executed live", True, _notebooks),
    Step("pages", "tables and pictures of README and data/notes/", False, _pages),
)
