"""Which backend drawn calls take: the record of the notes is what the code says today."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from mla_lab import backends, jit
from mla_lab.api.gqa import choose
from mla_lab.backends.cuda import gqa
from mla_lab.call.gqa_checks import check
from mla_lab.cli import main
from mla_lab.core.gpu import H200
from mla_lab.core.resources import data_dir
from mla_lab.jit import toolchain
from mla_lab.reference.inputs_gqa import GqaShape, make_gqa_inputs
from mla_lab.verify import kinds
from mla_lab.verify.record import read

RECORD = data_dir() / "records/kinds.jsonl"
#: calls at the beginning of the draw that are judged again
FIRST = 120


def test_calls_are_drawn_alike_and_are_of_every_kind() -> None:
    found = list(kinds.drawn(FIRST))
    assert found == list(kinds.drawn(2 * FIRST))[:FIRST] != list(kinds.drawn(FIRST, seed=3))
    used = {name for kind in found for name in kind.features.names()}
    never = {"nonpositive_scale", "pdl", "no_pdl", "top_k_lens", "strided_query"}
    assert used == set(vars(found[0].features)) - never
    assert {kind.problem.page_size for kind in found} == {1, 2, 16, 32, 64, 128}


@pytest.mark.parametrize("builds", kinds.BUILDS)
def test_the_record_is_of_this_code(builds: str) -> None:
    """The first calls are judged anew: each of torch's has a reason there, first where it is."""
    rows = read(RECORD)
    assert (rows[0]["cases"], rows[0]["seed"]) == (kinds.CALLS, kinds.SEED)
    taken = next(row for row in rows if row["kind"] == "taken" and row["builds"] == builds)
    cases = [row for row in rows if row["kind"] == "case" and row["builds"] == builds]
    assert sum(row["count"] for row in cases) == taken["torch"]
    assert sum(taken[name] for name in backends.ORDER) == kinds.CALLS
    with kinds.only(builds):
        found = [kinds.verdict(kind) for kind in kinds.drawn(FIRST)]
    first = {why: i for i, (name, why) in reversed(list(enumerate(found))) if name == "torch"}
    assert first == {row["why"]: row["first"] for row in cases if row["first"] < FIRST}


def test_no_kernel_of_these_is_missing_for_want_of_a_build() -> None:
    whys = {row["why"] for row in read(RECORD) if row.get("builds") == "any" and "why" in row}
    assert whys and not any("not compiled" in why for why in whys)


def test_this_host_s_own_builds_come_back() -> None:
    before = jit.find, toolchain.versions
    with kinds.only("shipped"):
        assert jit.find is not before[0] and toolchain.versions is not before[1]
    assert (jit.find, toolchain.versions) == before


def test_reasons_keep_names_and_lose_numbers() -> None:
    assert kinds.short("pages of 24; its kernel takes (16, 32)") == "pages of #"
    assert kinds.short("a bf16 query over a fp8_656 cache") == "a bf16 query over a fp8_656 cache"
    assert kinds.short("cute_x_1 is not compiled here, and cannot be: no") == "not compiled"


def test_the_command_writes_a_record(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "kinds.jsonl"
    assert main(["verify", "kinds", str(path), "--calls", "12"]) == 0
    assert "any builds: " in capsys.readouterr().out
    assert "Of 12 drawn calls (seed 22)" in kinds.table(read(path))


@pytest.mark.parametrize(("head_dim", "factor"), [(256, None), (128, 1e-3)])
def test_gqa_calls_that_the_notes_name_have_no_kernel(head_dim: int, factor: float | None) -> None:
    shape = GqaShape((1, 1), (70, 9), 8, 2, head_dim=head_dim)
    inputs = make_gqa_inputs(shape, workspace_bytes=4096)
    form = check(replace(inputs, skip_softmax_threshold_scale_factor=factor)).form
    word = "skip_softmax" if factor else "head_dim 256"
    assert word in str(gqa.reason(form, H200)) and choose(form, "auto") == "torch"
