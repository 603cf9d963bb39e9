from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from mla_lab.api.contract import trtllm_batch_decode_with_kv_cache_mla as decode_mla
from mla_lab.call.bind import bind
from mla_lab.call.checks import form_of
from mla_lab.call.decode_args import native_args
from mla_lab.core.errors import InvalidInput, InvalidType, Unsupported
from mla_lab.core.problem import Problem
from mla_lab.plan import make_plan
from mla_lab.reference.inputs import make_inputs

from .contract_errors import CASES, PAGES, arguments, ints, run
from .house import ROOT


@pytest.mark.parametrize("case", [*CASES, *PAGES], ids=lambda case: case.name)
def test_a_wrong_argument_says_so(case):
    run(case)


@pytest.mark.parametrize("kind", ["dense", "masked", "ragged", "separate", "sparse", "packed"])
def test_the_calls_that_are_spoiled_are_right(kind):
    assert decode_mla(**arguments(kind)).isfinite().all()


def test_the_same_under_python_optimised():
    command = [sys.executable, "-O", "-m", "tests.contract_errors"]
    subprocess.run(command, cwd=ROOT, check=True, timeout=120)


def test_wrong_types_are_type_errors_and_value_errors():
    with pytest.raises(TypeError):
        decode_mla(**arguments("dense") | {"query": None})
    with pytest.raises(ValueError):
        decode_mla(**arguments("dense") | {"query": None})
    assert issubclass(InvalidType, InvalidInput)


def test_unsupported_is_not_implemented():
    with pytest.raises(NotImplementedError):
        decode_mla(**arguments("dense") | {"enable_pdl": True})


@pytest.mark.parametrize("backend", ["cute", "cuda", "xqa", "cute-dsl"])
def test_a_named_backend_never_falls_back(backend):
    call = arguments("dense") | {"backend": backend}
    with pytest.raises(Unsupported, match=f"backend: got '{backend}'.*torch can run this call"):
        decode_mla(**call)


def split_call():
    """A call whose plan has partials, and the bytes that they need."""
    inputs = make_inputs(Problem((1,), (1000,), 4), workspace_bytes=16 << 20)
    plan = make_plan(inputs.problem, policy="fixed", num_splits=4)
    assert plan.num_slots == 4
    return inputs.contract_args() | {"plan": plan}, plan.workspace.nbytes


def test_an_undersized_workspace_names_both_sizes():
    call, needed = split_call()
    call["workspace_buffer"] = call["workspace_buffer"][:4096]
    with pytest.raises(InvalidInput, match=f"workspace_buffer: got 4096 bytes.*{needed} bytes"):
        decode_mla(**call)


@pytest.mark.parametrize("buffer", [None, torch.empty(0, dtype=torch.uint8)])
def test_no_workspace_is_zero_bytes(buffer):
    call, needed = split_call()
    with pytest.raises(InvalidInput, match=f"workspace_buffer: got 0 bytes.*{needed} bytes"):
        decode_mla(**call | {"workspace_buffer": buffer})


def test_a_misaligned_workspace_is_refused():
    call, _ = split_call()
    call["workspace_buffer"] = call["workspace_buffer"][8:]
    with pytest.raises(InvalidInput, match=r"workspace_buffer: got address 0x.*multiple of 64"):
        decode_mla(**call)


@pytest.mark.parametrize("buffer", [None, torch.empty(0, dtype=torch.int8)])
def test_a_plan_without_partials_needs_no_workspace(buffer):
    call, _ = split_call()
    plan = make_plan(call["plan"].problem, policy="none")
    assert decode_mla(**call | {"plan": plan, "workspace_buffer": buffer}).isfinite().all()


class TestDebugMode:
    """Bounds that are only hints otherwise; `MLA_LAB_DEBUG` turns it on."""

    LOW_BOUND = pytest.mark.parametrize(
        ("kind", "change", "says"),
        [
            ("dense", {"max_seq_len": 99}, "max_seq_len: got 99; supported: at least the longest"),
            ("ragged", {"max_q_len": 2, "mask": None}, "max_q_len: got 2; supported: at least"),
        ],
    )

    @LOW_BOUND
    def test_a_bound_that_is_too_low_is_an_error(self, kind, change, says, monkeypatch):
        monkeypatch.setenv("MLA_LAB_DEBUG", "1")
        with pytest.raises(InvalidInput, match=says):
            decode_mla(**arguments(kind) | change)

    @LOW_BOUND
    @pytest.mark.parametrize("value", [None, "", "0"])
    def test_without_it_the_result_is_the_right_one(self, kind, change, says, value, monkeypatch):
        monkeypatch.delenv("MLA_LAB_DEBUG", raising=False)
        if value is not None:
            monkeypatch.setenv("MLA_LAB_DEBUG", value)
        right = decode_mla(**arguments(kind) | {"mask": None})
        assert torch.equal(decode_mla(**arguments(kind) | {"mask": None} | change), right)

    def test_it_says_that_it_syncs(self, monkeypatch, caplog):
        from mla_lab.call.checks import values

        monkeypatch.setenv("MLA_LAB_DEBUG", "1")
        monkeypatch.setattr(values, "_LOGGED", set())
        for _ in range(2):
            decode_mla(**arguments("dense"))
        assert [r.message for r in caplog.records if "every call syncs" in r.message] == [
            "debug mode copies lengths, tables and masks to the host: every call syncs"
        ]

    @pytest.mark.parametrize("case", PAGES, ids=lambda case: case.name)
    def test_where_lengths_stay_on_the_device_only_it_reads_pages(self, case):
        """As on a GPU: there nobody looks at page ids and lengths, unless in debug mode."""
        named = arguments(case.kind)
        case.change(named)
        given = native_args(**named)
        form = replace(form_of(given), on_host=False)
        assert bind(given, form, reads_lengths=False, debug=False).lengths.kv_lens is None
        with pytest.raises(case.error, match=case.says):
            bind(given, form, reads_lengths=False, debug=True)

    def test_right_calls_pass(self, monkeypatch):
        monkeypatch.setenv("MLA_LAB_DEBUG", "1")
        for kind in ("dense", "masked", "ragged", "separate", "sparse"):
            assert decode_mla(**arguments(kind)).isfinite().all()


def test_the_most_specific_reason_comes_first():
    """Several things are wrong: the type of one argument wins over what its value would break."""
    call = arguments("sparse") | {"mask": [1], "enable_pdl": True, "backend": "cute"}
    with pytest.raises(InvalidType, match=r"mask: got list"):
        decode_mla(**call)
    call["mask"] = torch.ones(2, 2, 2).to(torch.uint16)
    with pytest.raises(Unsupported, match=r"mask: got a tensor in a sparse call"):
        decode_mla(**call)
    del call["mask"]
    with pytest.raises(Unsupported, match=r"backend: got 'cute'"):
        decode_mla(**call)


def test_nothing_is_written_when_a_call_is_refused():
    out = torch.full((3, 2, 4, 512), 7.0, dtype=torch.bfloat16)
    for spoiled in ({"enable_pdl": True}, {"seq_lens": ints([1, 2, -3])}, {"sinks": [1.0]}):
        with pytest.raises((InvalidInput, Unsupported)):
            decode_mla(**arguments("dense") | {"out": out} | spoiled)
    assert (out == 7).all()
