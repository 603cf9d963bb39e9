"""The native call: its verbs, the choice of a backend, and what a call on a device may read."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import ModuleType

import pytest
import torch

from mla_lab import backends
from mla_lab.api.contract import trtllm_batch_decode_with_kv_cache_mla
from mla_lab.api.decode import decode, explain
from mla_lab.backends.base import plan_for
from mla_lab.call.bind import Call, bind
from mla_lab.call.checks import form_cache as forms
from mla_lab.call.checks import form_of
from mla_lab.call.decode_args import native_args
from mla_lab.call.form import Features
from mla_lab.call.workspace import Workspace
from mla_lab.core.errors import InvalidInput, Unsupported
from mla_lab.core.problem import Problem
from mla_lab.plan import make_plan
from mla_lab.reference.inputs import make_inputs

PROBLEM = Problem((2, 1), (100, 7), 4, page_size=32)


def arguments(features=(), **changes):
    return make_inputs(PROBLEM, 1, features).contract_args() | changes


def call_of(**given) -> Call:
    checked = native_args(**given)
    return bind(checked, form_of(checked), reads_lengths=True, debug=False)


class Recorder:
    """A backend that runs nothing and keeps what it was given."""

    name = "cute"
    reads_lengths = False
    follows_plans = True
    reason: str | None = None

    def __init__(self) -> None:
        self.calls: list[tuple] = []
        self.asked = 0

    def supports(self, features, problem, gpu):
        self.asked += 1
        return "draft masks are not built" if features.mask else self.reason

    def plan(self, call, gpu):
        return make_plan(call.problem, policy="none")

    def run(self, call, plan, workspace):
        self.calls.append((call, plan, workspace))


@pytest.fixture
def recorder(monkeypatch):
    """The recorder in the place of the first backend, and none in that of the second."""
    made = Recorder()
    module = ModuleType("recorder")
    monkeypatch.setattr(module, "make", lambda: made, raising=False)
    monkeypatch.setitem(sys.modules, "recorder", module)
    modules = {"cute": "recorder:make", "torch": backends.MODULES["torch"]}
    monkeypatch.setattr(backends, "MODULES", modules)
    for remembered in (backends.choose, backends._instance):
        remembered.cache_clear()
    monkeypatch.setattr(forms, "_FORMS", {})
    yield made
    for remembered in (backends.choose, backends._instance):
        remembered.cache_clear()


def on_meta(given):
    """The same call with tensors that have no values: whoever reads one fails."""
    return {
        name: value.to("meta") if isinstance(value, torch.Tensor) else value
        for name, value in given.items()
    }


class TestForm:
    def test_equal_calls_share_it(self):
        assert form_of(native_args(**arguments())) is form_of(native_args(**arguments()))

    @pytest.mark.parametrize(
        "change",
        [
            {"return_lse": True},
            {"sinks": torch.zeros(4)},
            {"bmm1_scale": torch.ones(1)},
            {"batch_invariant": True},
            {"max_q_len": 4},
            {"kv_cache": torch.zeros(9, 32, 576, dtype=torch.bfloat16)},
        ],
    )
    def test_other_calls_do_not(self, change):
        assert form_of(native_args(**arguments())) is not form_of(
            native_args(**arguments(**change))
        )

    def test_a_flag_of_the_wrong_type_is_not_taken_for_a_known_one(self):
        decode(**arguments())
        with pytest.raises(TypeError, match="return_lse"):
            decode(**arguments(return_lse=0))

    def test_it_forgets_when_there_are_too_many(self, monkeypatch):
        monkeypatch.setattr(forms, "_FORMS", {})
        monkeypatch.setattr(forms, "MAX_FORMS", 3)
        for lse in (False, True):
            for invariant in (False, True):
                form_of(native_args(**arguments(return_lse=lse, batch_invariant=invariant)))
        assert len(forms._FORMS) == 1

    def test_bounds_are_what_the_table_can_name(self):
        bounds = form_of(native_args(**arguments())).bounds
        assert set(bounds.q_lens) == {3}
        assert bounds.kv_lens == (arguments()["block_tables"].shape[1] * 32,) * 2

    def test_features_are_those_in_use(self):
        names = {"sinks", "tree_mask", "page_gap", "device_scales", "lse", "max_q_len"}
        form = form_of(native_args(**arguments(names)))
        expected = {"ragged", "mask", "sinks", "lse", "tensor_scales", "strided_pages"}
        assert set(form.features.names()) == expected
        assert Features(causal=True).names() == ("causal",)


class TestCall:
    def test_views_are_the_callers_memory(self):
        given = arguments(["separate_tables", "cache_4d"])
        call = call_of(**given)
        assert call.query_rows.data_ptr() == given["query"].data_ptr()
        assert call.query_rows.shape == (3 * 4, 576)
        assert call.pages.data_ptr() == given["kv_cache"].data_ptr()
        assert call.value_table.data_ptr() == given["block_tables"][:, 1].data_ptr()

    def test_its_problem_has_the_lengths_of_a_cpu_call(self):
        call = call_of(**arguments())
        assert call.lengths_known
        assert call.problem == PROBLEM

    def test_it_cannot_be_changed(self):
        with pytest.raises(AttributeError):
            call_of(**arguments()).out = torch.empty(0)  # type: ignore[misc]


class TestOnADevice:
    """A kernel backend must not read a value: meta tensors have none."""

    def test_nothing_is_read(self, recorder):
        features = ["max_q_len", "sinks", "device_scales"]
        given = on_meta(arguments(features, return_lse=True))
        out, lse = decode(**given)
        call, plan, workspace = recorder.calls[0]
        assert out.shape == (3, 4, 512)
        assert lse.shape == (3, 4)
        assert not call.lengths_known
        assert call.problem.kv_lens == (100, 100)
        assert plan.problem is call.problem
        assert isinstance(workspace, Workspace)

    def test_dense_query_lengths_are_known_without_a_look(self, recorder):
        given = on_meta(arguments())
        del given["cum_seq_lens_q"]
        decode(**given | {"query": torch.empty(2, 3, 4, 576, dtype=torch.bfloat16, device="meta")})
        call, *_ = recorder.calls[0]
        assert call.lengths == ((3, 3), None)

    def test_prefix_sums_are_read_where_no_bound_is_given(self, recorder):
        with pytest.raises((NotImplementedError, RuntimeError), match="meta"):
            decode(**on_meta(arguments()))

    def test_a_plan_is_checked_against_bounds_once(self, recorder):
        given = on_meta(arguments(["max_q_len"]))
        plan = make_plan(replace(PROBLEM, kv_lens=(90, 7)))
        for _ in range(2):
            decode(**given, plan=plan)
        assert [p for _, p, _ in recorder.calls] == [plan, plan]
        assert list(recorder.calls[0][0].form.fitting_plans.values()) == [plan]
        longer = make_plan(replace(PROBLEM, kv_lens=(101, 7)))
        decode(**given, plan=longer)
        wider = make_plan(replace(PROBLEM, q_lens=(9, 2)))
        with pytest.raises(InvalidInput, match=r"q_lens\[0\] of 9; supported: up to this call"):
            decode(**given, plan=wider)

    def test_the_backend_is_asked_once_for_equal_calls(self, recorder):
        given = on_meta(arguments(["max_q_len"]))
        for _ in range(3):
            decode(**given)
        assert recorder.asked == 1
        assert len(recorder.calls) == 3


class TestBackends:
    def test_auto_takes_the_first_that_can(self, recorder):
        decode(**arguments())
        assert len(recorder.calls) == 1
        decode(**arguments(["chain_mask"]))
        assert len(recorder.calls) == 1  # the torch backend ran it

    def test_explain_gives_each_its_reason(self, recorder):
        verdicts = explain(**arguments(["chain_mask"]))
        assert [str(v) for v in verdicts] == [
            "cute: draft masks are not built",
            "cuda: this build has no such backend",
            "torch: taken",
        ]
        assert [str(v) for v in explain(**arguments())] == [
            "cute: taken",
            "cuda: this build has no such backend",
            "torch: could, comes later",
        ]
        assert recorder.calls == []

    def test_a_named_backend_raises_its_reason(self, recorder):
        with pytest.raises(Unsupported, match="draft masks are not built; torch can run this"):
            decode(**arguments(["chain_mask"], backend="cute-dsl"))

    def test_auto_says_why_nobody_can(self, recorder, monkeypatch):
        recorder.reason = "no card here"
        with pytest.raises(Unsupported, match=r"'auto'.*cute: no card here; cuda: .*torch: enable"):
            decode(**arguments(enable_pdl=True))

    def test_the_torch_backend_still_serves_by_name(self, recorder):
        assert decode(**arguments(backend="torch")).isfinite().all()
        assert recorder.calls == []


class TestPlans:
    def test_layers_of_a_step_share_one(self):
        plan_for.cache_clear()
        for _ in range(3):
            decode(**arguments())
        assert plan_for.cache_info().misses == 1

    def test_native_call_brings_its_own_workspace(self):
        given = arguments(max_seq_len=None, workspace_buffer=None)
        plan = make_plan(PROBLEM, policy="fixed", num_splits=2)
        assert plan.num_slots
        expected = decode(**arguments(plan=plan))
        assert torch.equal(decode(**given, plan=plan), expected)

    def test_workspace_slices_are_where_the_layout_says(self):
        plan = make_plan(PROBLEM, policy="fixed", num_splits=2)
        buffer = torch.zeros(plan.workspace.nbytes, dtype=torch.uint8)
        workspace = Workspace.of(plan.workspace, buffer, buffer.device)
        part = workspace["partial_lse"]
        assert part.dtype is torch.float32
        assert part.shape == (plan.num_slots, plan.tile_rows)
        assert part.data_ptr() - buffer.data_ptr() == plan.workspace["partial_lse"].offset


def test_the_contracts_name_is_the_native_call():
    given = make_inputs(PROBLEM, 1).contract_args()
    assert torch.equal(trtllm_batch_decode_with_kv_cache_mla(**given), decode(**arguments()))


def test_eager_calls_do_not_pass_through_torch_library():
    from torch.utils._python_dispatch import TorchDispatchMode

    class Names(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.add(function.namespace)
            return function(*args, **kwargs or {})

    seen: set[str] = set()
    with Names():
        decode(**arguments())
    assert seen == {"aten"}


def test_debug_argument_beats_the_variable(monkeypatch):
    monkeypatch.setenv("MLA_LAB_DEBUG", "1")
    low = arguments(max_seq_len=99)
    assert decode(**low, debug=False).isfinite().all()
    with pytest.raises(InvalidInput, match="max_seq_len"):
        decode(**low)
    monkeypatch.delenv("MLA_LAB_DEBUG")
    with pytest.raises(InvalidInput, match="max_seq_len"):
        decode(**low, debug=True)


def test_one_rank_is_no_context_parallelism() -> None:
    """It has every token: any backend may run it, and the lengths of all are its own."""
    inputs = make_inputs(Problem((1, 2), (70, 9), 4), 1, ["lse", "max_q_len"])
    named = inputs.contract_args()
    one = {"enable_dcp": True, "causal_seqlens_kv_global": inputs.seq_lens}
    assert not form_of(native_args(**named, **one)).features.context_parallel
    assert form_of(native_args(**named, **one, cp_world=2)).features.context_parallel
    for got, expected in zip(decode(**named, **one), decode(**named), strict=True):
        assert torch.equal(got, expected)
    one["causal_seqlens_kv_global"] = inputs.seq_lens + 1
    with pytest.raises(InvalidInput, match=r"causal_seqlens_kv_global.*seq_lens with cp_world 1"):
        decode(**named, **one)
