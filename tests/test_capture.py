"""Definitions say what was called, run by themselves, and are written once."""

from __future__ import annotations

import ast
import errno
import json
import os
import subprocess
import sys
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mla_lab.api import decode, replay
from mla_lab.api.context_parallel import merge
from mla_lab.api.contract import trtllm_batch_decode_with_kv_cache_mla as call
from mla_lab.call.checks import form_of
from mla_lab.call.decode_args import DecodeArgs, native_args
from mla_lab.core.errors import Unsupported
from mla_lab.core.problem import Problem
from mla_lab.interop.capture import definition_of, recording, sizes_of
from mla_lab.reference.inputs import DecodeInputs, make_inputs
from mla_lab.reference.mla import decode_reference
from mla_lab.reference.tolerance import lse_error, rel_error

from .house import ROOT

DTYPES = {
    "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "float4_e2m1",
    "int64", "int32", "int16", "int8", "bool",
}  # fmt: skip

CALLS: dict[str, tuple[Problem, list[str]]] = {
    "dense": (Problem((2, 2), (70, 9), 4), ["lse"]),
    "early rows": (Problem((3, 3), (1, 0), 4), ["lse"]),
    "everything dense": (
        Problem((2, 2), (70, 9), 4, page_size=16),
        ["lse", "sinks", "tree_mask", "cache_4d", "device_scales", "page_gap"],
    ),
    "separate": (Problem((2, 2), (70, 9), 4, page_size=16), ["separate_tables", "scales"]),
    "ragged": (Problem((2, 0, 3), (70, 9, 2), 4, page_size=32), ["lse", "sinks"]),
    "ragged, masked, bound": (Problem((2, 5), (70, 9), 4), ["tree_mask", "max_q_len"]),
    "sparse": (Problem((2, 2), (70, 9), 4, top_k=7), ["lse", "sinks"]),
    "sparse, ragged": (Problem((2, 1), (70, 9), 4, top_k=7), []),
    "e4m3": (Problem((1,), (70,), 4, q_dtype="e4m3", kv_format="e4m3"), []),
    "656": (Problem((1, 1), (70, 9), 4, kv_format="fp8_656", page_size=16), ["lse"]),
    "fp16": (Problem((1,), (70,), 4, q_dtype="fp16", kv_format="fp16"), []),
}


def arguments(inputs: DecodeInputs) -> DecodeArgs:
    return native_args(**inputs.contract_args())


def definition(inputs: DecodeInputs) -> dict[str, Any]:
    given = arguments(inputs)
    return json.loads(json.dumps(definition_of(given, form_of(given))))


def made(name: str) -> DecodeInputs:
    problem, features = CALLS[name]
    return make_inputs(problem, 1, features, workspace_bytes=4096)


def values(inputs: DecodeInputs, names: Any) -> dict[str, Any]:
    """A call's arguments by name; integers without a sign as the schema's."""
    given = arguments(inputs)
    signed = {torch.uint8: torch.int8, torch.uint16: torch.int16}
    found = {name: getattr(given, name) for name in names}
    return {
        name: v.view(signed[v.dtype]) if isinstance(v, torch.Tensor) and v.dtype in signed else v
        for name, v in found.items()
    }


def execute(source: str, entry: str) -> Any:
    names: dict[str, Any] = {}
    exec(compile(source, "definition", "exec"), names)
    return names[entry]


@pytest.mark.parametrize("name", CALLS)
def test_a_definition_follows_the_schema(name: str) -> None:
    made_of = definition(made(name))
    assert made_of["op_type"] == "mla_paged" and made_of["tags"]
    axes = made_of["axes"]
    for axis in axes.values():
        assert axis["type"] in ("const", "var")
        assert axis["type"] == "var" or (type(axis["value"]) is int and axis["value"] > 0)
    for tensor in (*made_of["inputs"].values(), *made_of["outputs"].values()):
        assert tensor["dtype"] in DTYPES
        assert set(tensor["shape"] or ()) <= set(axes)
    bound = {axis for t in made_of["inputs"].values() for axis in t["shape"] or ()}
    assert {name for name, axis in axes.items() if axis["type"] == "var"} <= bound
    sizes = {name: axis["value"] for name, axis in axes.items() if axis["type"] == "const"}
    given = arguments(made(name))
    sizes |= sizes_of(given, form_of(given))
    for constraint in made_of["constraints"]:
        assert eval(constraint, {}, sizes), constraint
    for part, entry in (("reference", "run"), ("init", "init")):
        functions = [n for n in ast.parse(made_of[part]).body if isinstance(n, ast.FunctionDef)]
        assert entry in [f.name for f in functions]
    (run,) = [
        n
        for n in ast.parse(made_of["reference"]).body
        if isinstance(n, ast.FunctionDef) and n.name == "run"
    ]
    assert [a.arg for a in run.args.args] == list(made_of["inputs"])


@pytest.mark.parametrize("name", CALLS)
def test_shapes_are_the_call_s(name: str) -> None:
    inputs = made(name)
    given = arguments(inputs)
    form = form_of(given)
    made_of = definition_of(given, form)
    sizes = {n: a["value"] for n, a in made_of["axes"].items() if a["type"] == "const"}
    sizes |= sizes_of(given, form)
    for key, tensor in made_of["inputs"].items():
        if tensor["shape"] is not None:
            value = getattr(given, key)
            value = value[0] if isinstance(value, list) else value
            assert list(value.shape) == [sizes[axis] for axis in tensor["shape"]], key
    out = made_of["outputs"]["output"]
    assert out["dtype"] == "bfloat16", "whatever the query"
    assert list(form.out_shape) == [sizes[axis] for axis in out["shape"]]


@pytest.mark.parametrize("name", CALLS)
def test_the_reference_is_right(name: str) -> None:
    """Its text, run alone on the call's inputs, against the oracle."""
    inputs = made(name)
    made_of = definition(inputs)
    result = execute(made_of["reference"], "run")(**values(inputs, made_of["inputs"]))
    expected = decode_reference(inputs)
    out, lse = result if isinstance(result, tuple) else (result, None)
    assert rel_error(out, expected.out.bfloat16().to(expected.out)) < 1e-3
    assert ("lse" in made_of["outputs"]) == (lse is not None)
    if lse is not None:
        assert list(lse.shape) == [*inputs.query.shape[:-1]]
        assert lse_error(lse.reshape(expected.lse.shape), expected.lse) < 1e-5


@pytest.mark.parametrize("name", CALLS)
def test_the_input_maker_makes_calls_that_run(name: str) -> None:
    inputs = made(name)
    given = arguments(inputs)
    made_of = definition(inputs)
    sizes = sizes_of(given, form_of(given))
    fresh = execute(made_of["init"], "init")(**sizes, device="cpu", seed=3)
    assert list(fresh) == list(made_of["inputs"])
    for key, tensor in made_of["inputs"].items():
        if tensor["shape"] is not None:
            assert list(fresh[key].shape) == list(getattr(given, key).shape), key
            assert str(fresh[key].dtype) == f"torch.{tensor['dtype']}", key
    expected = execute(made_of["reference"], "run")(**fresh)
    unsigned = {"mask": torch.uint16} | ({"kv_cache": torch.uint8} if name == "656" else {})
    named = {k: v.view(unsigned[k]) if k in unsigned else v for k, v in fresh.items()}
    named["workspace_buffer"] = None
    kept = ("kv_lora_rank", "qk_rope_head_dim", "sparse_mla_top_k", "uses_shared_paged_kv_idx")
    named |= {key: getattr(given, key) for key in kept}
    result = decode.decode(**named, return_lse="lse" in made_of["outputs"])
    for ours, theirs in zip(
        result if isinstance(result, tuple) else (result,),
        expected if isinstance(expected, tuple) else (expected,),
        strict=True,
    ):
        assert rel_error(ours.float(), theirs.reshape(ours.shape).float()) < 4e-3


@pytest.mark.parametrize("bound", [None, 40])
@pytest.mark.parametrize("q_lens", [(40, 1, 1), (3, 2), (17, 2, 30, 0)])
def test_query_tokens_are_dealt_for_a_mask_s_words(
    q_lens: tuple[int, ...], bound: int | None
) -> None:
    inputs = make_inputs(Problem(q_lens, (200,) * len(q_lens), 2), 1, ["tree_mask"])
    if bound is not None:
        words = 2 * -(-bound // 32)
        mask = torch.zeros(sum(q_lens), words, dtype=torch.int16)
        mask[:, : inputs.mask.shape[-1]] = inputs.mask.view(torch.int16)
        inputs = replace(inputs, mask=mask.view(torch.uint16), max_q_len=bound)
    made_of, given = definition(inputs), arguments(inputs)
    fresh = execute(made_of["init"], "init")(**sizes_of(given, form_of(given)), device="cpu")
    named = fresh | {"mask": fresh["mask"].view(torch.uint16), "workspace_buffer": None}
    out = decode.decode(**named, kv_lora_rank=512, qk_rope_head_dim=64)
    expected = execute(made_of["reference"], "run")(**fresh)
    assert rel_error(out.float(), expected.reshape(out.shape).float()) < 4e-3


def test_a_factor_of_zero_is_no_input() -> None:
    factor = "skip_softmax_threshold_scale_factor"
    plain = arguments(made("dense"))
    given = replace(plain, **{factor: 0.0})
    assert definition_of(given, form_of(given)) == definition_of(plain, form_of(plain))


def test_bytes_typed_as_e4m3_have_a_definition_of_their_own() -> None:
    inputs = made("656")
    cache = inputs.kv_cache.view(torch.float8_e4m3fn)
    made_of, given = definition(inputs), arguments(replace(inputs, kv_cache=cache))
    typed = definition_of(given, form_of(given))
    assert typed["name"] == f"{made_of['name']}_as_e4m3".replace("_lse_as_e4m3", "_as_e4m3_lse")
    fresh = execute(typed["init"], "init")(**sizes_of(given, form_of(given)), device="cpu")
    assert fresh["kv_cache"].dtype is torch.float8_e4m3fn


def test_base_2() -> None:
    inputs = replace(made("dense"), return_lse_base="base2")
    made_of = definition(inputs)
    assert made_of["name"].endswith("_lse_base2")
    _, lse = execute(made_of["reference"], "run")(**values(inputs, made_of["inputs"]))
    assert lse_error(lse.reshape(4, 4), decode_reference(inputs).lse) < 1e-5


def test_names_differ_where_something_fixed_does() -> None:
    names = {definition(made(name))["name"] for name in CALLS}
    assert len(names) == len(CALLS) - 1, "early rows are dense too"
    assert definition(made("dense"))["name"] == "mla_decode_dense_h4_ckv512_kpe64_ps64_bf16_lse"


# --- the recorder -------------------------------------------------------------------------------


def files(folder: Path) -> dict[str, int]:
    """Lines of each file below a folder."""
    return {
        path.relative_to(folder).as_posix(): len(path.read_text(encoding="utf-8").splitlines())
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def test_a_batch_invariant_call_has_its_own_solution(tmp_path: Path) -> None:
    inputs = make_inputs(Problem((1,), (70,), 4), 1)
    with recording(tmp_path):
        for invariant in (False, True):
            decode.decode(**inputs.contract_args(), batch_invariant=invariant)
    sources = [
        json.loads(path.read_text())["sources"][0]["content"]
        for path in sorted(tmp_path.glob("solutions/*/*/*.json"))
    ]
    assert ["batch_invariant=True" in source for source in sources] == [False, True]


def test_each_shape_is_written_once(tmp_path: Path) -> None:
    name = "mla_decode_dense_h4_ckv512_kpe64_ps64_bf16"
    with recording(tmp_path):
        for batch in (1, 2, 1, 3, 2):
            for length in (70, 71):
                call(**make_inputs(Problem((1,) * batch, (length,) * batch, 4)).contract_args())
        call(**make_inputs(Problem((1,), (70,), 8)).contract_args())
    call(**make_inputs(Problem((1,), (70,), 16)).contract_args())
    found = files(tmp_path)
    assert found[f"workloads/mla_paged/{name}.jsonl"] == 3
    assert found["workloads/mla_paged/mla_decode_dense_h8_ckv512_kpe64_ps64_bf16.jsonl"] == 1
    assert len(found) == 6, "nothing after the block"
    stored = json.loads((tmp_path / f"definitions/mla_paged/{name}.json").read_text())
    assert stored["name"] == name
    row = json.loads((tmp_path / f"workloads/mla_paged/{name}.jsonl").read_text().splitlines()[1])
    assert row["definition"] == name and row["solution"] is None
    assert row["workload"]["axes"]["batch_size"] == 2
    assert row["workload"]["inputs"]["max_seq_len"] == {"type": "scalar", "value": 70}
    assert row["workload"]["inputs"]["query"] == {"type": "random"}


def test_a_second_process_adds_only_what_is_new(tmp_path: Path) -> None:
    inputs = make_inputs(Problem((1,), (70,), 4))
    for _ in range(2):
        with recording(tmp_path):
            call(**inputs.contract_args())
    assert set(files(tmp_path).values()) >= {1}
    assert sum(count for name, count in files(tmp_path).items() if "workloads" in name) == 1


def test_calls_that_are_replayed_are_recorded_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Switching on drops recorded replays, so that each call is checked in full once more."""
    forgotten: list[bool] = []
    monkeypatch.setattr(replay, "clear", lambda: forgotten.append(True))
    with recording(tmp_path):
        assert forgotten == [True]


def test_what_the_schema_cannot_say_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    inputs = make_inputs(Problem((1,), (70,), 4), features=["lse"])
    named = {
        **inputs.contract_args(),
        "enable_dcp": True,
        "causal_seqlens_kv_global": inputs.seq_lens,
    }
    with recording(tmp_path):
        for _ in range(2):
            out, lse = call(**named)
    assert [r.message for r in caplog.records if "not recorded" in r.message] == [
        "a call was not recorded: enable_dcp: got True; supported: False: the schema has no ranks"
    ]
    assert files(tmp_path) == {}
    assert merge([out], [lse]) is not None


def test_a_folder_that_cannot_be_written_stops_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    with recording(tmp_path / "file"):
        call(**make_inputs(Problem((1,), (70,), 4)).contract_args())
    assert len([r for r in caplog.records if "not recorded" in r.message]) == 1


@pytest.mark.parametrize("scale", [np.float32(0.25), np.float64(0.25), Fraction(1, 4)], ids=repr)
def test_a_scale_of_any_kind_is_recorded_as_its_number(tmp_path: Path, scale: Any) -> None:
    inputs = make_inputs(Problem((1,), (70,), 4))
    named = {**inputs.contract_args(), "bmm1_scale": scale}
    with recording(tmp_path):
        call(**named)
    (path,) = (tmp_path / "workloads" / "mla_paged").iterdir()
    row = json.loads(path.read_text())
    assert row["workload"]["inputs"]["bmm1_scale"] == {"type": "scalar", "value": 0.25}
    (path,) = (tmp_path / "definitions" / "mla_paged").iterdir()
    init = execute(json.loads(path.read_text())["init"], "init")
    assert init(**row["workload"]["axes"], device="cpu")["bmm1_scale"] == 0.25


def test_a_workload_file_in_another_encoding_stops_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "workloads" / "mla_paged"
    folder.mkdir(parents=True)
    path = folder / "mla_decode_dense_h4_ckv512_kpe64_ps64_bf16.jsonl"
    path.write_bytes(b"\xff\xfe no UTF-8\n")
    with recording(tmp_path):
        call(**make_inputs(Problem((1,), (70,), 4)).contract_args())
    assert len(path.read_bytes().splitlines()) == 2


def test_a_full_disk_stops_nothing_and_leaves_no_half_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    inputs = [make_inputs(Problem((1,) * batch, (70,) * batch, 4)) for batch in (1, 2, 3)]
    with recording(tmp_path):
        call(**inputs[0].contract_args())
        with monkeypatch.context() as patch:
            patch.setattr(os, "write", full_disk(os.write))
            for one in inputs[1:]:
                assert call(**one.contract_args()).isfinite().all()
    assert [r.message for r in caplog.records if "not recorded" in r.message] == [
        "a call was not recorded: [Errno 28] No space left on device"
    ]
    (path,) = (tmp_path / "workloads" / "mla_paged").iterdir()
    assert len([json.loads(line) for line in path.read_text().splitlines()]) == 1


def full_disk(write: Any) -> Any:
    """`os.write` of a disk with room for ten more bytes, then for none."""
    room = 10

    def limited(descriptor: int, data: bytes) -> int:
        nonlocal room
        if not room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        room = 0
        return int(write(descriptor, data[:10]))

    return limited


def test_any_mistake_of_the_recorder_stops_nothing_and_is_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(given: Any, form: Any) -> Any:
        raise KeyError("ours")

    monkeypatch.setattr("mla_lab.interop.capture.recorder.definition_of", broken)
    with recording(tmp_path):
        for batch in (1, 2):
            call(**make_inputs(Problem((1,) * batch, (70,) * batch, 4)).contract_args())
    assert [r.message for r in caplog.records] == ["a call was not recorded: KeyError('ours')"]


def test_a_refused_call_is_not_recorded(tmp_path: Path) -> None:
    with recording(tmp_path), pytest.raises(Unsupported):
        call(**make_inputs(Problem((1,), (70,), 4)).contract_args(), backend="cute")
    assert files(tmp_path) == {}


PROGRAM = """
from mla_lab.core.problem import Problem
from mla_lab.reference.inputs import make_inputs
from mla_lab.api.decode import decode
named = make_inputs(Problem((1,), (70,), 4)).contract_args()
decode(**named)
decode(**named)
"""


@pytest.mark.parametrize("switch", [True, False])
def test_the_environment_switches_it_on(switch: bool, tmp_path: Path) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "MLA_LAB_TRACE"}
    environment |= {"MLA_LAB_TRACE": str(tmp_path)} if switch else {}
    subprocess.run([sys.executable, "-c", PROGRAM], cwd=ROOT, env=environment, check=True)
    assert len(files(tmp_path)) == 3 * switch
