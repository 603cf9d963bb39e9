"""Notebook 40's machinery: bytes of a token, terms, weights, sums of few bits, V turned over."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

import mla_lab
from mla_lab.bench.records import describe_case
from mla_lab.core.errors import InvalidInput
from mla_lab.core.kv_cache import pack, split_656, token_bytes
from mla_lab.core.resources import data_dir
from mla_lab.lab import eight_bits, measuring
from mla_lab.lab.explorers import accumulator as accumulator_explorer
from mla_lab.lab.explorers import format as format_explorer
from mla_lab.lab.explorers import rounding as rounding_explorer
from mla_lab.lab.explorers import split as split_explorer
from mla_lab.lab.explorers import token as token_explorer
from mla_lab.lab.explorers import transpose as transpose_explorer
from mla_lab.verify.eight_bit_error import exact
from mla_lab.verify.record import read

ALL_BF16 = torch.arange(1, 0x4380, dtype=torch.int16).view(torch.bfloat16).double()


@pytest.mark.parametrize("kv_format", ["bf16", "e4m3", "fp8_656"])
def test_fields_cover_a_token_without_gaps(kv_format: str) -> None:
    fields = eight_bits.fields(kv_format)
    ends = [0, *(field.end for field in fields)]
    assert [field.begin for field in fields] == ends[:-1]
    assert ends[-1] == token_bytes(kv_format)
    with pytest.raises(InvalidInput, match="byte"):
        eight_bits.field_at(kv_format, ends[-1])


def test_a_byte_is_named_as_the_package_stores_it() -> None:
    stored = pack(torch.ones(1, 576), "fp8_656")
    latent, scales, rope = split_656(stored)
    for view, part in ((latent, "latent"), (scales, "fp32 scale"), (rope, "rope")):
        begin = view.storage_offset() * view.element_size()
        for element in (0, view.shape[-1] - 1):
            words = token_explorer.describe("fp8_656", begin + element * view.element_size())
            assert words.startswith(part)
            assert f" {element}," in words
    assert "columns 256 to 383" in token_explorer.describe("fp8_656", 520)


def test_two_terms_are_every_bf16_number_that_is_not_tiny() -> None:
    for sign in (1, -1):
        terms = eight_bits.split(sign * ALL_BF16)
        large = ALL_BF16 >= 2.0**-6
        assert torch.equal(terms.sum[large], sign * ALL_BF16[large])
        assert (terms.sum - sign * ALL_BF16).abs().max() <= eight_bits.TOP * 2.0**-22
        for term in terms:
            assert torch.equal(eight_bits.e4m3(term), term)


def test_a_row_is_scaled_by_a_power_of_two_to_the_top_octave() -> None:
    rows = torch.tensor([[1.0, 0.1], [255.0, 3.0], [-256.0, 1.0], [1e-30, 0.0], [0.0, 0.0]])
    scale = eight_bits.row_scale(rows)
    assert torch.equal(torch.frexp(scale)[0], torch.full_like(scale, 0.5))
    top = (rows.double().abs().amax(-1, keepdim=True) * scale)[:4]
    assert ((top >= 128) & (top < 256)).all()
    assert eight_bits.splits_exactly(rows.bfloat16()).all()


def test_rounded_sums_keep_the_answer_an_average() -> None:
    random = torch.Generator().manual_seed(0)
    query, keys = torch.randn(4, 576, generator=random), torch.ones(300, 576)
    keys[:, 512:] = torch.randn(300, 64, generator=random)
    for way in eight_bits.WEIGHTS:
        out = eight_bits.decode(query, keys, 1.0, way, sums="rounded")
        assert (out - 1).abs().max() < 1e-12
    assert (eight_bits.decode(query, keys, 1.0, "e4m3 x 1", sums="exact") - 1).abs().max() > 1e-4


def test_two_terms_of_weights_are_closer_than_bf16() -> None:
    random = torch.Generator().manual_seed(1)
    query, keys = torch.randn(4, 576, generator=random), torch.randn(500, 576, generator=random)
    found = {way: error for way, error, _ in eight_bits.sum_errors(query, keys.double(), 0.05)}
    assert found["two terms x 256"] < found["bf16"] < found["e4m3 x 256"] < 0.05
    out = eight_bits.decode(query, keys, 0.05, "bf16", sums="exact")
    wanted = exact(query, keys.double(), 0.05)
    assert (out - wanted).norm() < 0.01 * wanted.norm()


def test_unknown_ways_are_named() -> None:
    with pytest.raises(InvalidInput, match="rounding"):
        eight_bits.rounded(torch.ones(1), "e5m2")
    with pytest.raises(InvalidInput, match="sums"):
        eight_bits.decode(torch.ones(1, 576), torch.ones(1, 576), 1.0, "bf16", sums="none")


def test_one_scale_fails_beyond_what_e4m3_spans() -> None:
    near, far = eight_bits.spread_errors(10), eight_bits.spread_errors(16)
    assert near["e4m3, one scale"] < 0.03 < 0.2 < far["e4m3, one scale"]
    assert far["e4m3, a scale a token"] < 0.03
    assert near["int8, one scale"] == 1.0


def test_a_unit_of_many_bits_is_exact_and_one_of_few_forgets() -> None:
    random = torch.Generator().manual_seed(2)
    products = torch.rand(40, accumulator_explorer.STEP, 3, generator=random).double()
    wanted = products.sum(1).cumsum(0)

    def gap(bits: int, promote: int) -> float:
        sums = accumulator_explorer.accumulate(products, bits, promote)
        assert (sums <= wanted * (1 + 1e-6)).all(), "cut towards zero"
        return float((wanted - sums)[-1].max() / wanted[-1].max())

    assert gap(50, 0) < 1e-7
    assert 1e-7 < gap(14, 2) < gap(14, 0) < gap(10, 0)


def test_the_simulated_unit_is_as_forgetful_as_the_measured_one() -> None:
    # data/notes/kernel_attempts.jsonl: 1.02x at 8192 tokens, 2.5x at 65536; added tile by tile
    # 1.08x
    weights, alone, tiles = (
        accumulator_explorer.accumulator_curve(*x) for x in ((0, 0), (14, 0), (14, 2))
    )
    at = accumulator_explorer.LENGTHS.index(8192)
    assert alone[at] / weights[at] < 1.1
    assert 2 < alone[-1] / weights[-1] < 3
    assert tiles[-1] / weights[-1] < 1.1


def test_the_turned_operand_is_the_kernels() -> None:
    sources = (Path(mla_lab.__file__).parent / "cute").rglob("*.py")
    found = {
        tuple(int(n, 16) for n in line.split(", "))
        for source in sources
        for line in re.findall(r"^ORDERS = \((.*)\)$", source.read_text(), re.MULTILINE)
    }
    assert found == {transpose_explorer.ORDERS}
    assert transpose_explorer.token_order()[:6] == [0, 8, 1, 9, 2, 10]
    for lane in range(32):
        for i, word in enumerate(transpose_explorer.operand(lane)):
            # row g of V^T is column 2 g, row g + 8 column 2 g + 1
            assert {column for _, column in word} == {2 * (lane // 4) + i % 2}


def test_digits_and_bytes() -> None:
    assert split_explorer.digits(100.5) == {6: 1, 5: 1, 4: 0, 3: 0, 2: 1, 1: 0, 0: 0, -1: 1}
    assert split_explorer.digits(0.0) == {}
    assert split_explorer.byte_of(-448.0) == "1 1111 110"


def test_a_number_beyond_the_rows_greatest_is_told() -> None:
    split = split_explorer.SplitExplorer(number="-65", top=64)
    assert "itself the greatest" in split.footer.value
    for number, top in (("-64", 64), ("65", 1024), ("none", 1), ("inf", 1)):
        assert "itself the greatest" not in split.set(number=number, top=top).footer.value


def test_the_split_explorer_tells_what_is_lost_and_what_is_no_number() -> None:
    explorer = split_explorer.SplitExplorer(number="3.14159", top=4)
    assert "exactly" in explorer.figure(explorer.state).alt
    explorer.set(number="1.00781", top=2**16)
    assert "2^-24 of the top" in explorer.figure(explorer.state).alt
    for text in ("hello", "inf", "1e99"):
        explorer.widgets["number"].value = text
        assert "no number" in explorer.figure(explorer.state).alt
    explorer.widgets["number"].value = "0"
    assert "0 becomes 0" in explorer.figure(explorer.state).alt


def test_explorers_state_their_findings() -> None:
    token = token_explorer.TokenExplorer(kv_format="e4m3", byte=1151)
    assert (
        "576 bytes a token, 0.50 of bf16; byte 575: rope column 63" in token.figure(token.state).alt
    )
    scales = rounding_explorer.RoundingExplorer()
    lines = rounding_explorer.rounding_lines("heavy_tailed", "scales")
    finer = lines["128"][32768] / lines["tensor"][32768]
    assert finer > 1, "here the finest scales are the worst, and the title says so"
    said = scales.title(inputs="a sink token, outlier columns")
    assert said.startswith(f"656 bytes have {finer:.2f} times the error of one scale")
    errors = rounding_explorer.RoundingExplorer(question="rounding of the weights")
    for inputs in rounding_explorer.INPUTS:
        errors.widgets["inputs"].value = inputs
        assert len(errors.figure(errors.state).data) == 4
    turned = transpose_explorer.TransposeExplorer(lane=31)
    assert "column 14 of tokens 6, 14, 7, 15" in turned.figure(turned.state).alt


def test_figures_of_formats_are_found_by_what_was_called(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "records").mkdir()
    monkeypatch.setattr(measuring, "data_dir", lambda: tmp_path)
    explorer = format_explorer.FormatExplorer(live=True)
    assert "not recorded" in explorer.figure(explorer.state).layout.title.text
    assert "nothing to measure" in explorer.footer.value
    assert "not recorded" in format_explorer.format_table().column("us")
    head = {"schema": 1, "time": "2026-11-20T12:00:00+00:00"}
    ceilings = {"gemm_tflops": 780.0, "read_tbps": 4.4}
    environment = {"card": {"name": "NVIDIA H200"}}
    run = {"environment": environment, "ceilings": ceilings, "method": {}, "peers": []}
    lines = [{**head, "kind": "run", **run}]
    for name, us in (("bf16 throughout", 280.0), ("bf16 query, e4m3 cache", 140.0)):
        row = describe_case(format_explorer.format_case(name, 64, 16)) | {"case": f"named {us}"}
        row |= {**head, "kind": "result", "peer": "mla-lab", "part": 0, "status": "ok"}
        lines.append(row | {"us": us, "rel_error": 0.002, "rounds": {"us": [us]}})
    record = tmp_path / format_explorer.RECORD
    record.write_text("".join(json.dumps(line) + "\n" for line in lines))
    explorer.redraw()
    figure = explorer.figure(explorer.state)
    assert figure.layout.title.text.endswith("bf16 query, e4m3 cache 2.00x as fast as bf16")
    assert list(figure.data[1].x) == [280.0, 140.0]
    assert format_explorer.format_table().column("speed over bf16")[:3] == ["1.00x", "", "2.00x"]
    monkeypatch.setattr(format_explorer, "live_us", lambda case: 99.0)
    explorer.redraw()
    assert list(explorer.figure(explorer.state).data[2].x) == [99.0] * 4


def test_kernels_errors_are_those_of_the_record() -> None:
    made = eight_bits.kernel_errors()
    rows = read(data_dir() / eight_bits.RECORD)
    times = [row["times_torch"] for row in rows if row.get("status") == "ok"]
    shown = [float(text.removesuffix("x")) for text in made.column("of torch's error")]
    assert max(shown) == pytest.approx(max(times), abs=5e-3)
    inside = [x for x, keys in zip(shown, made.column("keys"), strict=True) if not keys]
    assert 0 < max(inside) <= 2 and len(inside) >= 9
