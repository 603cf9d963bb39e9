"""Facts of compiled kernels, recorded or seen now; what fits a CTA; the explorers over both."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from mla_lab.core.errors import BuildError, InvalidInput
from mla_lab.core.gpu import H200
from mla_lab.jit.shipped import select
from mla_lab.lab import xray_facts
from mla_lab.lab.explorers import budget as budget_explorer
from mla_lab.lab.explorers import xray as xray_explorer
from mla_lab.lab.explorers.budget import Budget


@pytest.fixture(autouse=True)
def forget() -> Iterator[None]:
    """Facts are remembered for a notebook's sake; a test begins and ends without."""
    for remembered in (xray_facts.facts, xray_facts._record):
        remembered.cache_clear()
    yield
    for remembered in (xray_facts.facts, xray_facts._record):
        remembered.cache_clear()


@pytest.fixture
def only_records(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(xray_facts, "find", lambda config, arch: None)


@pytest.mark.usefixtures("only_records")
@pytest.mark.parametrize("kernel", xray_facts.KERNELS)
def test_each_kernel_has_recorded_facts_without_spills(kernel: str) -> None:
    found = xray_facts.facts(kernel)
    assert found.source.kind == "recorded"
    assert (found.spills, found.stack) == (0, 0)
    assert found.dynamic_shared <= H200.smem_per_block
    assert sum(found.classes.values()) == sum(found.opcodes.values())


@pytest.mark.usefixtures("only_records")
def test_decode_kernels_use_the_matrix_unit_and_bulk_copies() -> None:
    for kernel in ("swap_ab, 16 rows", "keep_ab, 128 rows, cluster 2"):
        found = xray_facts.facts(kernel)
        assert found.count("HGMMA") > 0
        assert found.count("UTMALDG") > 0


@pytest.mark.usefixtures("only_records")
def test_the_record_is_of_these_sources_and_of_builds_that_ship() -> None:
    """Otherwise: python -m mla_lab.lab.xray_facts."""
    labels = {kernel: xray_facts.facts(kernel).source.label for kernel in xray_facts.KERNELS}
    assert [kernel for kernel, label in labels.items() if "earlier sources" in label] == []
    assert set(xray_facts.KERNELS.values()) <= set(select(None, [], "sm_90a"))


@pytest.mark.usefixtures("only_records")
def test_older_sources_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(xray_facts, "source_hash", lambda kernel: "another")
    assert "earlier sources" in xray_facts.facts("planner").source.label


@pytest.mark.usefixtures("only_records")
def test_neither_compiled_nor_recorded_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(xray_facts, "data_dir", lambda: tmp_path)
    with pytest.raises(BuildError, match="neither compiled here nor recorded"):
        xray_facts.facts("empty")
    with pytest.raises(InvalidInput, match="kernel"):
        xray_facts.facts("no such kernel")


def test_a_kernel_that_does_not_compile_keeps_its_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(config: object, arch: str) -> None:
        raise BuildError("no compiler here")

    (tmp_path / "runtime").mkdir()
    (tmp_path / xray_facts.RECORD).write_text(json.dumps({"empty": {"date": "2026-01-01"}}))
    monkeypatch.setattr(xray_facts, "data_dir", lambda: tmp_path)
    monkeypatch.setattr(xray_facts, "compile", refuse)
    xray_facts.record()
    kept = json.loads((tmp_path / xray_facts.RECORD).read_text())
    assert kept == {"empty": {"date": "2026-01-01"}}


@pytest.mark.usefixtures("only_records")
def test_the_explorer_shows_both_kernels_and_their_origin() -> None:
    explorer = xray_explorer.XrayExplorer(left="empty", right="planner")
    assert [trace.name for trace in explorer.figure(explorer.state).data] == ["empty", "planner"]
    assert explorer.footer.value.count("recorded") == 2
    table = xray_explorer.opcode_table("keep_ab, 64 rows", ("HGMMA",))
    assert all(name.startswith("HGMMA") for name in table.column("SASS instruction"))


@pytest.mark.parametrize(
    ("stages", "groups", "in_registers", "verdict"),
    [
        (2, 2, False, "fits"),
        (3, 2, True, "fits"),
        (3, 2, False, "shared memory"),
        (2, 1, False, "registers a thread"),
    ],
)
def test_what_fits(stages: int, groups: int, in_registers: bool, verdict: str) -> None:
    assert verdict in Budget(64, 64, stages, groups, in_registers).verdict()


def test_what_fits_has_room_in_the_register_file() -> None:
    # 128 rows of O are all of an SM's registers, however many warp groups share them
    for groups in (1, 2, 3):
        verdict = Budget(128, 32, 1, groups, False).verdict()
        assert "of the SM's 65,536" in verdict, verdict
    # Q and the scores belong to a warp group of their own, as in keep_ab, of 160 and 184
    ours = Budget(64, 64, 3, 2, True)
    assert ours.registers_per_thread == 160
    assert 184 <= ours.q_registers() <= 188
    assert "of 255" in Budget(128, 32, 1, 3, True).verdict()


def test_the_accumulator_is_half_the_register_file() -> None:
    explorer = budget_explorer.BudgetExplorer()
    assert "32,768 fp32 registers" in explorer.footer.value
    assert explorer.figure(explorer.state).layout.title.text.endswith("fits")
    explorer.widgets["stages"].value = 3
    assert "too much" in explorer.figure(explorer.state).layout.title.text
