"""Levels of processors, and which host code runs on which."""

from __future__ import annotations

import pytest

from mla_lab.jit import host_cpu, toolchain

V2 = frozenset(host_cpu.LEVELS["x86-64-v2"])
V3 = V2 | set(host_cpu.LEVELS["x86-64-v3"])
V4 = V3 | set(host_cpu.LEVELS["x86-64-v4"])


@pytest.mark.parametrize(
    ("flags", "level"),
    [
        (frozenset({"sse2"}), "x86-64"),
        (V2 | {"avx"}, "x86-64-v2"),
        (V3, "x86-64-v3"),
        (V4 - {"avx512vl"}, "x86-64-v3"),
        (V4 | {"amx_tile"}, "x86-64-v4"),
        (V4 - {"sse4_2"}, "x86-64"),
    ],
)
def test_a_level_has_its_features_and_those_of_all_below(flags: frozenset[str], level: str) -> None:
    assert host_cpu.level_of(flags) == level


@pytest.mark.parametrize("here", ["x86-64", "x86-64-v2", "x86-64-v3", "x86-64-v4", "aarch64"])
def test_code_runs_on_its_level_and_above(here: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_cpu, "host_cpu", lambda: here)
    levels = ["x86-64", *host_cpu.LEVELS]
    runs = [level for level in [*levels, "aarch64"] if host_cpu.runs_here(level)]
    assert runs == (["aarch64"] if here == "aarch64" else levels[: levels.index(here) + 1])


@pytest.mark.compiler
def test_the_level_is_part_of_a_cute_toolchain() -> None:
    assert toolchain.cute_versions()["cpu"] == host_cpu.host_cpu()
