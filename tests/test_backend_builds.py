"""Where nothing can be compiled: the choice among builds that are there, and refusals by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from mla_lab.backends.base import SKIPS_NOTHING
from mla_lab.backends.cuda.backend import CudaBackend
from mla_lab.backends.cute import backend as cute
from mla_lab.backends.cute.backend import CuteBackend
from mla_lab.backends.cute.catalogue import able, build_for, missing_for, without_pdl, without_rule
from mla_lab.backends.cute.families import complete, config_for, costs
from mla_lab.backends.cute.feature_args import with_features
from mla_lab.backends.cute.token_gather import configs_for
from mla_lab.backends.rank_mask import masked
from mla_lab.bench.cases import Case, blackwell_twins
from mla_lab.call.form import Features
from mla_lab.core.errors import BuildError, Unsupported
from mla_lab.core.gpu import H200
from mla_lab.core.problem import Problem
from mla_lab.jit.build import canonical
from mla_lab.jit.shipped import OTHER_FORMATS, shipped
from mla_lab.plan import KernelConfig, choose
from mla_lab.plan.launch_modes import (
    FORMATS,
    KEEP_AB_PERSISTENT,
    OUTS,
    SWAP_AB_LL,
    SWAP_AB_PERSISTENT,
    mode_of,
)
from mla_lab.plan.selection import Selection, select
from mla_lab.plan.xqa import SEPARATE
from mla_lab.verify import cases

from .test_refusals import calls

Have = Callable[[list[KernelConfig]], None]


def forget() -> None:
    for cached in (cute._chosen, cute._by_token, cute._plan, without_rule, without_pdl):
        cached.cache_clear()


@pytest.fixture
def have(monkeypatch: pytest.MonkeyPatch) -> Iterator[Have]:
    """Says which builds there are; there is no compiler."""
    there: set[KernelConfig] = set()

    def absent(kernel: str) -> None:
        raise BuildError("no compiler")

    def find(config: KernelConfig, arch: str) -> object | None:
        return object() if canonical(config) in there else None

    monkeypatch.setattr("mla_lab.jit.find", find)
    monkeypatch.setattr("mla_lab.jit.toolchain.versions", absent)

    def only(configs: list[KernelConfig]) -> None:
        forget()
        there.clear()
        there.update(map(canonical, configs))

    yield only
    forget()


def problem(**named: Any) -> Problem:
    return Problem(**{"q_lens": (1,) * 4, "kv_lens": (4096,) * 4, "heads": 16, **named})


def reason(made: Problem, **features: bool) -> str | None:
    return CuteBackend().supports(Features(**features), made, H200)


def taken(made: Problem, **features: bool) -> KernelConfig:
    return cute._plan(made, made.total_q, H200, Features(**features)).config


def best_of(made: Problem, can: Callable[[KernelConfig], bool] | None = None) -> Selection:
    """As the backend selects: by no length."""
    shortest = replace(made, kv_lens=made.q_lens)
    found = select(shortest, H200, can)
    assert found is not None
    return found


def is_missing(found: str | None) -> bool:
    return found is not None and "is not compiled here" in found


def test_with_a_compiler_the_best_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    forget()
    monkeypatch.setattr("mla_lab.jit.find", lambda *_: None)
    monkeypatch.setattr("mla_lab.jit.toolchain.versions", lambda kernel: {})
    made = problem()
    assert taken(made) == best_of(made).config
    forget()


def test_of_the_builds_that_are_there_the_cheapest_is_taken(have: Have) -> None:
    made = problem()
    best = best_of(made)
    every = [c for c in shipped() if c.q_dtype == "bf16"]
    have(every)
    assert taken(made) == best.config
    others = [c for c in every if mode_of(c) != mode_of(best.config) or c.option("gather")]
    have(others)
    second = taken(made)
    assert mode_of(second) != mode_of(best.config)
    assert missing_for(second, made, Features()) is None and reason(made) is None


@pytest.mark.parametrize("mode", [KEEP_AB_PERSISTENT, SWAP_AB_PERSISTENT, SWAP_AB_LL])
def test_one_launch_mode_alone_is_enough(have: Have, mode: Any) -> None:
    made = problem()
    names = {"cute/keep_ab_sm90", "cute/swap_ab_sm90"}
    mine = [c for c in shipped() if c.kernel in names and mode_of(c) == mode.name]
    have([c for c in mine if not c.option("gather")] + [KernelConfig("cuda/planner")])
    assert reason(made) is None
    assert mode_of(taken(made)) == mode.name


def test_a_batch_invariant_call_has_builds_of_its_own(have: Have) -> None:
    made = problem()
    have([c for c in shipped() if c.kernel != "cuda/planner"])
    assert reason(made) is None and reason(made, batch_invariant=True) is None
    assert taken(made, batch_invariant=True).option("pieces") == 1
    have([c for c in shipped() if not c.option("pieces")])
    assert taken(made, batch_invariant=True).option("gather") == 1


@pytest.mark.parametrize("page_size", [16, 32, 128])
@pytest.mark.parametrize("feature", ["sinks", "mask", "tensor_scales"])
def test_what_no_box_build_has_is_fetched_token_by_token(
    have: Have, feature: str, page_size: int
) -> None:
    have(shipped())
    made = problem(page_size=page_size)
    assert reason(made, **{feature: True}) is None
    assert taken(made, **{feature: True}).option("gather") == 1
    assert not taken(made).option("gather"), "the plain call has a build of its own"


def test_the_taller_tile_stands_in_for_the_lower(have: Have) -> None:
    made = problem(q_dtype="fp16", kv_format="fp16", out_dtype="fp16", page_size=4)
    have(shipped())
    assert taken(made).tile_rows == 32
    assert configs_for(made, False)[0].tile_rows == 16
    sparse = replace(made, top_k=100)
    assert taken(sparse, sparse=True).tile_rows == 64


def bf16_builds() -> list[KernelConfig]:
    """What ships in the commonest format."""
    return [c for c in shipped() if c.q_dtype == c.kv_format == c.out_dtype == "bf16"]


@pytest.mark.parametrize("which", [shipped, bf16_builds])
def test_a_bundle_refuses_no_call_of_its_formats_for_want_of_a_build(
    have: Have, which: Callable[[], list[KernelConfig]]
) -> None:
    """All but calls with a caller's plan."""
    have(which())
    formats = {("bf16", "bf16")} | (
        {(q, out) for q, out, _ in OTHER_FORMATS} if which is shipped else set()
    )
    asked = 0
    for features, made in calls():
        if (made.q_dtype, made.out_dtype) not in formats or made.kv_format != made.q_dtype:
            continue
        if features.planned:
            continue
        asked += 1
        found = CuteBackend().supports(features, made, H200)
        assert not is_missing(found), (features.names(), made, found)
    assert asked > 500


def test_skip_softmax_has_builds_in_the_commonest_format(have: Have) -> None:
    """With pages of another size, or too small for any, a build runs the call that skips no tile.
    A caller's plan wants a build for its pages.
    """
    have(bf16_builds())
    for names in ((), ("sinks",), ("tensor_scales",), ("mask",), ("ragged",), ("lse",)):
        assert reason(problem(), skip_softmax=True, **dict.fromkeys(names, True)) is None, names
        for page_size in (16, 8):
            other = problem(page_size=page_size)
            assert reason(other, skip_softmax=True, **dict.fromkeys(names, True)) is None, names
    notes = [
        CuteBackend().note(Features(skip_softmax=True), problem(page_size=n), H200)
        for n in (64, 16, 8)
    ]
    assert notes == [None, SKIPS_NOTHING, SKIPS_NOTHING]
    assert is_missing(reason(problem(page_size=16), skip_softmax=True, planned=True))


EIGHT = [("bf16", "fp8_656"), ("e4m3", "e4m3"), ("bf16", "e4m3")]


@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize(("q_dtype", "kv_format"), EIGHT)
def test_sparse_calls_over_eight_bits_have_builds(
    have: Have, q_dtype: str, kv_format: str, heads: int
) -> None:
    """Of few heads swap_ab's: of 656 bytes the short tile, of the others the taller one. Of more
    keep_ab's, but where requests have fixed pieces."""
    have(shipped())
    made = problem(q_dtype=q_dtype, kv_format=kv_format, heads=heads, top_k=100)
    for names in ((), ("sinks",), ("tensor_scales",), ("ragged",), ("batch_invariant",)):
        assert reason(made, sparse=True, **dict.fromkeys(names, True)) is None, names
    found = taken(made, sparse=True)
    if heads > 16:
        assert (found.kernel, found.tile_rows) == ("cute/keep_ab_sm90", 64)
        found = taken(made, sparse=True, batch_invariant=True)
    assert found.kernel == "cute/swap_ab_sm90"
    assert found.tile_rows == (16 if (kv_format, heads) == ("fp8_656", 16) else 32)
    if heads == 16:
        assert found.option("fused_merge", 1) == 2


@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize(("q_dtype", "kv_format"), EIGHT)
def test_sparse_calls_over_eight_bits_have_builds_for_every_result(
    have: Have, q_dtype: str, kv_format: str, invariant: bool
) -> None:
    have(shipped())
    for out in OUTS[FORMATS[q_dtype, kv_format]]:
        made = problem(q_dtype=q_dtype, kv_format=kv_format, out_dtype=out, heads=128, top_k=100)
        assert reason(made, sparse=True, batch_invariant=invariant, sinks=True) is None, out


@pytest.mark.parametrize("page_size", [16, 128])
def test_tables_for_values_have_builds(have: Have, page_size: int) -> None:
    """In the CUDA kernel, of every format that it takes but an fp16 query over e4m3."""
    have(shipped())
    for q_dtype, kv_format in SEPARATE:
        made = problem(q_dtype=q_dtype, kv_format=kv_format, page_size=page_size, heads=128)
        for names in ((), ("sinks",), ("tensor_scales",), ("mask",), ("batch_invariant",)):
            used = Features(separate_tables=True, **dict.fromkeys(names, True))
            assert CudaBackend().supports(used, made, H200) is None, names


@pytest.mark.parametrize(("q_dtype", "kv_format"), EIGHT)
def test_eight_bits_in_small_pages_have_builds(have: Have, q_dtype: str, kv_format: str) -> None:
    """With a bf16 result; and what no build by page has is fetched token by token."""
    have(shipped())
    made = problem(q_dtype=q_dtype, kv_format=kv_format, heads=128, page_size=4)
    for names in ((), ("sinks", "mask"), ("ragged", "lse"), ("batch_invariant",)):
        assert reason(made, **dict.fromkeys(names, True)) is None, names
    assert taken(made).kernel == "cute/keep_ab_sm90"
    few = taken(replace(made, heads=16))
    assert (few.kernel, few.tile_rows) == (
        "cute/swap_ab_sm90",
        16 if kv_format == "fp8_656" else 32,
    )
    assert is_missing(reason(replace(made, out_dtype="fp16")))
    by_page = problem(q_dtype=q_dtype, kv_format=kv_format, page_size=16)
    used = {"tensor_scales": True, "mask": True}
    has_build = (q_dtype, kv_format) == ("e4m3", "e4m3")
    assert taken(by_page, **used).option("gather") == int(not has_build)


@pytest.mark.parametrize(
    ("heads", "page_size", "rows"), [(16, 64, 32), (128, 64, 32), (64, 16, 16)]
)
def test_skip_softmax_over_e4m3_walks(have: Have, heads: int, page_size: int, rows: int) -> None:
    have(shipped())
    formats = {"q_dtype": "e4m3", "kv_format": "e4m3"}
    made = problem(heads=heads, page_size=page_size, **formats)
    assert cute._skipping(made) == (SWAP_AB_PERSISTENT, rows)
    for names in ((), ("sinks",), ("tensor_scales",), ("mask",), ("ragged",)):
        used = {"skip_softmax": True, **dict.fromkeys(names, True)}
        assert reason(made, **used) is None, names
        found = taken(made, **used)
        if page_size == 64:
            assert (mode_of(found), found.tile_rows) == (SWAP_AB_PERSISTENT.name, rows)
        else:
            assert found.option("gather") == 1 and not found.option("skip")


@pytest.mark.parametrize("kv_format", ["e4m3", "fp8_656"])
@pytest.mark.parametrize("heads", [16, 128])
def test_skip_softmax_under_a_16_bit_query_walks(have: Have, heads: int, kv_format: str) -> None:
    have(shipped())
    made = problem(heads=heads, kv_format=kv_format)
    found = taken(made, skip_softmax=True)
    assert (mode_of(found), found.tile_rows) == (SWAP_AB_PERSISTENT.name, 16)
    for names in ((), ("sinks",), ("tensor_scales",), ("mask",), ("batch_invariant",)):
        assert reason(made, skip_softmax=True, **dict.fromkeys(names, True)) is None, names


@pytest.mark.parametrize("q_len", [1, 4])
@pytest.mark.parametrize(
    ("heads", "page_size", "e4m3", "tile"),
    [(16, 64, False, 64), (128, 64, False, 64), (16, 64, True, 32), (128, 16, True, 16)],
)
def test_invariant_skip_softmax_has_one_build_for_every_request(
    heads: int, page_size: int, e4m3: bool, tile: int, q_len: int
) -> None:
    """Of the same rows and cuts, alone and in a batch of 200 others."""
    formats = {"q_dtype": "e4m3", "kv_format": "e4m3"} if e4m3 else {}
    alone = Problem((q_len,), (4096,), heads, page_size=page_size, **formats)
    many = replace(alone, q_lens=(q_len, *(1, 2, 3, 0) * 50), kv_lens=(4096, *(9, 70_000) * 100))
    features = Features(skip_softmax=True, batch_invariant=True, ragged=True)
    found = [cute._kinds(problem, H200, features) for problem in (alone, many)]
    assert [len(kinds) for kinds in found] == [1, 1]
    one, other = (kinds[0] for kinds in found)
    assert one.choice.config.tile_rows == tile and one.least_rows == 1 and one.most_rows is None
    assert with_features(one.choice.config, features).option("skip") == 1
    assert (one.choice.config, one.choice.policy, one.choice.knobs) == (
        other.choice.config,
        "fixed_size",
        other.choice.knobs,
    )


def test_a_plan_of_a_tile_without_skip_softmax_is_refused() -> None:
    made = problem(q_dtype="e4m3", kv_format="e4m3", heads=128)
    for mode, tile in ((KEEP_AB_PERSISTENT, (64, 1)), (SWAP_AB_LL, (32, 1))):
        with pytest.raises(Unsupported, match="one of 16 or 32 rows"):
            complete(config_for(mode, tile), made, None, Features(skip_softmax=True))


def test_where_there_is_none_the_best_is_named(have: Have) -> None:
    have([])
    made = problem()
    best = best_of(made).config
    found = reason(made)
    assert is_missing(found) and f"rows-{best.tile_rows}" in str(found)
    assert "no compiler" in str(found)


def test_shipped_builds_run_the_pairwise_cases_that_are_said_to_have_a_kernel(have: Have) -> None:
    have(shipped())
    refused = []
    for index, case in enumerate(cases.pairwise_cases()):
        if not cases.has_kernel(case):
            continue
        made, features = cases.problem_of(case), cases.form_features(case)
        longest = max(1, *made.q_lens), max(1, *made.kv_lens)
        bounds = replace(made, q_lens=longest[:1] * made.batch, kv_lens=longest[1:] * made.batch)
        found = CuteBackend().supports(features, bounds, H200)
        if found is None and features.planned:
            features = masked(features)
            here, invariant = able(made, features), features.batch_invariant
            chosen = choose(made, H200, invariant, costs(), able=here)
            found = missing_for(chosen.config, made, features)
        if found is not None:
            refused.append((index, found))
    assert not refused


TWINS = [case for case in blackwell_twins() if case.problem.kv_format == "e4m3"]


@pytest.mark.parametrize("case", TWINS, ids=lambda case: str(case.name))
def test_each_e4m3_twin_has_a_shipped_build(have: Have, case: Case) -> None:
    """As `bench` plans it, on the host, and as a call without a plan is planned."""
    have(shipped())
    made = case.problem
    assert made.page_size == 32 and len(TWINS) == 20
    planned = choose(made, H200, costs=costs())
    assert missing_for(planned.config, made, Features(planned=True)) is None
    bounds = replace(made, kv_lens=(max(made.kv_lens),) * made.batch)
    ragged = Features(ragged=len(set(made.kv_lens)) > 1, causal=max(made.q_lens) > 1)
    assert CuteBackend().supports(ragged, bounds, H200) is None
    assert not taken(bounds).option("gather"), "a page is more than a token"


def test_a_call_of_one_query_token_has_no_causal_rule_where_that_build_is_there(have: Have) -> None:
    one, two = problem(), problem(q_lens=(2,) * 4)
    with_rule = config_for(SWAP_AB_PERSISTENT, (16, 1))
    causal = complete(with_rule, one, None, Features())
    bare = replace(causal, mask="none")
    have([causal, bare])
    assert build_for(with_rule, one, None, Features()) == bare
    assert build_for(with_rule, two, None, Features()) == causal
    # every request of any batch has the same kernel
    assert build_for(with_rule, one, None, Features(batch_invariant=True)) == causal
    assert build_for(with_rule, one, None, Features(ragged=True)) == causal, "a bound of 1 may lie"
    assert build_for(with_rule, one, None, Features(sinks=True)).mask == "tree"
    have([causal])
    assert build_for(with_rule, one, None, Features()) == causal
    have([])
    assert build_for(with_rule, one, None, Features()) == bare
    assert bare in shipped() and causal in shipped()


@pytest.mark.parametrize(
    ("fields", "features", "dual"),
    [
        ({}, Features(lse=True), 1),
        ({"page_size": 16}, Features(), 0),
        ({"q_dtype": "fp16", "kv_format": "fp16"}, Features(), 0),
        ({}, Features(sinks=True), 0),
        ({}, Features(tensor_scales=True), 0),
        ({}, Features(no_pdl=True), 0),
        ({}, Features(batch_invariant=True), 0),
    ],
)
def test_one_request_takes_a_dual_build_where_one_ships(
    fields: dict[str, Any], features: Features, dual: int
) -> None:
    problem = Problem((1,), (131_072,), 128, **fields)
    planned = cute._plan(problem, 1, H200, features)
    assert planned.config.option("dual") == dual
    assert (getattr(planned, "gate", 0) > 0) == bool(dual)


def test_without_pdl_where_such_a_build_is_there_and_with_it_where_none_can_be_had(
    have: Have, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, config = problem(), config_for(KEEP_AB_PERSISTENT, (64, 1))
    with_it, without = (complete(config, made, pdl, Features()) for pdl in (None, False))
    assert without.option("pdl") == 0 and "pdl" not in dict(with_it.options)
    have([with_it])
    assert build_for(config, made, False, Features()) == with_it
    assert missing_for(config, made, Features(no_pdl=True)) is None
    have([with_it, without])
    assert build_for(config, made, False, Features()) == without
    have([])
    assert build_for(config, made, False, Features()) == without, "the name of a refusal"
    assert without.name() in str(missing_for(config, made, Features(no_pdl=True)))
    have([with_it])
    monkeypatch.setattr("mla_lab.jit.toolchain.versions", lambda kernel: {})
    assert build_for(config, made, False, Features()) == without, "it is compiled"
