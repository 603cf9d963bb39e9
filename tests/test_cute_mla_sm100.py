"""cute/mla_sm100 on a machine without a Blackwell card: what it takes, recorded calls, the list."""

from __future__ import annotations

from collections import Counter
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch

from mla_lab import jit
from mla_lab.backends.cute import blackwell
from mla_lab.backends.cute.backend import CuteBackend
from mla_lab.backends.emulate.backend import EmulateSm100Backend
from mla_lab.call.form import Features
from mla_lab.core.errors import Unsupported
from mla_lab.core.gpu import B200, H200
from mla_lab.core.problem import Problem
from mla_lab.core.resources import data_dir
from mla_lab.emulate import EmulatedKernel, Options, recorded
from mla_lab.emulate.calls import (
    EIGHT_BITS,
    NAMES,
    SIXTEEN_BITS,
    Call,
    call_of,
    is_right,
    make_call,
    problem_for,
)
from mla_lab.jit import shipped
from mla_lab.jit.cubin import KernelResources
from mla_lab.plan.config import KernelConfig
from mla_lab.reference.inputs import make_inputs
from mla_lab.reference.mla import decode_reference
from mla_lab.reference.tolerance import lse_error, rel_error
from mla_lab.verify import sm100, sm100_builds, sm100_lists
from mla_lab.verify.pairwise import allowed_pairs, pairs_of
from mla_lab.verify.sm100_lists import FACTORS
from mla_lab.xray import KernelReport

pytest.importorskip("cutlass")
from mla_lab.cute import mla_sm100
from mla_lab.cute.common.ptx_sm100 import instruction_descriptor
from mla_lab.cute.mla_sm100 import params
from mla_lab.cute.rows_on_m.params import ELEMENTS, SHARED_BYTES

from .needs import needs_time

ARCHIVE = data_dir() / "runtime/emulate_sm100.zip"
RECORDED = recorded.recordings(archive=ARCHIVE)
PROBLEM = Problem(q_lens=(1, 1), kv_lens=(300, 77), heads=128)


def result(name: str, options: Options) -> tuple[Call, list[str]]:
    recording = recorded.load(name, ARCHIVE)
    call, kernel = recording.call(), recording.kernel(options)
    kernel(*call.args)
    return call, [str(finding) for finding in kernel.run.findings]


@pytest.mark.parametrize("name", RECORDED)
def test_recorded_call_is_right_and_nothing_is_found(name: str) -> None:
    call, findings = result(name, Options(check=True))
    assert is_right(call), call.errors()
    assert findings == []


def test_recordings_have_sixteen_bits_eight_bits_and_both_with_a_draft_mask() -> None:
    configs = [recorded.load(name, ARCHIVE).config for name in RECORDED]
    kinds = {(c.q_dtype, c.kv_format, c.mask) for c in configs}
    assert kinds == {
        ("bf16", "bf16", "none"),
        ("e4m3", "e4m3", "none"),
        ("bf16", "e4m3", "tree"),
    }


@pytest.mark.compiler
def test_a_build_of_this_source_is_right() -> None:
    """The recorded calls are of earlier sources; this one is compiled here."""
    config = sm100_lists.build_of("bf16", "bf16", 64)
    kernel = EmulatedKernel.of(jit.compile(config, "sm_100a"), Options(check=True))
    found = problem_for(config, (330, 77), heads=64, q_len=2), 0, 0
    # each worker has four work tiles, one more than there are records
    planned = problem_for(config, (700,), heads=128, q_len=4), 2, 2
    for problem, splits, workers in (found, planned):
        call = make_call(config, problem, splits, workers=workers)
        kernel(*call.args)
        assert kernel.run.findings == [] and is_right(call)


@pytest.mark.compiler
@pytest.mark.parametrize(
    ("splits", "length"),
    [
        (1, 385),
        (3, 2**31 - 1),
        *(pytest.param(*case, marks=needs_time) for case in ((1, 2**31 - 1), (3, 385))),
    ],
)
def test_requests_outside_of_the_table_or_of_q_are_nan(splits: int, length: int) -> None:
    """The second request is longer than its row of the table; in a second call the first one's
    query tokens begin below 0 and the last one's end beyond q."""
    config = sm100_lists.build_of("bf16", "bf16", 64)
    kernel = EmulatedKernel.of(jit.compile(config, "sm_100a"), Options(check=True))
    problem = problem_for(config, (250, 130, 200), heads=64, q_len=2)
    for name, at, value, tokens in (
        ("seq_lens", slice(1, 2), [length], [2, 3]),
        ("q_begin", slice(0, 4, 3), [-1, length], [0, 1, 4, 5]),
    ):
        call = make_call(config, problem, splits)
        table = call.args[NAMES.index("block_tables")]
        if name == "seq_lens":
            table[1] = table[1, 0]  # a page that may be read
        assert table.shape[1] * config.page_size == 384
        call.args[NAMES.index(name)][at] = torch.tensor(value, dtype=torch.int32)
        kernel(*call.args)
        assert kernel.run.findings == []
        out, lse = call.out.reshape(6, -1), call.lse.view(6, -1)
        assert bool(out[tokens].isnan().all()) and bool(lse[tokens].isnan().all())
        right = [token for token in range(6) if token not in tokens]
        expected = call.expected.out.reshape(6, -1)[right], call.expected.lse.view(6, -1)[right]
        assert rel_error(out[right], expected[0]) < SIXTEEN_BITS[0]
        assert lse_error(lse[right], expected[1]) < SIXTEEN_BITS[1]


@pytest.mark.compiler
def test_a_query_of_zeros_weighs_all_keys_alike() -> None:
    config = sm100_lists.build_of("bf16", "e4m3", 64)
    inputs = make_inputs(problem_for(config, (150,), heads=64), 0, ["lse"], workspace_bytes=64)
    inputs.query.zero_()
    call = call_of(config, replace(inputs, bmm1_scale=1e-9), 1)
    EmulatedKernel.of(jit.compile(config, "sm_100a"))(*call.args)
    assert rel_error(call.out.view_as(call.expected.out), call.expected.out) < EIGHT_BITS[0]


def test_bits_do_not_depend_on_the_schedule() -> None:
    plain, _ = result(RECORDED[0], Options(numbers="exact"))
    other, _ = result(RECORDED[0], Options(numbers="exact", schedule="adverse", seed=1))
    assert torch.equal(plain.out, other.out) and torch.equal(plain.lse, other.lse)


@pytest.mark.parametrize(("q_dtype", "kv_format"), mla_sm100.TAKEN)
@pytest.mark.parametrize("page_size", mla_sm100.PAGE_SIZES)
def test_shared_memory_and_tensor_memory_fit(q_dtype: str, kv_format: str, page_size: int) -> None:
    facts = mla_sm100.static_facts(sm100_lists.build_of(q_dtype, kv_format, page_size))
    assert facts.shared_bytes <= SHARED_BYTES
    used = params.O_COLUMN + params.V_COLUMNS
    assert 2 * params.S_COLUMNS <= params.O_COLUMN and used <= params.TMEM_COLUMNS


def test_plain_builds_are_what_a_selection_without_settings_names() -> None:
    for arch in sm100_builds.ARCHS:
        chosen = shipped.select(["cute/mla_sm100"], [], arch)
        assert {(c.q_dtype, c.kv_format) for c in chosen} == set(mla_sm100.TAKEN)
        for config in chosen:
            mla_sm100.static_facts(config)


@pytest.mark.parametrize(
    ("change", "columns", "status"),
    [
        ({}, 512, "ok"),
        ({"stack": 8}, 512, "wrong"),
        ({"dynamic_shared": 231425}, 512, "wrong"),
        ({"dynamic_shared": 113 << 10}, 512, "wrong"),
        ({}, 544, "wrong"),
        ({}, -1, "wrong"),
        ({}, 0, "wrong"),
    ],
)
def test_what_a_build_may_take(change: dict[str, int], columns: int, status: str) -> None:
    used = replace(KernelResources("mla", 219, 0, 1024, 3, 231424, (256, 1, 1)), **change)
    assert sm100_builds.status(KernelReport("mla", used, (), Counter()), columns) == status


def test_tensor_columns_are_read_from_ptx() -> None:
    line = "tcgen05.alloc.cta_group::2.sync.aligned.shared::cta.b32 \t[%r322], {};"
    by_register = line.format("%r2269")
    assert sm100_builds.tensor_columns(f"mov.b32 \t%r2269, 512;\n{by_register}") == 512
    assert sm100_builds.tensor_columns(line.format("64") + line.format("32")) == 96
    assert sm100_builds.tensor_columns(by_register) == -1


def test_instruction_descriptors_have_the_bits_of_the_isa() -> None:
    bf16 = ELEMENTS["bf16"]
    assert instruction_descriptor(bf16, 128, False) == 0x8200490
    assert instruction_descriptor(bf16, 256, True) == 0x8410490
    assert instruction_descriptor(ELEMENTS["e4m3"], 128, False) == 0x8200010


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"q_dtype": "fp16", "kv_format": "e4m3"}, "q_dtype, kv_format"),
        ({"out_dtype": "e4m3"}, "out_dtype"),
        ({"tile_rows": 64}, "tile_rows"),
        ({"page_size": 8}, "page_size"),
        ({"options": (("skip", 1),)}, "skip"),
        ({"options": (("stages", 2),)}, "stages"),
    ],
)
def test_what_is_not_compiled_is_refused_by_name(changes: dict[str, object], words: str) -> None:
    config: KernelConfig = replace(sm100_lists.build_of("bf16", "bf16", 64), **changes)  # type: ignore[arg-type]
    with pytest.raises(Unsupported, match=words):
        mla_sm100.static_facts(config)


def test_a_card_takes_it_by_consent_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MLA_LAB_CACHE_DIR", str(tmp_path))  # of no proofs
    monkeypatch.delenv(blackwell.CONSENT, raising=False)
    refused = CuteBackend().supports(Features(), PROBLEM, B200)
    assert refused is not None and blackwell.MARK in refused and blackwell.CONSENT in refused
    assert "mla-lab doctor --prove" in refused
    monkeypatch.setenv(blackwell.CONSENT, "1")
    assert blackwell.no_consent(B200) is None
    assert blackwell.is_blackwell(replace(B200, arch="sm_103"))
    assert not blackwell.is_blackwell(H200)


LACKS = [field.name for field in fields(Features) if field.name not in blackwell.TAKES]


@pytest.mark.parametrize("name", LACKS)
def test_features_without_a_kernel_are_refused(name: str) -> None:
    refused = EmulateSm100Backend().lacks(Features(**{name: True}), PROBLEM)
    assert refused is not None


def test_formats_and_pages_without_a_kernel_are_refused() -> None:
    assert "pages of 8" in str(blackwell.refusal(Features(), replace(PROBLEM, page_size=8)))
    assert set(blackwell.TAKEN) == set(mla_sm100.TAKEN)
    of_656 = replace(PROBLEM, kv_format="fp8_656")
    assert "bf16 over e4m3" in str(blackwell.refusal(Features(), of_656))


def test_plans_are_of_the_kernel_in_either_kind() -> None:
    for features in (Features(), Features(batch_invariant=True)):
        planned = blackwell.plan(PROBLEM, 2, B200, features)
        assert planned.config.kernel == "cute/mla_sm100" and planned.config.tile_rows == 128


def test_features_are_run_in_every_pair() -> None:
    runs = list(sm100_lists.feature_runs())
    found = {pair for case in sm100_lists.feature_cases() for pair in pairs_of(case, FACTORS)}
    assert found == set(allowed_pairs(FACTORS, sm100_lists.allowed)) and len(found) > 250
    assert {run.config.out_dtype for run in runs} == {"bf16", "fp16", "e4m3"}
    assert (1, 3) in {run.problem.q_lens for run in runs}
    assert {run.splits for run in runs} == {0, 1, 2, 3, None}


@pytest.mark.parametrize("ragged", [False, True])
def test_a_request_of_a_batch_alone_has_its_own_inputs(ragged: bool) -> None:
    lens = (1, 3) if ragged else (2, 2)
    problem = Problem(q_lens=lens, kv_lens=(70, 130), heads=4)
    inputs = make_inputs(problem, 1, ["lse", "tree_mask"], workspace_bytes=64)
    whole = decode_reference(inputs)
    first = 0
    for request, tokens in enumerate(lens):
        alone = sm100.request_of(inputs, request)
        assert alone.problem.kv_lens == (problem.kv_lens[request],)
        expected = decode_reference(alone)
        rows = whole.out.reshape(-1, 4, 512)[first : first + tokens]
        assert torch.equal(expected.out.reshape(rows.shape), rows)
        first += tokens
