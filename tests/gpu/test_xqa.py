"""kernels/xqa against the float64 oracle: MLA and GQA, formats, masks, pages, pieces."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from mla_lab import jit
from mla_lab.core.problem import Problem
from mla_lab.reference.inputs import make_inputs
from mla_lab.reference.inputs_gqa import GqaShape, make_gqa_inputs

from .xqa_calls import (
    TOLERANCE,
    TOLERANCE_8,
    Launch,
    Pieces,
    built,
    check,
    check_beside_torch,
    config,
)

pytestmark = pytest.mark.gpu

#: query and cache dtypes, whether weights are e4m3 too, weights' type in a baseline
FORMATS = {
    "bf16": ("bf16", "bf16", 0, "bf16"),
    "fp16": ("fp16", "fp16", 0, "fp16"),
    "e4m3": ("e4m3", "e4m3", 0, "fp16"),
    "e4m3_weights": ("e4m3", "e4m3", 1, "e4m3"),
    "bf16_over_e4m3": ("bf16", "e4m3", 0, "fp16"),
}
#: builds of MLA: of each format, and with options that other cards have not
MLA_BUILDS: dict[str, tuple[str, dict[str, int]]] = {
    **{form: (form, {}) for form in FORMATS},
    **{f"{form}_whole_sm": (form, {"whole_sm": 1}) for form in ("bf16", "fp16", "e4m3")},
    **{f"{form}_row_tiles": (form, {"row_tiles": 2}) for form in ("bf16", "e4m3")},
}
WHOLE: Pieces = (1, 1 << 20)
#: q_lens, kv_lens, heads, page_size, features, pieces
MLA = [
    ((1,) * 6, (0, 1, 63, 64, 65, 1000), 16, 64, (), WHOLE),
    ((1,) * 6, (0, 1, 63, 64, 65, 1000), 16, 64, ("sinks", "scales"), (4, 64)),
    ((1, 1, 1), (8192, 0, 700), 16, 16, (), (7, 512)),
    ((3, 1, 8), (129, 0, 515), 7, 32, ("sinks",), (3, 100)),
    ((2, 5), (64, 2048), 24, 128, ("page_gap",), (5, 256)),
    ((1, 4), (127, 3), 1, 64, ("device_scales",), (2, 64)),
    ((2, 2), (1000, 65), 128, 64, ("cache_4d",), (3, 100)),
    ((16, 16), (300, 20), 5, 64, ("tree_mask",), (4, 64)),
    ((8, 3, 16), (8, 3, 900), 16, 16, ("tree_mask", "sinks", "max_q_len"), (4, 128)),
    ((4, 4), (1030, 17), 16, 64, ("chain_mask",), (2, 512)),
    ((1, 1, 1), (4000, 1, 70), 16, 64, (), (20, 200)),
]
#: q_lens, kv_lens, heads, kv_heads, page_size, layout, window_left, features, pieces
GQA = [
    ((1,) * 5, (0, 1, 63, 65, 1000), 8, 1, 64, "HND", -1, (), WHOLE),
    ((1,) * 5, (0, 1, 63, 65, 1000), 32, 4, 16, "NHD", -1, ("sinks",), (4, 64)),
    ((4, 4), (700, 90), 32, 4, 32, "HND", 50, ("one_tensor",), (3, 100)),
    ((5, 5), (700, 3), 40, 8, 64, "NHD", -1, ("separate_tables", "device_scales"), (3, 100)),
    ((33, 33), (400, 40), 16, 1, 64, "HND", -1, ("tree_mask", "sinks"), (2, 128)),
    ((64, 64), (64, 900), 6, 2, 128, "NHD", 70, (), (5, 128)),
    ((3, 1, 17), (333, 0, 50), 12, 12, 64, "HND", -1, ("chain_mask", "ragged"), (2, 64)),
    ((2, 2), (2000, 513), 64, 4, 64, "HND", 0, (), (2, 64)),
    ((33, 33), (130, 33), 4, 4, 32, "NHD", 40, ("chain_mask",), (9, 64)),
    ((8, 8), (90, 1000), 8, 2, 128, "HND", -1, ("tree_mask",), (8, 128)),
]


@pytest.fixture(autouse=True)
def finished() -> Iterator[None]:
    yield
    torch.cuda.synchronize()


def kernel(form: str, head_dim: int = 576, **options: int) -> jit.Kernel:
    query, cache, mma8, _ = FORMATS[form]
    return built(config(query, cache, head_dim, **({"mma8": 1} if mma8 else {}), **options))


def tolerance(form: str) -> float:
    return TOLERANCE_8 if FORMATS[form][2] else TOLERANCE


@pytest.mark.parametrize("distribution", ["gauss", "heavy_tailed"])
@pytest.mark.parametrize("case", MLA, ids=lambda c: f"h{c[2]}_q{max(c[0])}_p{c[3]}")
@pytest.mark.parametrize("build", MLA_BUILDS)
def test_mla(build: str, case: tuple, distribution: str) -> None:  # type: ignore[type-arg]
    q_lens, kv_lens, heads, page_size, features, pieces = case
    form, options = MLA_BUILDS[build]
    query, cache, _, _ = FORMATS[form]
    problem = Problem(q_lens, kv_lens, heads, q_dtype=query, kv_format=cache, page_size=page_size)
    inputs = make_inputs(problem, 1, features, distribution=distribution, device="cuda")
    check(kernel(form, **options), inputs, pieces, tolerance(form))


@pytest.mark.parametrize("form", ["bf16", "e4m3"])
def test_mla_with_values_in_other_pages(form: str) -> None:
    query, cache, _, _ = FORMATS[form]
    problem = Problem((2, 2), (700, 65), 16, q_dtype=query, kv_format=cache)
    inputs = make_inputs(problem, 1, ("separate_tables",), device="cuda")
    check(built(config(query, cache, shared_kv=0)), inputs, (3, 128))


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("case", GQA, ids=lambda c: f"h{c[2]}_{c[3]}_q{max(c[0])}_{c[5]}")
@pytest.mark.parametrize("form", FORMATS)
def test_gqa(form: str, case: tuple, head_dim: int) -> None:  # type: ignore[type-arg]
    q_lens, kv_lens, heads, kv_heads, page_size, layout, window, features, pieces = case
    query, cache, _, _ = FORMATS[form]
    shape = GqaShape(
        q_lens,
        kv_lens,
        heads,
        kv_heads,
        head_dim=head_dim,
        q_dtype=query,
        kv_format=cache,
        page_size=page_size,
        kv_layout=layout,
        window_left=window,
    )
    inputs = make_gqa_inputs(shape, 1, features, device="cuda")
    check(kernel(form, head_dim), inputs, pieces, tolerance(form))


@pytest.mark.parametrize("distribution", ["gauss", "heavy_tailed"])
@pytest.mark.parametrize("build", MLA_BUILDS)
def test_error_beside_torch(build: str, distribution: str) -> None:
    form, options = MLA_BUILDS[build]
    query, cache, _, weights = FORMATS[form]
    problem = Problem.uniform(4, 1, 4096, 16, q_dtype=query, kv_format=cache)
    inputs = make_inputs(problem, 2, (), distribution=distribution, device="cuda")
    check_beside_torch(kernel(form, **options), inputs, weights)


@pytest.mark.parametrize("heads", [16, 24])
@pytest.mark.parametrize("build", MLA_BUILDS)
def test_clusters_do_not_change_bits(build: str, heads: int) -> None:
    """Up to 8 pieces are merged by a cluster, more by whoever arrives last; cuts are equal."""
    form, options = MLA_BUILDS[build]
    query, cache, _, _ = FORMATS[form]
    problem = Problem((1,) * 4, (1000, 128, 129, 0), heads, q_dtype=query, kv_format=cache)
    inputs = make_inputs(problem, 7, ("sinks",), device="cuda")
    together, apart = (Launch(kernel(form, **options), inputs, (n, 128)) for n in (8, 9))
    together()
    apart()
    assert torch.equal(together.out.view(torch.int16), apart.out.view(torch.int16))
    assert torch.equal(together.lse.view(torch.int32), apart.lse.view(torch.int32))
    untouched = [bool(launch.partials[1].isnan().all()) for launch in (together, apart)]
    assert untouched == [True, False]


@pytest.mark.parametrize("out_dtype", [torch.float16, torch.float32, torch.float8_e4m3fn])
def test_types_of_out(out_dtype: torch.dtype) -> None:
    problem = Problem((1, 1), (300, 0), 16, q_dtype="e4m3", kv_format="e4m3")
    inputs = make_inputs(problem, 3, (), device="cuda")
    exact = Launch(kernel("e4m3"), inputs, (2, 64), torch.float32)
    typed = Launch(kernel("e4m3"), inputs, (2, 64), out_dtype)
    exact()
    typed()
    assert torch.equal(typed.out.float(), exact.out.to(out_dtype).float())


@pytest.mark.parametrize("form", ["bf16", "e4m3"])
def test_a_request_has_its_own_bits(form: str) -> None:
    """Pieces of a fixed size: alone and among others, in any place, the same out and lse."""
    query, cache, _, _ = FORMATS[form]
    problem = Problem((2,) * 5, (900, 64, 3000, 0, 17), 16, q_dtype=query, kv_format=cache)
    inputs = make_inputs(problem, 4, ("tree_mask",), device="cuda")
    together = Launch(kernel(form), inputs, (8, 256))
    together()
    for i in range(problem.batch):
        alone = Launch(kernel(form), _only(inputs, i), (8, 256))
        alone()
        assert torch.equal(alone.out[0].view(torch.int16), together.out[i].view(torch.int16))
        assert torch.equal(alone.lse[0].view(torch.int32), together.lse[i].view(torch.int32))


def _only(inputs, i: int):  # type: ignore[no-untyped-def]
    from dataclasses import replace

    assert inputs.mask is not None
    return replace(
        inputs,
        query=inputs.query[i : i + 1],
        block_tables=inputs.block_tables[i : i + 1],
        seq_lens=inputs.seq_lens[i : i + 1],
        mask=inputs.mask[i : i + 1],
    )


def test_lengths_beyond_the_table_are_cut() -> None:
    """A length that lies writes and reads nothing outside."""
    inputs = make_inputs(Problem((1,), (100,), 16), 5, (), device="cuda")
    inputs.seq_lens.fill_(1 << 20)
    inputs.block_tables.clamp_(0, len(inputs.kv_cache) - 1)
    launch = Launch(kernel("bf16"), inputs, (2, 64))
    launch()
    torch.cuda.synchronize()
    assert not launch.counters.any()


@pytest.mark.parametrize("name", ["page_size", "width", "table", "partials"])
def test_the_binding_refuses(name: str) -> None:
    inputs = make_inputs(Problem((1,), (100,), 16), 6, (), device="cuda")
    launch = Launch(kernel("bf16"), inputs, (2, 64))
    if name == "page_size":
        launch.caches = (inputs.kv_cache[:, :24],) * 2
    elif name == "width":
        launch.caches = (inputs.kv_cache[..., :512],) * 2
    elif name == "table":
        object.__setattr__(inputs, "block_tables", inputs.block_tables.long())
    else:
        launch.partials = (launch.partials[0][:1], launch.partials[1])
    with pytest.raises(ValueError, match="supported"):
        launch()
