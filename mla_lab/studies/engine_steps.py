"""Decode steps of a DeepSeek-V3-shaped model's attention layers, eager and as one CUDA graph.

    python -m mla_lab.studies.engine_steps OUT.jsonl --backend MLA_LAB,TRITON_MLA,STEP

A step is one metadata build and, for each of 61 layers, a token written into its cache and the
layer: absorption, decode, value projection. MLA_LAB and TRITON_MLA are backends of vLLM below its
`MLAAttention.forward_impl`; SGLANG_MLA_LAB and SGLANG_TRITON are SGLang's (`sglang_layers`); STEP
is `engines.step` alone. A row says whether the step synchronised (ours must not), what it
allocated, host and device time a layer, and the error of one layer against float64. Where vLLM's
compiled operators are missing, its platform is the unspecified one; the cache is written by torch
in any case.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..bench.environment import environment
from ..core import kv_cache as formats
from ..reference.tolerance import rel_error
from .engine_layers import Shape, StepLayers, VllmLayers

#: greatest error of a layer's values, relative, against float64 over the same bf16 operands
LIMIT = 1e-2
ROUNDS, WARMUPS = 11, 3


class Loop:
    """All layers of a step with their caches, and the tensors that a captured step keeps."""

    def __init__(self, backend: str, shape: Shape, device: torch.device) -> None:
        self.shape, self.device = shape, device
        self.layers: Any = _layers(backend)(backend, shape, device)
        draw = torch.Generator(device=device).manual_seed(0)
        pages = shape.batch * shape.pages
        order = torch.randperm(pages, generator=draw, device=device).int()
        self.block_table = order.view(shape.batch, shape.pages)
        self.lens = torch.zeros(shape.batch, dtype=torch.int32, device=device)
        self.slots = torch.zeros(shape.batch, dtype=torch.int64, device=device)
        normal: dict[str, Any] = {"generator": draw, "device": device, "dtype": torch.bfloat16}
        size = (pages, shape.page_size, 576)
        self.caches = [torch.randn(size, **normal) for _ in range(shape.layers)]
        self.query = torch.randn(shape.batch, shape.heads, 192, **normal)
        self.token = torch.randn(shape.batch, 576, **normal)
        self.outs: list[Tensor] = []
        self.set_lens(shape.kv_len)

    def set_lens(self, kv_len: int) -> None:
        """Tokens of the requests, from this one down; the last of each is written by the step."""
        down = torch.arange(self.shape.batch, dtype=torch.int32, device=self.device)
        self.lens.copy_((kv_len - 3 * down).clamp_min(1))
        last, size = self.lens - 1, self.shape.page_size
        page, place = last // size, last % size
        pages = self.block_table.gather(1, page.long().unsqueeze(1)).squeeze(1)
        self.slots.copy_(pages.long() * size + place)

    def build(self, capture: bool = False) -> Any:
        """The metadata of a step."""
        return self.layers.build(self.lens, self.block_table, self.slots, capture)

    def step(self, metadata: Any) -> list[Tensor]:
        """Values of all layers, [batch, heads x 128] each."""
        outs = []
        latent, rope = self.token.split((512, 64), -1)
        for layer, cache in zip(self.layers.layers, self.caches, strict=True):
            cache.view(-1, 576).index_copy_(0, self.slots, self.token)
            out = torch.empty(
                self.shape.batch, self.shape.heads * 128, dtype=torch.bfloat16, device=self.device
            )
            layer.forward_impl(self.query, latent, rope, cache, metadata, out)
            outs.append(out)
        return outs

    def error(self, outs: list[Tensor], index: int = 0) -> float:
        """Of one layer's values, against float64."""
        layer, cache = self.layers.layers[index], self.caches[index]
        key, value = layer.W_UK_T.double(), layer.W_UV.double()
        expected = []
        for query, row, kv_len in zip(
            self.query.double(), self.block_table, self.lens.tolist(), strict=True
        ):
            tokens = formats.gather(cache, row, kv_len).double()
            latent = torch.einsum("hp,hpl->hl", query[:, :128], key)
            scores = torch.cat([latent, query[:, 128:]], -1) @ tokens.T * self.shape.scale
            mixed = scores.softmax(-1) @ tokens[:, :512]
            expected.append(torch.einsum("hl,hlv->hv", mixed, value).flatten())
        return rel_error(outs[index].double(), torch.stack(expected))


def _layers(backend: str) -> Any:
    if backend == "STEP":
        return StepLayers
    if backend.startswith("SGLANG_"):
        from .sglang_layers import SglangLayers

        return SglangLayers
    return VllmLayers


def measure(
    backend: str, shape: Shape, device: torch.device
) -> tuple[dict[str, Any], list[Tensor]]:
    """The row of a backend, and the layers' values of its last step."""
    loop = Loop(backend, shape, device)
    for _ in range(WARMUPS):
        loop.step(loop.build())
    row: dict[str, Any] = {"kind": "engine_step", "backend": backend, **vars(shape)}
    row |= _eager(loop)
    outs = loop.step(loop.build())
    row["error"] = round(loop.error(outs), 6)
    if device.type == "cuda":
        row |= _graph(loop)
    row["ok"] = row["error"] < LIMIT and row.get("graph_same_bits", True)
    if backend == "STEP" or backend.endswith("MLA_LAB"):
        row["ok"] = row["ok"] and not row["synchronised"]
    row["environment"] = environment(device)
    engine = "sglang" if backend.startswith("SGLANG_") else "vllm"
    if backend != "STEP":
        row[engine] = importlib.import_module(f"{engine}.version").__version__
    return row, loop.step(loop.build())


def _eager(loop: Loop) -> dict[str, Any]:
    """Steps enqueued without waiting, after one in which synchronisation is an error; allocations
    are counted.
    """
    builds, hosts, devices = [], [], []
    synchronised = _synchronises(loop)
    before = _allocations(loop.device)
    with contextlib.nullcontext() if synchronised else _without_sync(loop.device):
        for _ in range(ROUNDS):
            _wait(loop.device)
            begin = time.perf_counter()
            metadata = loop.build()
            builds.append(1e6 * (time.perf_counter() - begin))
            host_us, device_us = _timed(loop, partial(loop.step, metadata))
            hosts.append(host_us / loop.shape.layers)
            devices.append(device_us / loop.shape.layers)
    row = {
        "build_us": round(statistics.median(builds), 1),
        "host_us_a_layer": round(statistics.median(hosts), 2),
        "eager_us_a_layer": round(statistics.median(devices), 2),
        "synchronised": synchronised,
        "rounds": ROUNDS,
    }
    for name, value in _allocations(loop.device).items():
        row[name] = value - before[name]
    return row


def _graph(loop: Loop) -> dict[str, Any]:
    """The step as one graph, captured at other lengths than it is replayed with."""
    loop.set_lens(loop.shape.kv_len // 2)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        kept = loop.step(loop.build(capture=True))
    loop.set_lens(loop.shape.kv_len)
    eager = loop.step(loop.build())
    before, times, hosts = _allocations(loop.device), [], []
    for _ in range(ROUNDS):
        torch.cuda.synchronize()
        with _without_sync(loop.device):
            host_us, device_us = _timed(loop, graph.replay)
        hosts.append(host_us)
        times.append(device_us / loop.shape.layers)
    row = {
        f"graph_{name}": value - before[name] for name, value in _allocations(loop.device).items()
    }
    return row | {
        "graph_us_a_layer": round(statistics.median(times), 2),
        "graph_host_us": round(statistics.median(hosts), 1),
        "graph_same_bits": all(map(torch.equal, kept, eager)),
    }


def _timed(loop: Loop, work: Callable[[], object]) -> tuple[float, float]:
    """Microseconds of the host until `work` is enqueued, and of the device."""
    start, end = _event(loop.device), _event(loop.device)
    begin = time.perf_counter()
    start.record()
    work()
    end.record()
    host_us = 1e6 * (time.perf_counter() - begin)
    end.synchronize()
    return host_us, 1e3 * start.elapsed_time(end)


def _synchronises(loop: Loop) -> bool:
    """Whether torch waits for the device in a step."""
    try:
        with _without_sync(loop.device):
            loop.step(loop.build())
    except RuntimeError as error:
        if "synchronizing CUDA operation" not in str(error):
            raise
        return True
    return False


@contextlib.contextmanager
def _without_sync(device: torch.device) -> Iterator[None]:
    """Where torch would wait for the device, it raises."""
    if device.type != "cuda":
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


class _HostEvent:
    """An event of a device that runs while the host waits."""

    def record(self) -> None:
        """Now."""
        self.at = time.perf_counter()

    def synchronize(self) -> None:
        """Nothing runs."""

    def elapsed_time(self, other: _HostEvent) -> float:
        """Milliseconds from this event to the other."""
        return 1e3 * (other.at - self.at)


def _event(device: torch.device) -> Any:
    return torch.cuda.Event(enable_timing=True) if device.type == "cuda" else _HostEvent()


def _allocations(device: torch.device) -> dict[str, int]:
    """So far: calls of the driver's allocator, bytes it gave, and requests that torch's cache of
    them answered.
    """
    if device.type != "cuda":
        return {}
    found = torch.cuda.memory_stats(device)
    return {
        "device_allocations": found["num_device_alloc"],
        "reserved_bytes": found["reserved_bytes.all.allocated"],
        "cache_requests": found["allocation.all.allocated"],
    }


def main(argv: list[str] | None = None) -> int:
    """Measure each backend; exit code 1 where one is not right."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path, help="JSON lines, appended to")
    parser.add_argument("--backend", default="MLA_LAB,TRITON_MLA,STEP", help="by comma")
    parser.add_argument("--device", default="cuda")
    for name, size in vars(Shape()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=size)
    args = parser.parse_args(argv)
    shape = Shape(**{name: getattr(args, name) for name in vars(Shape())})
    first, good = None, True
    for backend in args.backend.split(","):
        row, outs = measure(backend, shape, torch.device(args.device))
        if first is None:
            first = (backend, outs)
        pairs = zip(outs, first[1], strict=True)
        row |= {
            "beside": first[0],
            "difference": max(rel_error(a.double(), b.double()) for a, b in pairs),
        }
        good = good and row["ok"] and row["difference"] < LIMIT
        with args.out.open("a") as file:
            file.write(json.dumps(row) + "\n")
        shown = {name: value for name, value in row.items() if name != "environment"}
        print(json.dumps(shown), flush=True)
    return int(not good)


if __name__ == "__main__":
    sys.exit(main())
