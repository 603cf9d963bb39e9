"""`mla-lab doctor --prove` on a CPU with stand-ins: lists, record, and which proofs count."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from mla_lab import backends, cli
from mla_lab.backends import self_check
from mla_lab.backends.cute import backend as cute_backend
from mla_lab.backends.cute import blackwell, proofs
from mla_lab.backends.cute import launch as own_launch
from mla_lab.backends.cute.backend import CuteBackend
from mla_lab.backends.cute.catalogue import build_for, missing_for
from mla_lab.call.bind import bind
from mla_lab.call.checks import form_of
from mla_lab.call.decode_args import native_args
from mla_lab.call.form import Features
from mla_lab.core.errors import BuildError, InvalidInput, Unsupported
from mla_lab.core.gpu import B200, H200, Gpu
from mla_lab.core.problem import Problem
from mla_lab.reference.inputs import DecodeInputs, make_inputs, zero_bytes
from mla_lab.reference.mla import decode_reference
from mla_lab.verify import cases, proof_cases, prove, published
from mla_lab.verify.check import Guards, Outcome, run_case
from mla_lab.verify.pairwise import allowed_pairs, pairs_of
from mla_lab.verify.record import read

B300 = replace(B200, name="NVIDIA B300", arch="sm_103")
PROBLEM = Problem(q_lens=(1, 1), kv_lens=(300, 77), heads=128)
OTHER_CARDS = {"A100": "80", "L40S": "89", "RTX 5090": "120", "B400": "110"}
FACTS = {"cases": 3, "date": "2026-11-22"}


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache directory of this test, and no consent but what it holds."""
    root = tmp_path / "cache"
    monkeypatch.setenv("MLA_LAB_CACHE_DIR", str(root))
    monkeypatch.delenv(blackwell.CONSENT, raising=False)
    return root


def check(status: str = "ok", backend: str = "cute", wanted: str = "cute") -> proof_cases.Check:
    return proof_cases.Check("kernels", "a case", wanted, lambda: Outcome(status, backend))


def prove_with(gpu: Gpu, checks: list[proof_cases.Check], path: Path) -> dict[str, Any]:
    return prove.run_checks(gpu, checks, path, lambda text: None)[-1]


# --- consent ----------------------------------------------------------------------------------


@pytest.mark.parametrize("gpu", [B200, B300], ids=["10.0", "10.3"])
def test_a_passed_proof_is_consent_on_this_card(gpu: Gpu, tmp_path: Path) -> None:
    assert blackwell.no_consent(gpu) is not None and blackwell.mark(gpu) == blackwell.MARK
    last = prove_with(gpu, [check(), check()], tmp_path / "record")
    assert last["passed"] and last["remembered"]
    assert last["identity"]["capability"] == proofs.capability(gpu)
    assert blackwell.no_consent(gpu) is None and blackwell.mark(gpu) is None


@pytest.mark.parametrize(
    "checks",
    [
        [check(), check("wrong")],
        [check(), check("failed")],
        [check(), check("refused")],
        [check(), check(backend="torch")],
        [],
        [check(backend="torch", wanted="")],
    ],
    ids=["wrong", "failed", "refused", "by torch", "no case", "nothing of the kernel"],
)
def test_what_is_not_passed_is_no_consent(checks: list[proof_cases.Check], tmp_path: Path) -> None:
    prove_with(B200, checks, tmp_path / "record")
    assert blackwell.no_consent(B200) is not None
    assert not proofs.Identity.of(B200).file.exists()


@pytest.mark.parametrize(
    ("field", "other"),
    [
        ("card", "NVIDIA B100"),
        ("sms", 74),
        ("capability", "10.3"),
        ("mla_lab", "0.0.9"),
        ("sources", "0" * 64),
        ("dsl", "4.0.0"),
    ],
)
def test_a_proof_of_another_card_or_version_does_not_count(field: str, other: object) -> None:
    here = proofs.Identity.of(B200)
    proofs.remember(replace(here, **{field: other}), FACTS)
    assert not proofs.counts(B200)
    proofs.remember(here, FACTS)
    assert proofs.counts(B200)


def test_a_new_version_makes_a_proof_stale(monkeypatch: pytest.MonkeyPatch) -> None:
    proofs.remember(proofs.Identity.of(B200), FACTS)
    assert not proofs.counts(B300) and not proofs.counts(replace(B200, sms=74))
    for name, value in (("__version__", "9.9.9"), ("version_of", lambda name: "9.9.9")):
        with monkeypatch.context() as patch:
            patch.setattr(proofs, name, value)
            assert not proofs.counts(B200)
    monkeypatch.setattr(proofs, "source_hash", lambda kernel: "changed")
    assert not proofs.counts(B200)


@pytest.mark.parametrize(
    "change",
    [{"identity": {}}, {"passed": False}, {"passed": 1}, {"cases": "many"}, {"date": None}],
    ids=lambda change: next(iter(change)),
)
def test_a_file_of_other_content_does_not_count(change: dict[str, Any]) -> None:
    file = proofs.remember(proofs.Identity.of(B200), FACTS)
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    assert not proofs.counts(B200)
    file.write_text("{")
    assert not proofs.counts(B200)


def test_a_file_renamed_to_this_card_does_not_count() -> None:
    other = proofs.remember(proofs.Identity.of(B300), FACTS)
    other.rename(proofs.Identity.of(B200).file)
    assert not proofs.counts(B200)


def test_a_file_that_others_may_write_does_not_count(own_cache: Path) -> None:
    file = proofs.remember(proofs.Identity.of(B200), FACTS)
    for path, mode in ((file, 0o600), (file.parent, 0o700), (own_cache, 0o700)):
        path.chmod(mode | 0o022)
        assert not proofs.counts(B200)
        path.chmod(mode)
    assert proofs.counts(B200)


def test_a_cache_that_others_may_write_remembers_nothing(own_cache: Path) -> None:
    own_cache.mkdir()
    own_cache.chmod(0o777)
    with pytest.raises(BuildError, match="others may write"):
        proofs.remember(proofs.Identity.of(B200), FACTS)


def test_a_proof_that_cannot_be_remembered_keeps_its_record(
    own_cache: Path, tmp_path: Path
) -> None:
    own_cache.mkdir()
    own_cache.chmod(0o777)
    last = prove_with(B200, [check()], tmp_path / "record")
    assert last["passed"] and not last["remembered"]
    assert [row["kind"] for row in read(tmp_path / "record")] == ["run", "case", "proof"]
    assert read(tmp_path / "record")[1]["status"] == "ok"


def test_a_card_that_nothing_is_built_for_has_no_capability() -> None:
    with pytest.raises(InvalidInput, match="sm_70"):
        proofs.capability(replace(B200, arch="sm_70"))


# --- explain ----------------------------------------------------------------------------------


def verdict(monkeypatch: pytest.MonkeyPatch, gpu: Gpu) -> backends.Verdict:
    monkeypatch.setattr(backends, "gpu_of", lambda device: gpu)
    monkeypatch.setattr(CuteBackend, "supports", lambda self, features, problem, card: None)
    given = make_inputs(PROBLEM, 1)
    return backends.explain(form_of(given))[0]


def test_explain_marks_a_launch_until_it_is_proved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(blackwell.CONSENT, "1")
    assert blackwell.no_consent(B200) is None
    assert str(verdict(monkeypatch, B200)) == "cute: taken (emulated, never run on a card)"
    assert verdict(monkeypatch, H200).note is None
    proofs.remember(proofs.Identity.of(B200), FACTS)
    assert str(verdict(monkeypatch, B200)) == "cute: taken"
    assert verdict(monkeypatch, B300).note == blackwell.MARK


@pytest.mark.skipif(not find_spec("cutlass"), reason="needs the CuTe DSL")
@pytest.mark.parametrize("gpu", [B200, B300], ids=["10.0", "10.3"])
@pytest.mark.parametrize("way", ["nothing", "environment", "proof"])
def test_auto_takes_the_kernel_by_consent_alone(
    gpu: Gpu, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backends, "gpu_of", lambda device: gpu)
    if way == "environment":
        monkeypatch.setenv(blackwell.CONSENT, "1")
    elif way == "proof":
        proofs.remember(proofs.Identity.of(gpu), FACTS)
    verdicts = {v.name: v for v in backends.explain(form_of(make_inputs(PROBLEM, 1)))}
    assert verdicts["cute"].taken == (way != "nothing")
    if way == "nothing":
        (sentence,) = str(verdicts["cute"]).splitlines()
        assert gpu.arch in sentence and blackwell.CONSENT in sentence


@pytest.mark.parametrize(
    "gpu",
    [replace(H200, name=name, arch=f"sm_{arch}") for name, arch in OTHER_CARDS.items()],
    ids=list(OTHER_CARDS),
)
def test_another_card_is_told_in_one_sentence_why_cute_is_not_taken(gpu: Gpu) -> None:
    reason = CuteBackend().supports(Features(), PROBLEM, gpu)
    assert reason is not None and gpu.arch in reason and "\n" not in reason
    assert "sm_90a" in reason and "sm_103a" in reason


# --- the first call ---------------------------------------------------------------------------


class Launched:
    """A launch on a pretended card: the oracle's results, off by so much."""

    config = blackwell.config_for(PROBLEM)

    def __init__(self, inputs: DecodeInputs, wrong_by: float) -> None:
        self.inputs, self.wrong_by, self.count = inputs, wrong_by, 0

    def __call__(self, args: Any, out: torch.Tensor, lse: torch.Tensor) -> None:
        self.count += 1
        expected = decode_reference(self.inputs)
        out.copy_((expected.out * (1 + self.wrong_by)).reshape(out.shape))
        lse.copy_(expected.lse.reshape(lse.shape))

    repeat = __call__


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Callable[[Gpu, float], Launched]:
    def made(gpu: Gpu, wrong_by: float) -> Launched:
        launch = Launched(make_inputs(PROBLEM, 1, ["lse"], workspace_bytes=64), wrong_by)
        monkeypatch.setattr(cute_backend, "gpu_of", lambda device: gpu)
        monkeypatch.setattr(own_launch.Launch, "of", lambda *given: launch)
        self_check.clear()
        return launch

    return made


def run_on(launch: Launched) -> torch.Tensor:
    args = launch.inputs
    call = bind(args, form_of(args), reads_lengths=False, debug=False)
    CuteBackend().run(call, None, None)  # type: ignore[arg-type]
    return call.out


@pytest.mark.parametrize("gpu", [B200, B300], ids=["10.0", "10.3"])
def test_the_first_call_on_a_blackwell_card_is_compared_with_torch(
    gpu: Gpu, launched: Callable[[Gpu, float], Launched], caplog: pytest.LogCaptureFixture
) -> None:
    launch = launched(gpu, 0.0)
    for _ in range(2):
        run_on(launch)
    (record,) = caplog.records
    assert launch.config.name() in record.getMessage() and gpu.name in record.getMessage()
    launch = launched(gpu, 0.05)
    for _ in range(2):
        with pytest.raises(BuildError, match="differ from the torch backend's, out off by 5"):
            run_on(launch)
    assert launch.count == 1


def test_a_hopper_card_is_not_compared(
    launched: Callable[[Gpu, float], Launched], caplog: pytest.LogCaptureFixture
) -> None:
    run_on(launched(H200, 0.05))
    assert not caplog.records


# --- the record -------------------------------------------------------------------------------


def test_the_record_has_the_card_the_cases_and_a_verdict(tmp_path: Path) -> None:
    path = tmp_path / "record"
    prove_with(B200, [check(), check("wrong")], path)
    head, *rows, last = read(path)
    assert (head["what"], head["cases"], head["capability"]) == ("prove", 2, "10.0")
    assert {"card", "smi", "libraries", "commit", "mla_lab", "date"} <= set(head["environment"])
    assert [row["status"] for row in rows] == ["ok", "wrong"]
    assert last["kind"] == "proof" and last["statuses"] == {"ok": 1, "wrong": 1}


def test_a_case_that_does_not_end_is_named_by_the_record(tmp_path: Path) -> None:
    path, seen = tmp_path / "record", []

    def look() -> Outcome:
        seen.append(read(path)[-1])
        return Outcome("ok", "cute")

    prove_with(B200, [check(), replace(check(), run=look)], path)
    assert (seen[0]["status"], seen[0]["name"]) == ("failed", "a case")
    assert "did not end" in seen[0]["reason"]


def test_a_lost_device_ends_the_proof(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def broken() -> Outcome:
        raise RuntimeError("an illegal memory access")

    monkeypatch.setattr(prove, "_lost", lambda: True)
    last = prove_with(B200, [check(), replace(check(), run=broken), check()], tmp_path / "record")
    assert not last["passed"] and last["cases"] == 2 and last["statuses"]["failed"] == 1


def test_hopper_needs_no_consent_and_leaves_none(tmp_path: Path) -> None:
    assert prove_with(H200, [check()], tmp_path / "record")["passed"]
    assert not proofs.folder().exists()


def test_cases_of_the_matrix_run_on_a_cpu(tmp_path: Path) -> None:
    """The thunks are the ones of a card, on its stand-in: the torch backend on a CPU."""
    workspace = zero_bytes(64 << 20)
    case = next(
        c for c in proof_cases.kernel_cases(H200) if (c["lengths"], c["q_len"]) == ("edges", "1")
    )
    runs = [replace(check(wanted=""), run=lambda: run_case(case, 0, workspace))]
    assert prove_with(H200, runs, tmp_path / "record")["passed"]
    row = read(tmp_path / "record")[1]
    assert row["backend"] == "torch" and 0 < row["rel_error"] <= row["allowed"]


# --- the lists --------------------------------------------------------------------------------


@pytest.mark.parametrize("gpu", [B200, B300], ids=["10.0", "10.3"])
def test_the_kernel_list_has_every_pair_that_the_kernel_runs(gpu: Gpu) -> None:
    chosen, arch = proof_cases.kernel_cases(gpu), proofs.arch(gpu)

    def ours(case: Any) -> bool:
        return cases.allowed(case) and proof_cases.has_sm100_kernel(case, arch)

    pairs = {pair for case in chosen for pair in pairs_of(case, cases.FACTORS)}
    assert pairs == set(allowed_pairs(cases.FACTORS, ours))
    levels = {level for pair in pairs for level in pair}
    assert {("format", "e4m3"), ("mask", "tree"), ("page_size", "16")} <= levels
    assert (("invariant", "yes") in levels) == (arch == "sm_100a")
    assert ("sparse", "top 70") not in levels and ("skip", "1e-3") not in levels
    assert {("ranks", "2"), ("bound", "loose"), ("sign", "negative")} <= levels
    refused = {"slots": "all", "query": "whole", "bytes": "uint8", "plan": "own"}
    for name, first in refused.items():
        assert {level for factor, level in levels if factor == name} == {first}
    assert (("scales", "device"), ("sign", "negative")) in pairs
    assert (("scales", "floats"), ("sign", "negative")) not in pairs


@pytest.mark.parametrize(
    ("levels", "word"),
    [
        ({"sparse": "top 5", "slots": "of tokens"}, "sparse calls"),
        ({"query": "apart"}, "rows lie apart"),
        ({"query": "heads first"}, "rows lie apart"),
        ({"sign": "negative"}, "bmm1_scale of 0 or less"),
        ({"format": "bf16 on 656", "bytes": "int8"}, "fp8_656"),
    ],
)
def test_what_the_kernel_list_leaves_out_is_refused_by_name(levels: Any, word: str) -> None:
    case = cases.whole({"page_size": "64", **levels})
    assert cases.allowed(case) and not proof_cases.has_sm100_kernel(case)
    assert word in str(blackwell.refusal(cases.form_features(case), cases.problem_of(case)))


def test_the_builds_are_those_of_the_calls() -> None:
    """Of small cases as their inputs say, and taken by the kernel as the list promises."""
    made = proof_cases.builds(B200)
    small = [c for c in proof_cases.kernel_cases(B200) if c["lengths"] in ("one", "edges", "early")]
    small = [case for case in small if int(case["q_len"]) * int(case["heads"]) <= 200][:8]
    assert len(small) == 8
    for seed, case in enumerate(small):
        inputs = cases.inputs_of(case, seed)
        given = {**inputs.contract_args(), **cases.choices_of(case)}
        given |= Guards(inputs, case, given_out=True).given()
        form = form_of(native_args(**given))
        assert blackwell.refusal(form.features, form.bounds) is None
        config = blackwell.config_for(form.bounds)
        assert build_for(config, form.bounds, None, form.features) in made


def test_the_published_sample_has_every_level() -> None:
    chosen = published.configurations()[:: proof_cases.EVERY]
    assert len(chosen) == 57
    for field in published.Configuration._fields:
        levels = {getattr(c, field) for c in chosen}
        assert levels == {getattr(c, field) for c in published.configurations()}


def test_a_batch_invariant_call_on_sm_103a_is_refused_by_name() -> None:
    features, config = Features(batch_invariant=True), blackwell.config_for(PROBLEM)
    assert "sm_103a" in str(missing_for(config, PROBLEM, features, "sm_103a"))


# --- the command ------------------------------------------------------------------------------


def test_without_a_gpu_there_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(Gpu, "here", lambda: None)
    assert cli.main(["doctor", "--prove", str(tmp_path / "record")]) != 0
    said = capsys.readouterr()
    assert "no GPU" in said.err and "10.3" in said.err
    assert len(said.err.strip().splitlines()) == 1 and not (tmp_path / "record").exists()


def test_a_card_without_kernels_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Gpu, "here", lambda: replace(B200, name="RTX 5090", arch="sm_120"))
    with pytest.raises(Unsupported, match="RTX 5090"):
        prove.here()


@pytest.mark.parametrize("status", ["ok", "wrong"])
def test_the_command_forgets_proves_and_says(
    status: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """An earlier proof counts no more once another one has begun."""

    class Stand:
        def __init__(self, gpu: Gpu, device: str) -> None:
            assert (device, os.environ[blackwell.CONSENT]) == ("cuda", "1")
            assert not proofs.counts(gpu)

        def checks(self) -> list[proof_cases.Check]:
            return [check(status)]

    proofs.remember(proofs.Identity.of(B200), FACTS)
    compiled: list[Any] = []
    monkeypatch.setattr(Gpu, "here", lambda: B200)
    monkeypatch.setattr(prove, "Lists", Stand)

    def compile_all(wanted: list[Any], arch: str, workers: int, built: Any) -> None:
        compiled.append((arch, len(wanted)))
        built(len(wanted), len(wanted))

    monkeypatch.setattr(prove, "compile_all", compile_all)
    code = cli.main(["doctor", "--prove", str(tmp_path / "record")])
    assert compiled[0][0] == "sm_100a" and compiled[0][1] > 20
    assert code == int(status != "ok") and proofs.counts(B200) == (status == "ok")
    assert blackwell.CONSENT not in os.environ
    printed = capsys.readouterr().out
    assert ("auto takes the SM100 kernel" in printed) == (status == "ok")
