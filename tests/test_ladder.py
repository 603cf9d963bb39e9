"""The ladder on a CPU: its kernels' own source, thread blocks as fibers, against the oracle."""

from __future__ import annotations

import ctypes
import shutil
from pathlib import Path

import pytest
import torch

from mla_lab.backends.cuda.ladder import STEPS, Ladder, num_splits, shared_bytes
from mla_lab.bench import ladder, ladder_model
from mla_lab.cli.commands import ladder as command
from mla_lab.core.errors import InvalidInput, Unsupported
from mla_lab.core.gpu import H200
from mla_lab.core.problem import Problem
from mla_lab.core.resources import kernels_dir
from mla_lab.reference.inputs import make_inputs
from mla_lab.reference.mla import decode_reference
from mla_lab.reference.tolerance import ALLOWED_RATIO, lse_error, rel_error, sdpa_error

from .ladder_host import build, run_on_host

needs_compilers = pytest.mark.skipif(
    None in (shutil.which("g++"), shutil.which("nvcc")), reason="needs g++ and CUDA's headers"
)
FOLDER = kernels_dir() / "ladder"
#: causal, ragged, odd heads, two row tiles, an empty request, keys before and past a tile's end
ODD = Problem((3, 0, 1, 2), (65, 10, 0, 130), 33, page_size=16)
NUMBERS = [step.number for step in STEPS]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return build(tmp_path_factory.mktemp("ladder"))


@needs_compilers
@pytest.mark.parametrize("step", NUMBERS)
def test_right_on_poisoned_odd_shapes_in_any_order_of_threads(
    library: ctypes.CDLL, step: int
) -> None:
    inputs = make_inputs(ODD, 1, ("scales", "page_gap"), workspace_bytes=256)
    want = decode_reference(inputs)
    forward = run_on_host(library, step, inputs, num_splits=3)
    assert rel_error(forward.out, want.out) <= ALLOWED_RATIO * sdpa_error(inputs).relative
    assert lse_error(forward.lse, want.lse) < 2e-5
    assert library.shared_bytes() == shared_bytes(step)
    backward = run_on_host(library, step, inputs, num_splits=3, reversed_threads=True)
    assert torch.equal(forward.out, backward.out)
    assert torch.equal(forward.lse, backward.lse)


@needs_compilers
@pytest.mark.parametrize("step", [3, 9])
def test_right_on_heavy_tails(library: ctypes.CDLL, step: int) -> None:
    problem = Problem.uniform(1, 1, 150, 16)
    inputs = make_inputs(problem, 1, distribution="heavy_tailed", workspace_bytes=256)
    got, want = run_on_host(library, step, inputs), decode_reference(inputs)
    assert rel_error(got.out, want.out) <= ALLOWED_RATIO * sdpa_error(inputs).relative
    assert lse_error(got.lse, want.lse) < 2e-5


@needs_compilers
@pytest.mark.parametrize("step", NUMBERS)
def test_a_key_with_nan_is_in_out_and_lse_of_its_request_alone(
    library: ctypes.CDLL, step: int
) -> None:
    inputs = make_inputs(Problem.uniform(2, 1, 150, 16), 1, workspace_bytes=256)
    inputs.kv_cache[int(inputs.block_tables[0, 0]), 3, 5] = torch.nan
    got = run_on_host(library, step, inputs, num_splits=3)
    out, lse = got.out.view(2, -1), got.lse.view(2, -1)
    assert out[0].isnan().all() and lse[0].isnan().all()
    assert out[1].isfinite().all() and lse[1].isfinite().all()


@needs_compilers
def test_the_swizzle_takes_every_bank_conflict_away(library: ctypes.CDLL) -> None:
    inputs = make_inputs(Problem.uniform(1, 1, 64, 16), 1, workspace_bytes=256)
    turns = {}
    for step in (4, 5, 6, 7, 8, 9):
        run_on_host(library, step, inputs)
        turns[step] = library.turns_per_read()
    assert turns == {4: ladder_model.CONFLICT, 5: 1, 6: 1, 7: 1, 8: 1, 9: 1}


@pytest.fixture
def broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Builds the ladder with a line of one of its files left out."""

    def build_without(file: str, line: str) -> ctypes.CDLL:
        kernels = tmp_path / "kernels"
        shutil.copytree(kernels_dir(), kernels)
        source = (kernels / "ladder" / file).read_text()
        assert line in source
        (kernels / "ladder" / file).write_text(source.replace(line, ""))
        monkeypatch.setattr("tests.ladder_host.kernels_dir", lambda: kernels)
        return build(tmp_path)

    return build_without


@needs_compilers
@pytest.mark.parametrize(
    ("step", "file", "line"),
    [
        (3, "step3_shared.cuh", "__syncthreads();  // the tile is there"),
        (6, "row_tile.cuh", "__syncthreads();  // weights of all warps are there"),
    ],
)
def test_a_missing_barrier_shows(broken, step: int, file: str, line: str) -> None:
    library = broken(file, line)
    inputs = make_inputs(Problem.uniform(1, 1, 70, 16), 1, workspace_bytes=256)
    want = decode_reference(inputs)
    off = [
        rel_error(run_on_host(library, step, inputs, reversed_threads=order).out, want.out)
        for order in (False, True)
    ]
    assert not max(off) < 0.05


@needs_compilers
def test_copies_that_nobody_waits_for_show(broken, capfd: pytest.CaptureFixture[str]) -> None:
    library = broken("step6_cp_async.cuh", "wait_for_copies();")
    inputs = make_inputs(Problem.uniform(1, 1, 70, 16), 1, workspace_bytes=256)
    with pytest.raises(RuntimeError, match="CUDA error"):
        run_on_host(library, 6, inputs)
    assert "a thread ends with copies under way" in capfd.readouterr().err


def test_a_file_a_step_each_short_enough_to_read() -> None:
    files = sorted(path.name for path in FOLDER.glob("step*"))
    assert files == [step.file for step in STEPS]
    for path in FOLDER.iterdir():
        assert path.read_text().count("\n") <= 300, path.name


def test_splits_fill_the_card_and_no_more() -> None:
    latency, full = Problem.uniform(1, 1, 8192, 128), Problem.uniform(64, 1, 2048, 128)
    assert [num_splits(step, latency) for step in (6, 7, 9)] == [1, 66, 66]
    assert num_splits(8, full) == 1
    assert num_splits(8, Problem.uniform(1, 1, 100, 16)) == 2


@pytest.mark.parametrize(
    "features", [("sinks",), ("chain_mask",), ("cache_4d",), ("device_scales",)]
)
def test_refusals(features: tuple[str, ...]) -> None:
    inputs = make_inputs(Problem.uniform(1, 2, 10, 16), 1, features, workspace_bytes=256)
    with pytest.raises(Unsupported):
        Ladder(0, inputs)
    with pytest.raises(InvalidInput, match="step: got 10"):
        Ladder(10, inputs)


@pytest.mark.parametrize(("step", "splits"), [(9, 0), (9, 65536), (6, 2), (0, -1)])
def test_splits_that_a_step_has_not_are_refused(step: int, splits: int) -> None:
    inputs = make_inputs(Problem.uniform(1, 2, 10, 16), 1, workspace_bytes=256)
    with pytest.raises(
        InvalidInput, match=f"splits: got {splits}; supported: 1 to .* in step {step}"
    ):
        Ladder(step, inputs, splits)


def test_refuses_other_formats() -> None:
    inputs = make_inputs(Problem.uniform(1, 1, 10, 16, q_dtype="fp16", kv_format="fp16"), 1)
    with pytest.raises(Unsupported, match="dense bf16"):
        Ladder(0, inputs)


def test_every_step_is_predicted_and_none_below_the_card() -> None:
    for case in ladder.CASES:
        found = ladder.rungs([], case)
        assert [rung.step for rung in found] == NUMBERS
        least = 1e6 * H200.memory_time(case.problem)
        assert all(rung.predicted_us >= least and rung.us is None for rung in found)


def test_the_command_prints_a_table_a_case(capsys: pytest.CaptureFixture[str]) -> None:
    import argparse

    parser = argparse.ArgumentParser()
    command.add_parser(parser.add_subparsers())
    command.run(parser.parse_args(["ladder"]))
    text = capsys.readouterr().out
    assert all(case.name in text for case in ladder.CASES)
    assert text.count("step ") == len(ladder.CASES)
