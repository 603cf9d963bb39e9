"""Recorded calls of compiled kernels: every family, format and feature, with checks on."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch

from mla_lab.cli import main
from mla_lab.core.errors import InvalidInput, Unsupported
from mla_lab.emulate import Options, mutate
from mla_lab.emulate.calls import is_right
from mla_lab.emulate.kernel import EmulatedKernel
from mla_lab.emulate.recorded import load, recordings, shipped
from mla_lab.reference.mla import decode_reference
from mla_lab.reference.tolerance import error

BUILDS = recordings()
PLAIN = "cute_swap_ab_sm90_tile_rows-16_mask-causal_fused_merge3_grid1_shaped1"
FAMILIES = ("swap_ab", "keep_ab")
#: bytes of all recordings together
MOST_BYTES = 1 << 20


@cache
def result(build: str, options: Options) -> tuple[torch.Tensor, torch.Tensor]:
    """out and lse of a recorded call, which are right; several tests look at the plain one."""
    recording = load(build)
    call, kernel = recording.call(), recording.kernel(options)
    kernel(*call.args)
    assert is_right(call), call.errors()
    assert kernel.run.findings == []
    return call.out, call.lse


def test_recordings_stand_for_all_families_formats_and_features() -> None:
    configs = [load(build).config for build in BUILDS]
    formats = [("bf16", "bf16"), ("fp16", "fp16"), ("e4m3", "e4m3")]
    formats += [("bf16", "e4m3"), ("bf16", "fp8_656")]
    families = {(c.kernel, (c.q_dtype, c.kv_format)) for c in configs}
    assert families == {(f"cute/{family}_sm90", f) for family in FAMILIES for f in formats}
    options = {name for c in configs for name, value in c.options if value}
    assert {"gather", "skip", "pair", "grid", "fused_merge"} <= options
    assert {"none", "causal", "tree"} == {c.mask for c in configs}
    assert shipped().stat().st_size < MOST_BYTES


@pytest.mark.parametrize("build", BUILDS)
def test_build_is_right_and_nothing_is_found(build: str) -> None:
    result(build, Options(check=True))


def reads_scale(build: str) -> bool:
    config = load(build).config
    if config.kernel == "cute/keep_ab_sm90":
        return config.option("scales") == 1
    return config.mask == "tree" or any(map(config.option, ("features", "skip")))


SCALED = [build for build in BUILDS if reads_scale(build)]


def test_builds_of_every_way_to_take_a_scale_are_recorded() -> None:
    """keep_ab changes the query's sign; swap_ab that of scores, in 16 and in eight bits."""
    configs = [load(build).config for build in SCALED]
    kinds = {(c.kernel, c.kv_format, c.option("gather") > 0) for c in configs}
    swap_ab = {
        ("cute/swap_ab_sm90", *f) for f in (("bf16", False), ("bf16", True), ("e4m3", False))
    }
    assert kinds == {("cute/keep_ab_sm90", "bf16", False), *swap_ab}


@pytest.mark.parametrize("scale", [-0.07, -0.0, float("nan")])
@pytest.mark.parametrize("build", SCALED)
def test_a_scale_in_memory_may_have_any_value(build: str, scale: float) -> None:
    """Masked tokens, and requests without any, count for nothing under a scale that turns -inf to
    inf, and under 0, which makes it NaN; NaN stays NaN.
    """
    recording = load(build)
    call, kernel = recording.call(scale), recording.kernel(Options(check=True))
    kernel(*call.args)
    assert kernel.run.findings == []
    if scale == scale:
        assert is_right(call), call.errors()
    else:
        assert call.out.isnan().all()


def test_builds_with_skip_softmax_leave_tiles_out() -> None:
    """Their calls are judged by the definition's tiles, which are not all."""
    found = [load(build) for build in BUILDS if "skip" in build]
    assert {r.config.tile_rows for r in found} == {16, 64}
    for recording in found:
        call = recording.call()
        every = decode_reference(replace(call.inputs, skip_softmax_threshold_scale_factor=None))
        assert error(call.expected.out, every.out).relative > 0.1


@pytest.mark.parametrize("schedule", ["greedy", "random", "late", "adverse"])
def test_results_do_not_depend_on_the_schedule(schedule: str) -> None:
    plain = result(PLAIN, Options(numbers="exact"))
    for seed in (0, 1):
        other = result(PLAIN, Options(numbers="exact", schedule=schedule, seed=seed))
        assert all(torch.equal(a, b) for a, b in zip(plain, other, strict=True))


@pytest.mark.parametrize("numbers", ["fast", "exact", "card"])
def test_numbers(numbers: str) -> None:
    out, _ = result(PLAIN, Options(numbers=numbers))
    exact, _ = result(PLAIN, Options(numbers="exact"))
    assert torch.allclose(out, exact, atol=8e-3, rtol=8e-3)


def test_deleting_a_synchronising_instruction_is_noticed() -> None:
    recording = load(PLAIN)
    kernel, call = recording.kernel(), recording.call()
    last = {m.kind: m for m in mutate.mutants(kernel, call)}
    wanted = {"mbarrier wait", "named barrier", "wgmma wait", "wgmma commit", "wgmma fence"}
    wanted |= {"proxy fence", "fence", "mbarrier expect_tx"}
    done = list(mutate.prove(kernel, [call], [last[kind] for kind in sorted(wanted)]))
    assert {m.kind for m in done if m.noticed} == wanted


def test_a_recording_takes_its_own_call_alone() -> None:
    recording = load(PLAIN)
    args = list(recording.call().args)
    args[0] = args[0][:1]
    with pytest.raises(Unsupported, match="another call"):
        recording.kernel()(*args)
    with pytest.raises(InvalidInput, match="recording"):
        load("nothing")


def test_debugger_stops_at_lines_and_shows_barriers_and_tiles() -> None:
    recording = load(PLAIN)
    call = recording.call()
    kernel: EmulatedKernel = recording.kernel()
    debugger = kernel.debug(*call.args)
    first = debugger.step()
    assert first is not None and first.first == 0
    (program,) = kernel.programs.values()
    products = (s for s in program.kernel.code if s.opcode.startswith("wgmma.mma_async"))
    stopped = debugger.run_to_line("swap_ab_sm90/mma.py", next(products).place.line)
    assert stopped is not None
    assert any(p.file.endswith("mma.py") for p, _, _ in debugger.place(stopped))
    full = [b for b in debugger.barriers() if b["phase"] > 0]
    assert full and all(b["pending"] <= b["expected"] for b in debugger.barriers())
    # K tile 0 is in the ring: rows of 64 bf16 columns, 128-byte swizzle
    keys = call.inputs.kv_cache[int(call.inputs.block_tables[0, 0])].float()
    tiles = [debugger.tile(at, (64, 64)) for at in range(0, 150 * 1024, 1024)]
    assert any(torch.equal(torch.from_numpy(tile), keys[:, :64]) for tile in tiles)
    while not debugger.ended:
        assert debugger.go() is None
    with pytest.raises(InvalidInput, match="register"):
        debugger.register(stopped, "%none")


def test_command_runs_recorded_calls(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "trace.json"
    assert main(["emulate", PLAIN, "--recorded", "--check", "--trace", str(trace)]) == 0
    words = capsys.readouterr().out
    assert "right: out differs by" in words and "checks: nothing found" in words
    events = json.loads(trace.read_text())["traceEvents"]
    assert {e["cat"] for e in events if e["ph"] == "X"} >= {"run", "wait", "copy", "product"}
    assert main(["emulate", "nothing", "--recorded"]) == 2
