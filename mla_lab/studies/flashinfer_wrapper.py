"""FlashInfer's tests of its paged MLA wrapper on ours, on a CPU or a GPU.

    python -m mla_lab.studies.flashinfer_wrapper CHECKOUT OUT.jsonl --draw 16 --device cpu

CHECKOUT is a FlashInfer repository. `tests/attention/test_deepseek_mla.py` runs as it stands, with
`flashinfer.mla` being `mla_lab.flashinfer_names`, except that

* "cuda" in device names is the device that was chosen, and capability checks find Hopper;
* the wrapper copies caches of two buffers (`copies_caches`), since the tests make two;
* of each test a seeded sample runs, without those whose reference takes more than a gigabyte.

A row a test goes to OUT: how many parametrisations there are, ran, passed, failed and why.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from datetime import date
from functools import partialmethod
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

import mla_lab.interop.flashinfer as names
from mla_lab.core.revision import Revision

TESTS = "tests/attention/test_deepseek_mla.py"
SEED = 7
MOST_BYTES = 1 << 30


def install(device: str) -> None:
    """Modules that the tests import: ours under FlashInfer's names, and stand-ins of its JIT."""

    class Wrapper(names.BatchMLAPagedAttentionWrapper):
        __init__ = partialmethod(names.BatchMLAPagedAttentionWrapper.__init__, copies_caches=True)

    parts: dict[str, dict[str, Any]] = {
        "flashinfer": {},
        "flashinfer.mla": {"BatchMLAPagedAttentionWrapper": Wrapper},
        "flashinfer.jit": {"build_jit_specs": None},
        "flashinfer.jit.attention": {
            "gen_batch_mla_module": None,
            "gen_batch_prefill_module": None,
            "gen_single_prefill_module": None,
        },
        "flashinfer.utils": {
            "has_flashinfer_jit_cache": lambda: True,
            "is_sm90a_supported": lambda device: True,
            "is_sm100a_supported": lambda device: False,
            "is_sm110a_supported": lambda device: False,
        },
        "tests": {},
        "tests.test_helpers": {},
        "tests.test_helpers.test_helpers": {"clear_cuda_cache": lambda device: None},
    }
    for name, values in parts.items():
        module = sys.modules[name] = ModuleType(name)
        module.__dict__.update(values)
        if "." in name:
            package, last = name.rsplit(".", 1)
            setattr(sys.modules[package], last, module)
    if device == "cpu":
        torch.cuda.synchronize = lambda *_: None


def reference_bytes(named: dict[str, Any]) -> int:
    """What the test's reference takes: keys and values of every head in fp32."""
    lens = [v for k, v in named.items() if k.startswith("kv_len")] or [1]
    tokens = named.get("batch_size", 1) * max(*lens, 1)
    rows = named.get("batch_size", 1) * named.get("qo_len", 1)
    scores = rows * max(*lens, 1)
    return 4 * named.get("num_heads", 16) * (2 * tokens * 576 + 2 * scores)


class Draw:
    """pytest's plugin: keeps a sample of each test, and counts outcomes."""

    def __init__(self, count: int) -> None:
        """A sample of `count` parametrisations of each test."""
        self.count = count
        self.there: Counter[str] = Counter()
        self.large: Counter[str] = Counter()
        self.outcomes: dict[str, Counter[str]] = defaultdict(Counter)
        self.reasons: dict[str, Counter[str]] = defaultdict(Counter)

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        """Keep those of the wrapper that fit into memory, and of those a sample."""
        by_test: dict[str, list[Any]] = defaultdict(list)
        for item in items:
            name = item.name.split("[")[0]
            if "prefill" in name or "cutlass" in name:
                continue  # other wrappers of the same file
            self.there[name] += 1
            params = item.callspec.params if hasattr(item, "callspec") else {}
            if reference_bytes(params) > MOST_BYTES:
                self.large[name] += 1
            else:
                by_test[name].append(item)
        drawn = random.Random(SEED)
        items[:] = [
            item
            for found in by_test.values()
            for item in drawn.sample(found, min(self.count, len(found)))
        ]

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Count the outcome of a call, or of a set-up that failed or skipped."""
        if report.when != "call" and report.passed:
            return
        name = report.nodeid.split("::")[-1].split("[")[0]
        self.outcomes[name][report.outcome] += 1
        if report.outcome == "failed":
            text = str(getattr(report.longrepr, "reprcrash", report.longrepr))
            self.reasons[name][text.splitlines()[0].split(": ", 1)[-1][:120]] += 1
        elif report.outcome == "skipped":
            self.reasons[name][str(report.longrepr[-1])[:120]] += 1


def main(argv: list[str] | None = None) -> int:
    """Run the sample, write the rows, print one line a test."""
    import pytest

    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("checkout", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--draw", type=int, default=16, metavar="COUNT")
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args(argv)
    install(args.device)
    plugin = Draw(args.draw)
    git = ["git", "-C", str(args.checkout)]
    source = subprocess.run(
        [*git, "show", f"HEAD:{TESTS}"], capture_output=True, text=True, check=True
    ).stdout
    commit = subprocess.run(
        [*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True
    ).stdout.strip()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "test_deepseek_mla.py"
        text = source.replace('"cuda:0"', f'"{args.device}"').replace('"cuda"', f'"{args.device}"')
        path.write_text(text)
        pytest.main([str(path), "-q", "-p", "no:cacheprovider", f"--rootdir={folder}"], [plugin])
    revision = Revision.here()
    card = torch.cuda.get_device_name() if args.device.startswith("cuda") else "CPU"
    head = {
        "kind": "run",
        "flashinfer_commit": commit,
        "mla_lab_commit": revision.commit,
        "dirty": revision.dirty,
        "card": card,
        "torch": torch.__version__,
        "date": str(date.today()),
        "seed": SEED,
        "draw": args.draw,
    }
    rows: list[dict[str, Any]] = [head]
    for name, there in plugin.there.items():
        outcomes = dict(plugin.outcomes[name])
        row = {"kind": "test", "test": name, "there": there, "too_large": plugin.large[name]}
        rows.append({**row, **outcomes, "reasons": dict(plugin.reasons[name])})
        print(f"{name:56s} {there:6d} there  {outcomes}")
    args.out.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return int(any(row.get("failed") for row in rows[1:]))


if __name__ == "__main__":
    sys.exit(main())
