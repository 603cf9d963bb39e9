"""Calls that are wrong in ways that no shape shows: values, memory that is shared, odd tensors."""

from __future__ import annotations

import math
import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

from mla_lab.api import replay
from mla_lab.api.contract import trtllm_batch_decode_with_kv_cache_mla as call
from mla_lab.api.contract_gqa import trtllm_batch_decode_with_kv_cache as gqa
from mla_lab.api.decode import decode, explain
from mla_lab.backends.cuda import backend as cuda
from mla_lab.backends.cuda import xqa
from mla_lab.backends.cute.feature_args import number
from mla_lab.call.bind import bind
from mla_lab.call.checks import form_of
from mla_lab.call.decode_args import DecodeArgs, native_args
from mla_lab.call.form import Features
from mla_lab.call.gqa_args import GqaArgs
from mla_lab.call.gqa_checks import check as check_gqa
from mla_lab.core.errors import InvalidInput, InvalidType, MlaLabError, Unsupported
from mla_lab.core.gpu import H200
from mla_lab.core.problem import Problem
from mla_lab.plan import make_plan
from mla_lab.reference.inputs import DecodeInputs, make_inputs, zero_bytes
from mla_lab.reference.inputs_gqa import GqaShape, make_gqa_inputs
from mla_lab.reference.mla import decode_reference
from mla_lab.reference.tolerance import lse_error, rel_error

SMALL = Problem((2, 2), (70, 9), 4)
OUT_ELEMENTS = 2 * 2 * 4 * 512


@pytest.fixture(autouse=True)
def calls_recorded_here_are_forgotten() -> Iterator[None]:
    """Their launches write nothing."""
    yield
    replay.clear()


def inputs_of(problem: Problem = SMALL, *features: str) -> DecodeInputs:
    return make_inputs(problem, 1, features, workspace_bytes=1 << 20)


# --- what a replay compares ---------------------------------------------------------------------


def recorded(args: DecodeArgs, needs: int = 0) -> DecodeArgs:
    """Record a launch for `args` as a kernel backend does."""
    from types import SimpleNamespace

    replay.clear()
    planned: Any = SimpleNamespace(workspace=SimpleNamespace(nbytes=needs))
    replay.record(
        bind(args, form_of(args), reads_lengths=True, debug=False), planned, lambda *_: None
    )
    return args


@pytest.mark.parametrize("needs", [0, 4096])
@pytest.mark.parametrize(
    "change",
    [
        lambda a: {"kv_cache": a.kv_cache[:0]},
        lambda a: {"workspace_buffer": 7},
        lambda a: {"workspace_buffer": torch.zeros(1024)},
        lambda a: {"workspace_buffer": a.workspace_buffer.view(2, -1)},
        lambda a: {"workspace_buffer": a.workspace_buffer.to("meta")},
        lambda a: {"max_seq_len": -70},
        lambda a: {"max_seq_len": 70.0},
        lambda a: {"bmm1_scale": np.float32("nan")},
        lambda a: {"bmm1_scale": 1e300},
        lambda a: {"bmm2_scale": 10**400},
        lambda a: {"qk_nope_head_dim": "128"},
        lambda a: {"use_fp16_softmax": True},
        lambda a: {"kv_scale_format": "pow2_fp32"},
        lambda a: {"sparse_mla_top_k_lens": a.seq_lens},
        lambda a: {"backend": ["cute"]},
    ],
)
def test_a_call_unlike_a_good_one_is_checked(
    change: Callable[[DecodeArgs], dict[str, Any]], needs: int
) -> None:
    args = recorded(native_args(**inputs_of().contract_args()), needs)
    assert replay.replay(args) is not None
    wrong = native_args(**{**inputs_of().contract_args(), **change(args)})
    assert replay.replay(wrong) is None
    with pytest.raises(MlaLabError):
        decode(**{**inputs_of().contract_args(), **change(args)})


def test_defaults_of_the_native_call_are_no_part_of_the_contract_s() -> None:
    args = recorded(native_args(**{**inputs_of().contract_args(), "max_seq_len": None}))
    assert replay.replay(args) is not None
    args.native = False
    assert replay.replay(args) is None
    with pytest.raises(InvalidType, match="max_seq_len: got NoneType"):
        call(**{**inputs_of().contract_args(), "max_seq_len": None})


# --- overlap ------------------------------------------------------------------------------------


def overlapping(name: str, other: str) -> dict[str, Any]:
    """A right call but for one byte that `name` and `other` share."""
    named = inputs_of().contract_args() | {"return_lse": True}
    named |= {"out": torch.empty(2, 2, 4, 512).bfloat16(), "lse": torch.empty(4, 4)}
    named["workspace_buffer"] = torch.zeros(4096, dtype=torch.uint8)
    own, wanted = named[other], named[name]
    size, more = own.numel() * own.element_size(), wanted.numel() * wanted.element_size()
    memory = torch.zeros(size + more + 128, dtype=torch.uint8)
    begin = -memory.data_ptr() % 64
    moved = memory[begin : begin + size].view(own.dtype).view(own.shape)
    moved.copy_(own)
    end = begin + size - 1 & ~63
    named[name] = memory[end : end + more].view(wanted.dtype).view(wanted.shape)
    named[other] = moved
    return named


READ = ("query", "kv_cache", "block_tables", "seq_lens")


@pytest.mark.parametrize(
    ("name", "other"),
    [(w, r) for w in ("out", "lse", "workspace_buffer") for r in READ]
    + [("lse", "out"), ("workspace_buffer", "out"), ("workspace_buffer", "lse")],
)
def test_a_result_shares_no_byte(name: str, other: str) -> None:
    named = overlapping(name, other)
    with pytest.raises(InvalidInput, match=r"(out|lse|workspace_buffer): got bytes that are"):
        call(**named)
    named[name] = named[name].clone()
    assert call(**named)[0].isfinite().all()


def test_a_result_may_lie_in_gaps_and_beside_others() -> None:
    named = inputs_of(SMALL, "page_gap").contract_args()
    pages = named["kv_cache"]
    memory = torch.zeros(pages.shape[0] * pages.stride(0) + OUT_ELEMENTS).bfloat16()
    cache = memory.as_strided(pages.shape, pages.stride())
    cache.copy_(pages)
    out = memory[-OUT_ELEMENTS:].view(2, 2, 4, 512)
    expected = call(**named)
    assert torch.equal(call(**{**named, "kv_cache": cache, "out": out}), expected)


def test_a_replayed_result_shares_no_byte_either() -> None:
    inputs = inputs_of()
    out = torch.empty(2, 2, 4, 512).bfloat16()
    args = recorded(native_args(**inputs.contract_args(), out=out))
    assert replay.replay(args) is not None
    for tensor in (args.query, args.kv_cache):
        over = tensor.view(-1)[:OUT_ELEMENTS].view(2, 2, 4, 512)
        assert replay.replay(replace(args, out=over)) is None
    args = recorded(native_args(**inputs.contract_args()), needs=4096)
    moved = inputs.workspace_buffer[: args.query.nbytes].view(torch.bfloat16).view(args.query.shape)
    assert replay.replay(args) is not None
    assert replay.replay(replace(args, query=moved)) is None


def test_gqa_results_share_no_byte() -> None:
    inputs = make_gqa_inputs(GqaShape((1, 1), (70, 9), 8, 2), workspace_bytes=4096)
    with pytest.raises(InvalidInput, match="out: got bytes that are query's too"):
        gqa(**inputs.contract_args(), out=inputs.query)


def test_gqa_results_may_lie_between_keys_and_values() -> None:
    named = make_gqa_inputs(GqaShape((1, 1), (70, 9), 8, 2), workspace_bytes=4096).contract_args()
    keys, values = named["kv_cache"]
    query, size = named["query"], keys.numel()
    memory = torch.zeros(2 * size + query.numel(), dtype=keys.dtype)
    moved = memory[:size].view(keys.shape), memory[-size:].view(values.shape)
    moved[0].copy_(keys), moved[1].copy_(values)
    named["kv_cache"] = moved
    out = memory[size:-size].view(query.shape)
    assert torch.equal(gqa(**named, out=out), gqa(**named))
    for part in moved:
        with pytest.raises(InvalidInput, match="out: got bytes that are kv_cache's too"):
            gqa(**named, out=part.view(-1)[: query.numel()].view(query.shape))


def test_threads_may_share_a_workspace_on_a_cpu() -> None:
    problem = Problem((1, 1), (300, 200), 4)
    plan = make_plan(problem, policy="fixed", num_splits=3)
    shared = torch.zeros(plan.workspace.nbytes, dtype=torch.uint8)
    wrong: list[float] = []

    def work(seed: int) -> None:
        inputs = make_inputs(problem, seed, workspace_bytes=64)
        named = inputs.contract_args() | {"workspace_buffer": shared, "plan": plan}
        expected = decode_reference(inputs).out
        wrong.extend(e for _ in range(6) if (e := rel_error(call(**named), expected)) > 4e-3)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert "a buffer" in (DecodeArgs.__doc__ or "") and "two streams" in (DecodeArgs.__doc__ or "")


# --- numbers ------------------------------------------------------------------------------------

BAD_SCALES = [np.float32("nan"), float("inf"), 10**400, 10**5000, 1e300, -1e39, Fraction(10**400)]


@pytest.mark.parametrize("name", ["bmm1_scale", "bmm2_scale"])
@pytest.mark.parametrize("value", BAD_SCALES, ids=lambda v: type(v).__name__)
def test_scales_are_checked_in_every_call(name: str, value: Any) -> None:
    named = inputs_of().contract_args()
    for good in (0.05, np.float32(0.05), 1, Fraction(1, 20)):
        assert call(**{**named, name: good}).isfinite().all()
    with pytest.raises(InvalidInput, match=rf"{name}: got"):
        call(**{**named, name: value})


@pytest.mark.parametrize("slots", [np.int64(4), np.int64(64), np.uint8(64)])
def test_a_size_of_numpy_is_a_size(slots: Any) -> None:
    named = inputs_of(replace(SMALL, top_k=8)).contract_args()
    with pytest.raises(InvalidInput, match=rf"block_tables: got shape .*, {slots}\]"):
        call(**{**named, "sparse_mla_top_k": slots})
    with pytest.raises(InvalidInput, match=rf"block_tables: got shape .*, {slots}\]"):
        explain(**{**named, "sparse_mla_top_k": slots})
    expected = call(**named)
    assert torch.equal(call(**{**named, "sparse_mla_top_k": np.int64(8)}), expected)


def test_integers_of_numpy_are_plain_ones_once() -> None:
    """Backends take bit lengths of a bound, and a recorded call with a plain int is replayed."""
    args = recorded(native_args(**inputs_of().contract_args()))
    given = replace(args, max_seq_len=np.int64(args.max_seq_len), cp_world=np.uint8(1))
    assert replay.replay(given) is None
    form_of(given)
    assert type(given.max_seq_len) is int and type(given.cp_world) is int
    assert replay.replay(given) is not None
    with pytest.raises(InvalidType, match="cp_world: got bool"):
        form_of(replace(args, cp_world=True))
    for ranks in (2**31, 2**61, 2**70):  # positions of keys would not fit into 64 bits
        with pytest.raises(InvalidInput, match="cp_world: got"):
            form_of(replace(args, cp_world=ranks))
    inputs = make_gqa_inputs(GqaShape((1, 1), (70, 9), 8, 2), workspace_bytes=4096)
    checked = check_gqa(GqaArgs(**inputs.contract_args(), window_left=np.int32(5)))
    assert type(checked.args.window_left) is int


def test_a_call_with_integers_of_numpy_is_replayed() -> None:
    named = inputs_of().contract_args()
    out = torch.zeros(2, 2, 4, 512).bfloat16()
    args = native_args(**named, out=out)
    args.native = False
    recorded(args)
    assert call(**named, out=out) is out and not out.any()
    bound = np.int64(named["max_seq_len"])
    assert call(**{**named, "max_seq_len": bound}, out=out) is out
    assert not out.any(), "the recorded launch writes nothing"


@pytest.mark.parametrize("value", [np.float16(0.0417), np.float16(50000), np.float32(0.1)])
def test_a_scale_of_numpy_is_multiplied_in_double(value: Any) -> None:
    assert number(value, math.log2(math.e)) == float(value) * math.log2(math.e)


def test_a_skip_factor_of_numpy_is_divided_in_double() -> None:
    """A factor over a length is below what fp16 holds: nothing would be skipped."""
    wide = dict.fromkeys(("q_dtype", "kv_format", "out_dtype"), "fp64")
    inputs = make_inputs(Problem((1,), (3000,), 1, **wide), 1, workspace_bytes=12 << 20)
    inputs = replace(inputs, bmm1_scale=1.0)
    factor = np.float16(2e-5)
    given = replace(inputs, skip_softmax_threshold_scale_factor=factor)
    plain = replace(inputs, skip_softmax_threshold_scale_factor=float(factor))
    for run in (lambda a: call(**a.contract_args()), lambda a: decode_reference(a).out):
        assert torch.equal(run(given), run(plain)) and not torch.equal(run(given), run(inputs))


@pytest.mark.parametrize("value", [0.0, -0.05, np.float32(-0.05), Fraction(-1, 20)])
def test_scales_that_are_not_above_0(value: Any) -> None:
    """The torch backend is right, and a number is known not to be for the CuTe kernels; those read
    a tensor (see test_emulate_builds).
    """
    for scale in (value, torch.tensor([float(value)])):
        inputs = replace(inputs_of(), bmm1_scale=scale)
        out, lse = call(**inputs.contract_args(), return_lse=True)
        expected = decode_reference(replace(inputs, bmm1_scale=float(value)))
        assert rel_error(out, expected.out) < 4e-3 and lse_error(lse, expected.lse) < 1e-5
    assert form_of(replace(inputs, bmm1_scale=value)).features.nonpositive_scale


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_scale_in_memory_that_is_not_finite_is_seen_in_debug_mode(value: float) -> None:
    inputs = replace(inputs_of(), bmm1_scale=torch.tensor([value]))
    for device in (form_of(inputs), replace(form_of(inputs), on_host=False)):
        with pytest.raises(InvalidInput, match=r"bmm1_scale: got a tensor of -?(nan|inf)"):
            bind(inputs, device, reads_lengths=device.on_host, debug=True)


def test_debug_mode_reads_a_scale_that_has_a_gradient() -> None:
    inputs = replace(inputs_of(), bmm1_scale=torch.tensor([0.07], requires_grad=True))
    bind(inputs, form_of(inputs), reads_lengths=True, debug=True)  # warnings are errors


def test_a_skip_factor_of_0_is_none_in_a_sparse_call() -> None:
    inputs = replace(inputs_of(replace(SMALL, top_k=7)), skip_softmax_threshold_scale_factor=0.0)
    none = replace(inputs, skip_softmax_threshold_scale_factor=None)
    assert torch.equal(call(**inputs.contract_args()), call(**none.contract_args()))
    assert torch.equal(decode_reference(inputs).out, decode_reference(none).out)


def test_a_mask_between_words_is_named() -> None:
    inputs = inputs_of(SMALL, "tree_mask")
    assert inputs.mask is not None
    memory = torch.zeros(inputs.mask.numel() + 1, dtype=torch.uint16)
    place = memory[1:].view(inputs.mask.shape)
    place.copy_(inputs.mask)
    moved = replace(inputs, mask=place)
    assert moved.mask is not None and moved.mask.data_ptr() % 4 == 2
    with pytest.raises(InvalidInput, match=r"mask: got address 0x\w+; supported: multiples of 4"):
        bind(moved, form_of(moved), reads_lengths=False, debug=False)
    assert torch.equal(call(**moved.contract_args()), call(**inputs.contract_args()))


def test_the_cuda_backend_refuses_what_its_counters_do_not_hold(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """auto goes on to torch, where it took a call that raised."""
    monkeypatch.setattr(xqa, "build_reason", lambda *_: None)
    many = Problem((1,) * 4200, (4096,) * 4200, 128, page_size=64)
    backend = cuda.CudaBackend()
    reason = backend.supports(Features(batch_invariant=True), many, H200)
    assert reason is not None and "batch_invariant" in reason
    assert backend.supports(Features(), many, H200) is None
    few = Problem((1,) * 32, (4096,) * 32, 128, page_size=64)
    assert backend.supports(Features(batch_invariant=True), few, H200) is None


# --- plans --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "edit",
    [
        lambda p: replace(p, tiles=p.tiles[:-1].copy()),
        lambda p: replace(p, tiles=np.concatenate([p.tiles, p.tiles[:1]])),
        lambda p: replace(p, tile_kv=p.tile_kv * 2),
        lambda p: replace(p, tile_rows=p.tile_rows // 4),
        lambda p: replace(p, worker_begin=p.worker_begin[1:].copy()),
        lambda p: replace(p, tiles=np.where(np.arange(8) == 6, p.tiles + 900, p.tiles)),
    ],
)
def test_a_plan_that_was_edited_is_checked(edit: Callable[[Any], Any]) -> None:
    problem = Problem((1, 2), (700, 300), 16)
    inputs = inputs_of(problem)
    plan = make_plan(problem, policy="fixed", num_splits=3, tile_rows=16)
    inputs = replace(inputs, workspace_buffer=zero_bytes(16 << 20))
    assert call(**inputs.contract_args(), plan=plan).isfinite().all()
    with pytest.raises(InvalidInput, match="plan: got inconsistent"):
        call(**inputs.contract_args(), plan=edit(plan))


# --- modes and odd tensors ----------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_autocast_changes_nothing(dtype: str) -> None:
    inputs = inputs_of(Problem((2, 2), (70, 9), 4, q_dtype=dtype, kv_format=dtype))
    shape = GqaShape((1, 1), (70, 9), 8, 2, q_dtype=dtype, kv_format=dtype)
    named = make_gqa_inputs(shape, workspace_bytes=64).contract_args()
    expected = call(**inputs.contract_args()), gqa(**named)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = call(**inputs.contract_args()), gqa(**named)
    assert all(map(torch.equal, got, expected))


def test_results_of_either_mode() -> None:
    inputs = inputs_of()
    expected = call(**inputs.contract_args())
    with torch.inference_mode():
        out = torch.empty_like(expected)
        assert torch.equal(call(**inputs.contract_args()), expected)
    assert torch.equal(call(**inputs.contract_args(), out=out), expected)
    with torch.inference_mode():
        normal = expected.clone()
        assert torch.equal(call(**inputs.contract_args(), out=normal), expected)


def nested() -> torch.Tensor:
    parts = [torch.zeros(2, 4, 576), torch.zeros(1, 4, 576)]
    return torch.nested.nested_tensor(parts, layout=torch.jagged)


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("query", lambda: torch.zeros(2, 2, 4, 576).to_sparse(), "layout is torch.sparse_coo"),
        ("query", nested, "layout is nested|layout is torch.jagged"),
        ("sinks", lambda: torch.zeros(4).to_sparse(), "layout is torch.sparse_coo"),
        ("sinks", lambda: [torch.zeros(4).to_sparse()], "layout is torch.sparse_coo"),
    ],
)
def test_layouts_without_strides_are_refused(
    name: str, value: Callable[[], Any], says: str
) -> None:
    with pytest.raises(Unsupported, match=f"{name}: got .*({says})"):
        call(**{**inputs_of().contract_args(), name: value()})


def test_tensors_without_values_are_refused() -> None:
    from torch._subclasses import FakeTensorMode

    named = inputs_of().contract_args()
    tensors = {k: v for k, v in named.items() if isinstance(v, torch.Tensor)}
    with pytest.raises(Unsupported, match="query: got tensors on meta, which have no values"):
        call(**named | {k: v.to("meta") for k, v in tensors.items()})
    with FakeTensorMode() as mode, pytest.raises(Unsupported, match="query: got a FakeTensor"):
        call(**named | {k: mode.from_tensor(v) for k, v in tensors.items()})


def freed(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor without its memory, as sharded training leaves parameters between two steps."""
    copy = tensor.clone()
    copy.untyped_storage().resize_(0)
    return copy


@pytest.mark.parametrize(
    "name", ["query", "kv_cache", "block_tables", "seq_lens", "workspace_buffer", "out"]
)
def test_a_tensor_whose_memory_was_freed_is_refused(name: str) -> None:
    named = inputs_of().contract_args()
    out = torch.full((*named["query"].shape[:-1], 512), 7.0, dtype=torch.bfloat16)
    named |= {"out": out, "workspace_buffer": torch.zeros(64, dtype=torch.uint8)}
    with pytest.raises(InvalidInput, match=f"^{name}: got address 0: its memory was freed"):
        call(**named | {name: freed(named[name])})
    assert bool((out == 7).all())


@pytest.mark.parametrize("name", [n for n in inputs_of().contract_args() if n != "bmm1_scale"])
def test_a_list_that_contains_itself_is_refused(name: str) -> None:
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises((InvalidInput, Unsupported), match=name.split("_head")[0]):
        call(**{**inputs_of().contract_args(), name: endless})
    with pytest.raises(InvalidInput, match="sinks: got"):
        call(**inputs_of().contract_args(), sinks=endless)


def test_nan_in_a_draft_s_key_stays_in_the_rows_of_its_request() -> None:
    inputs = make_inputs(Problem((2, 2), (100, 70), 4), 0, ["lse"])
    named = inputs.contract_args()
    last = named["kv_cache"].view(len(named["kv_cache"]), -1, 576)[named["block_tables"][0, 1]]
    last[99 - last.shape[0]] = math.nan
    out, lse = call(**named)
    assert out[0, 1].isnan().all() and lse.view(2, 2, 4)[0, 1].isnan().all()
    assert lse.view(2, 2, 4)[0, 0].isfinite().all()
    assert out[1].isfinite().all() and lse.view(2, 2, 4)[1].isfinite().all()


def test_explain_checks_too() -> None:
    with pytest.raises(InvalidInput, match="query"):
        explain(None, None, None, None)
    given = inputs_of().contract_args()
    names = ("query", "kv_cache", "block_tables", "seq_lens", "bmm1_scale")
    named = {name: given[name] for name in names}
    explain(**named)
    for name, value in {"bmm1_scale": math.nan, "max_seq_len": "x", "plan": 3}.items():
        with pytest.raises(InvalidInput, match=f"{name}: got"):
            explain(**{**named, name: value})


def test_the_page_of_hostile_input_names_tests() -> None:
    root = Path(__file__).parents[1]
    page = (root / "data/notes/hardening.md").read_text(encoding="utf-8")
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", page)
    assert len(named) > 40
    for file, test in named:
        assert f"def {test}(" in (root / file).read_text(encoding="utf-8"), (file, test)


@pytest.mark.parametrize("name", ["query", "kv_cache", "block_tables", "out"])
def test_a_tensor_that_holds_others_is_refused_before_anything_runs(name: str) -> None:
    named = make_inputs(Problem((1, 2), (70, 9), 4), 1).contract_args()
    named["out"] = torch.ones(*named["query"].shape[:-1], 512, dtype=torch.bfloat16)
    given = {**named, name: TwoTensor(named[name], named[name])}
    with pytest.raises(Unsupported, match=f"{name}: got a TwoTensor, which holds other tensors"):
        call(**given)
    assert (named["out"] == 1).all()
