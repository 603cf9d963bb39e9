"""Layout algebra against its definitions, against the CuTe DSL where it is installed; banks."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mla_lab.core.errors import InvalidInput, Unsupported
from mla_lab.cute import layout_algebra as live
from mla_lab.lab import banks, tile_homes
from mla_lab.lab.explorers import fragment as fragment_explorer
from mla_lab.lab.explorers import layout as layout_explorer
from mla_lab.lab.explorers import swizzle as swizzle_explorer
from mla_lab.lab.layout import Layout, Swizzle, coalesce, complement, compose, divide, tile_2d

needs_cute = pytest.mark.skipif(bool(live.available()), reason=live.available())


@st.composite
def nested(draw: st.DrawFn) -> Layout:
    """Random layouts of up to three modes, some of them pairs."""
    modes = draw(st.lists(st.integers(1, 4) | st.tuples(*[st.integers(1, 3)] * 2), max_size=3))
    shape = tuple(modes) or 4
    count = len(list(itertools.chain(*[m if isinstance(m, tuple) else (m,) for m in modes]))) or 1
    strides = iter(draw(st.lists(st.integers(0, 12), min_size=count, max_size=count)))

    def fill(form: object) -> object:
        return tuple(fill(f) for f in form) if isinstance(form, tuple) else next(strides)

    return Layout(shape, fill(shape))  # type: ignore[arg-type]


def test_a_layout_is_read_and_written_as_text() -> None:
    text = "(4,(2,3)):(6,(1,2))"
    assert str(Layout.of(text)) == text
    assert str(Layout.of("(4,6)")) == "(4,6):(1,4)"
    assert Layout.of(text)(1, (1, 2)) == 6 + 1 + 4
    assert Layout.of("(4,6):(6,1)").offsets()[:5] == [0, 6, 12, 18, 1]


@pytest.mark.parametrize(
    "text", ["(4,6", "a:1", "(2,2):(1,)", "(0,2):(1,1)", "4:1;import", "1.5:1"]
)
def test_text_that_is_no_layout_is_refused(text: str) -> None:
    with pytest.raises(InvalidInput):
        Layout.of(text)


@given(nested())
def test_coalescing_keeps_the_function(layout: Layout) -> None:
    flat = coalesce(layout)
    assert flat.offsets() == layout.offsets()


@given(nested(), nested())
def test_composition_is_one_function_after_the_other(outer: Layout, inner: Layout) -> None:
    try:
        both = compose(outer, inner)
        complement(inner, inner.cosize)  # refuses an inner layout whose modes carry
    except InvalidInput:
        return
    if inner.cosize <= outer.size:
        assert both.offsets() == [outer(inner(i)) for i in range(inner.size)]


def test_known_answers_of_the_documentation() -> None:
    assert (
        str(compose(Layout.of("(6,2):(8,2)"), Layout.of("(4,3):(3,1)"))) == "((2,2),3):((24,2),8)"
    )
    assert (
        str(divide(Layout.of("(4,2,3):(2,1,8)"), Layout.of("4:2"))) == "((2,2),(2,3)):((4,1),(2,8))"
    )
    assert str(complement(Layout.of("4:2"), 24)) == "(2,3):(1,8)"
    assert str(coalesce(Layout.of("(2,(1,6)):(1,(6,2))"))) == "12:1"


@given(st.sampled_from(["4:2", "2:1", "(2,2):(1,8)", "8:1", "(2,3):(1,4)"]), st.integers(1, 4))
def test_a_layout_and_what_it_leaves_out_cover_everything_once(text: str, times: int) -> None:
    layout = Layout.of(text)
    rest = complement(layout, layout.cosize * times)
    together = sorted(a + b for a in layout.offsets() for b in rest.offsets())
    assert together == list(range(layout.size * rest.size))


def test_a_tile_map_is_a_bijection() -> None:
    tiled = tile_2d(Layout.of("(64,576):(576,1)"), (8, 64))
    assert sorted(tiled.offsets()) == list(range(64 * 576))


@needs_cute
@settings(max_examples=12)
@given(nested(), nested())
def test_the_dsl_gives_the_same_functions(a: Layout, b: Layout) -> None:
    pair = (a.shape, a.stride)
    assert list(live.evaluate("coalesce", pair).offsets) == coalesce(a).offsets()
    try:
        ours = compose(a, b)
    except InvalidInput:
        return
    if b.cosize <= a.size:
        theirs = live.evaluate("composition", pair, (b.shape, b.stride))
        assert list(theirs.offsets) == ours.offsets()


@needs_cute
def test_the_dsl_refuses_in_our_words() -> None:
    with pytest.raises(InvalidInput, match="unable to compute"):
        live.evaluate("composition", ((6, 2), (8, 2)), (5, 3))
    with pytest.raises(InvalidInput, match="operation"):
        live.evaluate("reverse", (4, 1))
    with pytest.raises(InvalidInput, match="row_bytes"):
        live.smem_atom(48)


def test_without_the_dsl_the_answer_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "available", lambda: "nvidia-cutlass-dsl is not installed")
    with pytest.raises(Unsupported, match="not installed"):
        live.evaluate("layout", (4, 1))
    explorer = layout_explorer.LayoutExplorer()
    assert (
        "No answer of CuTe: cute: got nvidia-cutlass-dsl is not installed" in explorer.footer.value
    )


@needs_cute
@pytest.mark.parametrize("row_bytes", [16, 32, 64, 128])
def test_our_swizzle_of_an_atom_is_cutes(row_bytes: int) -> None:
    swizzle = banks.ATOMS[row_bytes]
    text = f"S<{swizzle.bits},{swizzle.base},{swizzle.shift}>"
    assert live.smem_atom(row_bytes).layout.startswith(text)


@needs_cute
def test_a_swizzled_layout_has_the_dsls_offsets() -> None:
    swizzle = Swizzle(2, 0, 3)
    plain = Layout.of("(4,8):(8,1)")
    theirs = live.swizzled(2, 0, 3, plain.shape, plain.stride)
    assert list(theirs.offsets) == [swizzle(plain(i)) for i in range(plain.size)]


@given(st.integers(0, 3), st.integers(0, 5), st.integers(3, 4), st.integers(0, 1 << 14))
def test_a_swizzle_is_its_own_inverse(bits: int, base: int, shift: int, offset: int) -> None:
    swizzle = Swizzle(bits, base, shift)
    assert swizzle(swizzle(offset)) == offset


@pytest.mark.parametrize(("row_bytes", "plain"), [(16, 1), (32, 2), (64, 4), (128, 8)])
def test_known_conflicts_and_their_cure(row_bytes: int, plain: int) -> None:
    assert banks.worst_column(row_bytes, Swizzle(0, 4, 3)) == plain
    assert banks.worst_column(row_bytes, banks.ATOMS[row_bytes]) == 1
    assert banks.worst_row(row_bytes, banks.ATOMS[row_bytes]) == 1


def test_equal_words_are_one_access_and_nine_lanes_are_refused() -> None:
    assert banks.turns([0] * 8) == 1
    assert banks.turns([0, 128]) == 2
    with pytest.raises(InvalidInput, match="at most 8"):
        banks.turns([0] * 9)


@pytest.mark.parametrize("columns", [8, 32, 256])
def test_each_accumulator_element_has_one_owner(columns: int) -> None:
    owners = tile_homes.owners(columns)
    assert len(owners) == 64 * columns
    assert len(set(owners.values())) == 64 * columns
    # PTX ISA: lane 5 of warp 1 holds rows 16 + 1 and 16 + 9, columns 2, 3, 10, 11, ...
    mine = sorted(place for place, (thread, _) in owners.items() if thread == 37)
    assert {row for row, _ in mine} == {17, 25}
    assert {column % 8 for _, column in mine} == {2, 3}


def test_an_accumulator_of_odd_width_is_refused() -> None:
    with pytest.raises(InvalidInput, match="multiple of 8"):
        tile_homes.accumulator(12)


def test_explorers_redraw_and_say_what_they_see() -> None:
    swizzles = swizzle_explorer.SwizzleExplorer()
    assert "8-way conflict" in swizzles.figure(swizzles.state).alt
    swizzles.widgets["bits"].value = 3
    assert "conflict-free" in swizzles.figure(swizzles.state).alt
    swizzles.widgets["read"].value = swizzle_explorer.READS[1]
    assert swizzles.turns(swizzles.state) == 1
    fragments = fragment_explorer.FragmentExplorer(lane=31)
    assert "values in rows 7 and 15" in fragments.figure(fragments.state).alt


def test_the_layout_explorer_shows_a_refusal_instead_of_a_picture() -> None:
    explorer = layout_explorer.LayoutExplorer(operation="A after B")
    explorer.widgets["b"].value = "(5):(3)"
    assert "A after B, B: got 5:3; supported" in explorer.figure(explorer.state).markup
    explorer.widgets["a"].value = "(1000,1000)"
    explorer.widgets["operation"].value = "show A"
    assert "too many to draw" in explorer.figure(explorer.state).markup
