"""Explorers of pages, waves, pipelines, rooflines and the absorb trick; their formulas."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mla_lab.core.errors import InvalidInput
from mla_lab.core.gpu import H100, H200
from mla_lab.lab import mla_math, pages, roofline
from mla_lab.lab.explorers import absorb as absorb_explorer
from mla_lab.lab.explorers import page as page_explorer
from mla_lab.lab.explorers import pipeline as pipeline_explorer
from mla_lab.lab.explorers import wave as wave_explorer
from mla_lab.simulate import bounds

SIZES = st.sampled_from([8, 16, 32, 64, 128, 256])


@given(st.integers(1, 700), SIZES, st.integers(0, 5))
def test_boxes_bring_the_cache_and_touch_no_foreign_page(
    kv_len: int, page_size: int, seed: int
) -> None:
    tokens = np.random.default_rng(seed).standard_normal((kv_len, 4))
    total = 4096 // page_size
    table = pages.random_table(kv_len, page_size, total, seed)
    pool = np.full((total, page_size, 4), np.nan)
    for token in range(kv_len):
        pool[table[token // page_size], token % page_size] = tokens[token]
    fetched = pages.boxes(table, kv_len, page_size)
    assert {box.page for box in fetched} == set(table)
    assert all(box.row + box.rows <= page_size for box in fetched)
    assert np.array_equal(pages.gather(pool, fetched, kv_len), tokens)


@given(st.integers(1, 2000), SIZES)
def test_traffic_is_what_is_needed_and_what_is_wasted(kv_len: int, page_size: int) -> None:
    t = pages.traffic(kv_len, page_size)
    fetched = pages.boxes(list(range(-(-kv_len // page_size))), kv_len, page_size)
    assert sum(box.rows for box in fetched) == kv_len + t.wasted_rows
    assert 0 <= t.wasted_rows < min(page_size, 64)
    assert 0 <= t.unused_slots < page_size
    assert t.copies == 9 * t.boxes


def test_a_page_that_fits_no_tile_and_a_short_table_are_refused() -> None:
    with pytest.raises(InvalidInput, match="page_size: got 48"):
        pages.boxes([0, 1], 64, 48)
    with pytest.raises(InvalidInput, match="enough for 65"):
        pages.boxes([0], 65, 64)
    with pytest.raises(InvalidInput, match="total_pages"):
        pages.random_table(65, 64, 1, 0)


def test_the_page_explorer_names_the_boxes_of_a_tile() -> None:
    explorer = page_explorer.PageExplorer(page_size=16)
    assert "Tile 1 is 4 boxes of 16 rows" in explorer.figure(explorer.state).alt
    explorer.widgets["page_size"].value = 128
    assert "Tile 1 is 1 box of 64 rows" in explorer.figure(explorer.state).alt


def test_the_sixty_seventh_request_costs_a_wave() -> None:
    explorer = wave_explorer.WaveExplorer(batch=66)
    before = explorer.run(explorer.state)[1].makespan
    explorer.widgets["batch"].value = 67
    plan, timeline = explorer.run(explorer.state)
    assert timeline.makespan > 1.4 * before
    drawn = {trace.name.split(":")[0] for trace in explorer.figure(explorer.state).data}
    assert {"all work, spread evenly", "cache read once", "longest tile alone"} <= drawn
    assert timeline.makespan > max(bounds(plan).values())


def test_the_pipeline_explorer_shows_the_measured_loop_and_a_deadlock() -> None:
    explorer = pipeline_explorer.PipelineExplorer()
    for slider in explorer.widgets.values():
        assert (slider.value - slider.min) % slider.step == 0, "a browser moves it to its grid"
    assert explorer.figure(explorer.state).layout.title.text.startswith("2419 clocks a block")
    explorer.set(stages=1)
    assert "Deadlock" in explorer.figure(explorer.state).layout.title.text


@given(st.integers(1, 4), st.integers(1, 30), st.integers(1, 6))
def test_absorbed_is_naive_and_counts_are_formulas(q_len: int, kv_len: int, heads: int) -> None:
    layer, step = mla_math.Layer.random(heads), mla_math.Step.random(q_len, kv_len, heads)
    counts = mla_math.Counter(), mla_math.Counter()
    naive, absorbed = (
        mla_math.naive(layer, step, counts[0]),
        mla_math.absorbed(layer, step, counts[1]),
    )
    assert np.abs(naive - absorbed).max() < 1e-10
    assert counts[0].flops == mla_math.naive_flops(q_len, kv_len, heads)
    assert counts[1].flops == mla_math.absorbed_flops(q_len, kv_len, heads)


def test_the_absorb_explorer_changes_sides_at_the_break_even() -> None:
    explorer = absorb_explorer.AbsorbExplorer(new_tokens=128, kv_len=32768)
    assert 128 < mla_math.break_even() < 256
    assert "the absorbed form" in explorer.figure(explorer.state).layout.title.text
    explorer.widgets["new_tokens"].value = 256
    assert "the naive form" in explorer.figure(explorer.state).layout.title.text
    assert "nearly the same" in explorer.title(new_tokens=128, kv_len=512)


def test_known_places_on_the_roofline() -> None:
    assert roofline.intensity(128) == pytest.approx(241.8, abs=0.05)
    assert [roofline.free_drafts(H200, h) for h in (16, 32, 64, 128)] == [4, 1, 0, -1]
    assert roofline.attainable_tflops(H200, 1e6) == H200.tflops()
    assert roofline.card_source(H200).kind == "recorded"
    assert roofline.card_source(H100).kind == "predicted"
    with pytest.raises(InvalidInput, match="heads"):
        roofline.free_drafts(H200, 0)


def test_the_roofline_explorer_tells_the_side() -> None:
    explorer = roofline.RooflineExplorer(heads=16)
    assert "the memory side" in explorer.figure(explorer.state).layout.title.text
    # by the rates of the card's record, in which one H200 has a draft more than another
    free = roofline.free_drafts(roofline.card_named("H200"), 16, "bf16")
    assert f"{free} draft tokens are free with 16 heads over a long cache" in explorer.footer.value
    assert "the memory side" in explorer.title(drafts=free, kv_len=32768)
    assert "the compute side" in explorer.title(drafts=free + 1, kv_len=32768)
    explorer.widgets["heads"].value = 128
    assert "the compute side" in explorer.figure(explorer.state).layout.title.text
    assert "compute bound" in explorer.footer.value
