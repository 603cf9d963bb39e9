"""The runs of FlashInfer's and FlashMLA's tests, on small checkouts of our own making."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from mla_lab import backends
from mla_lab.core.errors import InvalidInput
from mla_lab.core.problem import Problem
from mla_lab.reference.inputs import make_inputs
from mla_lab.reference.mla import decode_reference
from mla_lab.reference.tolerance import rel_error
from mla_lab.verify import flash_mla_tests, flashinfer_tests, peer_tests
from mla_lab.verify.record import read

#: a test file in the manner of FlashInfer's: our names, guards, a sample, ends of each kind
FLASHINFER = """
import pytest
import torch
import flashinfer
from flashinfer.cute_dsl import is_cute_dsl_available
from flashinfer.cute_dsl.attention.monolithic.mla_decode import _get_split_kv_and_workspace_size
from flashinfer.utils import get_compute_capability, is_sm100a_supported

workspace_size, TRTLLM_GEN_WORKSPACE_CHECK_BYTES = 1 << 20, 1 << 10


def trtllm_gen_workspace_softmax_end_bytes_decode(heads, batch, tokens):
    return 8 * heads * batch * tokens


@pytest.mark.parametrize("number", range(1100))
def test_many(number):
    capability = get_compute_capability(torch.device("cuda"))
    if capability[0] != 12 or capability[0] not in (10, 11) or capability != (10, 7):
        pytest.skip("another card")
    assert is_cute_dsl_available() and is_sm100a_supported(torch.device("cuda"))


@pytest.mark.parametrize("number", range(60))
def test_few(number):
    pass


def test_call():
    dimensions = flashinfer.mla.deepseek_mla_dimensions
    assert trtllm_gen_workspace_softmax_end_bytes_decode(4, 1, 1) == (1 << 20) - (1 << 10)
    assert _get_split_kv_and_workspace_size(1, 1, 128, 512, 132, 256)[0] == 2
    out = flashinfer.decode.trtllm_batch_decode_with_kv_cache_mla(
        query=torch.zeros(1, 1, 4, 576, dtype=torch.bfloat16),
        kv_cache=torch.ones(2, 1, 32, 576, dtype=torch.bfloat16),
        workspace_buffer=torch.empty(1 << 24, dtype=torch.int8),
        qk_nope_head_dim=dimensions.qk_nope_head_dim,
        kv_lora_rank=dimensions.kv_lora_rank,
        qk_rope_head_dim=dimensions.qk_rope_head_dim,
        block_tables=torch.tensor([[1, 0]], dtype=torch.int32),
        seq_lens=torch.tensor([40], dtype=torch.int32),
        max_seq_len=40,
        bmm1_scale=0.1,
        bmm2_scale=1.0,
    )
    assert (out == 1).all()


def test_own_part():
    from flashinfer.mla._core import something


def test_own_name():
    from flashinfer.mla import something


def test_classes():
    import a_library_that_is_not_there


def test_ours():
    import mla_lab.a_module_that_is_not_there


def test_flat_q_tile_split_workspace_geometry():
    assert False


def test_skips():
    pytest.skip("says why\\nand more")


def test_wrong():
    assert 1 == 2, "one is not two"
"""

DENSE = """
import dataclasses
import triton
import torch
import flash_mla


@dataclasses.dataclass
class TestParam:
    b: int
    s_q: int
    s_k: int
    h_q: int = 4
    h_kv: int = 1
    d: int = 576
    dv: int = 512
    test_performance: bool = True


@triton.jit
def unused():
    pass


def test_flash_mla(t):
    assert not t.test_performance and t.s_k < 10
    lens = torch.full((t.b,), t.s_k, dtype=torch.int32)
    k = torch.ones(t.b, 64, t.h_kv, 576)
    table = torch.arange(t.b, dtype=torch.int32)[:, None]
    metadata, _ = flash_mla.get_mla_metadata()
    q = torch.zeros(t.b, t.s_q, t.h_q, 576)
    out, lse = flash_mla.flash_mla_with_kvcache(q, k, table, lens, t.dv, metadata)
    assert out.dtype == torch.get_default_dtype() and (out == 1).all()


def main(dtype):
    torch.set_default_device("meta")
    torch.set_default_dtype(dtype)
    torch.cuda.set_device("cuda:0")
    assert torch.cuda.get_device_capability()[0] == 9
    for case in [
        TestParam(2, 1, 5, test_performance=False), TestParam(2, 1, 50, test_performance=False),
        TestParam(1, 1, 5), TestParam(1, 1, 5, h_kv=2, test_performance=False),
        *[TestParam(1, 1, 10**7, test_performance=False)] * 70,
    ]:
        test_flash_mla(case)
"""

SPARSE = """
import dataclasses
import rich.table
import torch


@dataclasses.dataclass
class Decode:
    b: int = 1
    extra_topk: int = 0


@dataclasses.dataclass
class TestParam:
    right: bool
    seed: int = -1
    num_runs: int = 0
    s_q: int = 1
    h_q: int = 64
    topk: int = 64
    d_qk: int = 576
    d_v: int = 512
    decode: Decode = dataclasses.field(default_factory=Decode)

    def to_test_param(self):
        return self


@dataclasses.dataclass
class Result:
    is_correct: bool


def gen_testcase():
    return [TestParam(True), TestParam(False), TestParam(True, num_runs=3),
            *[TestParam(True, d_qk=512)] * 10, TestParam(True, topk=10**7)]


def test_flash_mla(p):
    print("Running")
    print("`lse` mismatch")
    print("max abs err: 1")
    return Result(p.right)
"""


def test_flashinfer_tests(tmp_path: Path) -> None:
    """Which tests run, how each ends, with what reason and by which backend."""
    folder = tmp_path / flashinfer_tests.FOLDER
    folder.mkdir(parents=True)
    (folder / "test_a.py").write_text(FLASHINFER)
    said: list[str] = []
    choose = backends.choose
    rows = flashinfer_tests.run(tmp_path, "abc", 0, 1, said.append, files=["test_a.py"])
    assert backends.choose is choose and "flashinfer" not in sys.modules
    head, cases = rows[0], rows[1:]
    assert head["flashinfer_commit"] == "abc" and head["seed"] == 7
    assert head["parametrisations"]["test_a.py::test_many"] == 1100
    assert len(said) == len(cases) == 33 + 60 + 8
    assert len({r["parameters"] for r in cases if r["test"] == "test_many"}) == 33
    assert all(r["status"] == "passed" for r in cases if r["test"] in ("test_many", "test_few"))
    ended = {r["test"]: (r["status"], r["reason"]) for r in cases[93:]}
    needs = "needs FlashInfer's own flashinfer.mla"
    classes = "needs the kernel classes of FlashInfer, and a_library_that_is_not_there"
    assert ended == {
        "test_call": ("passed", ""),
        "test_own_part": ("skipped", f"{needs}._core"),
        "test_own_name": ("skipped", needs),
        "test_classes": ("skipped", classes),
        "test_ours": (
            "failed",
            "ModuleNotFoundError: No module named 'mla_lab.a_module_that_is_not_there'",
        ),
        "test_flat_q_tile_split_workspace_geometry": ("skipped", flashinfer_tests.ASSERTS_BYTES),
        "test_skips": ("skipped", "says why"),
        "test_wrong": ("failed", "AssertionError: one is not two"),
    }
    assert [r["backends"] for r in cases if r["test"] in ("test_call", "test_wrong")] == [
        ["torch"], [],
    ]  # fmt: skip
    part = flashinfer_tests.run(tmp_path, "abc", 1, 3, said.append, files=["test_a.py"])
    assert [r["parameters"] for r in part[1:]] == [r["parameters"] for r in cases[1::3]]
    none = flashinfer_tests.run(tmp_path, "abc", 998, 999, said.append, files=["test_a.py"])
    assert none == [none[0]] and none[0]["parametrisations"] == head["parametrisations"]


def test_a_file_that_is_not_collected(tmp_path: Path) -> None:
    """One error, in place of a record without its tests."""
    folder = tmp_path / flashinfer_tests.FOLDER
    folder.mkdir(parents=True)
    (folder / "test_a.py").write_text("from flashinfer.a_part import a_name\n")
    with pytest.raises(InvalidInput, match="INTERRUPTED"):
        flashinfer_tests.run(tmp_path, "abc", 0, 1, print, files=["test_a.py"])
    assert "flashinfer" not in sys.modules


def test_their_reference_is_the_definition() -> None:
    """The wrapper that stands in for FlashInfer's, causal, with pages that are not in order."""
    inputs = make_inputs(Problem((2, 1), (70, 33), 4, q_dtype="fp16", page_size=16), 1)
    wrapper = flashinfer_tests.ReferenceWrapper(torch.empty(0))
    pages = [table[: -(-n // 16)] for table, n in zip(inputs.block_tables, (70, 33), strict=True)]
    begins = torch.tensor([0, 5, 8])
    wrapper.plan(
        torch.tensor([0, 2, 3]), begins, torch.cat(pages), inputs.seq_lens,
        4, 512, 64, 16, True, inputs.bmm1_scale, torch.float16, torch.float16,
    )  # fmt: skip
    q, kv = inputs.query.flatten(0, -3), inputs.kv_cache
    out = wrapper.run(q[..., :512], q[..., 512:], kv[..., :512], kv[..., 512:])
    expected = decode_reference(inputs)[0] / inputs.bmm2_scale
    assert rel_error(out, expected.view_as(out)) < 1e-3


def test_flash_mla_tests(tmp_path: Path) -> None:
    """Two parts of a run: the cases that are drawn, and how they end."""
    folder = tmp_path / "tests"
    folder.mkdir()
    (folder / f"{flash_mla_tests.DENSE}.py").write_text(DENSE)
    (folder / f"{flash_mla_tests.SPARSE}.py").write_text(SPARSE)
    record = tmp_path / "record.jsonl"
    words = [sys.executable, "-m", "mla_lab.verify.flash_mla_tests", str(tmp_path), str(record)]
    done = subprocess.run(
        [*words, "--commit", "abc", "--jobs", "2"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    head, *cases = read(record)
    assert head["card"] == (torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu")
    dense = "test_flash_mla_dense_decoding"
    assert head["there"] == {
        f"{dense} (bf16)": 73, f"{dense} (fp16)": 73, "test_flash_mla_sparse_decoding": 13,
    }  # fmt: skip
    ended: dict[str, dict[str, list[str]]] = {}
    for row in cases:
        ended.setdefault(row["test"], {}).setdefault(row["status"], []).append(row["reason"])
    for dtype in ("bf16", "fp16"):
        own = ended[f"{dense} ({dtype})"]
        assert own["passed"] == [""] and len(own["failed"]) == 61 and len(own["refused"]) == 1
        assert own["refused"] == ["k_cache: got 2 KV heads; supported: 1"]
    own = ended["test_flash_mla_sparse_decoding"]
    assert len(own["passed"]) == 1 + flash_mla_tests.OF_A_KIND
    assert own["failed"] == ["AssertionError: `lse` mismatch; max abs err: 1"]
    counts: dict[str, Any] = json.loads(done.stdout)
    assert counts == {"passed": 11, "failed": 123, "refused": 2}


def test_bad_arguments(tmp_path: Path) -> None:
    """One message each, and no record."""
    record = tmp_path / "record.jsonl"

    def command(*more: str) -> str:
        return peer_tests.command(
            "m", "d", flashinfer_tests.run, [str(tmp_path), str(record), *more]
        )

    with pytest.raises(InvalidInput, match="a git repository"):
        command()
    with pytest.raises(InvalidInput, match=r"without tests/attention/test_trtllm_gen_mla\.py"):
        command("--commit", "abc")
    with pytest.raises(InvalidInput, match=r"^jobs: got 0"):
        command("--jobs", "0")
    with pytest.raises(InvalidInput, match=r"^part: got 2"):
        command("--jobs", "2", "--part", "2")
    assert not record.exists()
