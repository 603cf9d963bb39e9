"""What eight bits cost: the simulated roundings, and the record of them."""

from __future__ import annotations

import json

import pytest
import torch

from mla_lab.core.problem import Problem
from mla_lab.core.resources import data_dir
from mla_lab.reference.inputs import DISTRIBUTIONS, make_inputs
from mla_lab.reference.mla import decode_reference
from mla_lab.reference.operands import operands
from mla_lab.verify.eight_bit_error import (
    BATCH,
    GRANULARITIES,
    HEADS,
    KV_LENS,
    SEED,
    WEIGHT_SCALES,
    by_tiles,
    dequantised,
    exact,
    rows,
)

RECORD = [
    json.loads(line) for line in (data_dir() / "runtime/quantised.jsonl").read_text().splitlines()
]


def recorded(inputs: str, kv_len: int, scales: str, weights: str, field: str) -> float:
    (found,) = (
        row[field]
        for row in RECORD
        if (row["inputs"], row["kv_len"], row["scales"], row["weights"])
        == (inputs, kv_len, scales, weights)
    )
    return float(found)


def test_exact_is_the_oracle_and_tiles_differ_by_rounding_alone() -> None:
    inputs = make_inputs(Problem.uniform(BATCH, 1, 65, HEADS), SEED)
    expected = decode_reference(inputs).out
    scale = float(inputs.bmm1_scale)
    for request, wanted in zip(operands(inputs), expected, strict=True):
        query, keys = request.query[0], request.keys[0]
        torch.testing.assert_close(exact(query, keys, scale), wanted[0].double())
        found = by_tiles(query, keys, scale, 0)
        # 65 keys: the second tile has one, and 63 that nobody sees
        assert (found - wanted[0]).norm() < 4e-3 * wanted[0].norm()


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_eight_bits_keep_three_of_a_mantissa(granularity: str) -> None:
    tokens = torch.randn(33, 576, generator=torch.Generator().manual_seed(0)).bfloat16()
    back = dequantised(tokens, granularity)
    relative = float((back - tokens.double()).norm() / tokens.double().norm())
    assert relative == 0 if granularity == "none" else 0.01 < relative < 0.035


def test_the_record_has_every_combination_and_can_be_made_again() -> None:
    assert len(RECORD) == len(DISTRIBUTIONS) * len(KV_LENS) * len(GRANULARITIES) * len(
        WEIGHT_SCALES
    )
    for row in rows("heavy_tailed", 128):
        keys = (row["inputs"], row["kv_len"], row["scales"], row["weights"])
        for field in ("error", "arithmetic"):
            assert row[field] == pytest.approx(recorded(*keys, field), rel=0.05)  # type: ignore[arg-type]


def test_a_sink_token_starves_weights_that_do_not_fill_their_range() -> None:
    errors = [
        recorded("heavy_tailed", 32768, "tensor", f"e4m3 x {scale}", "arithmetic")
        for scale in (1, 256, 448)
    ]
    assert errors == sorted(errors, reverse=True)
    assert errors[0] > 10 * errors[1]
    # without one the range does not matter, and long contexts average the rounding out
    gauss = [
        recorded("gauss", n, "tensor", f"e4m3 x {s}", "arithmetic")
        for n in KV_LENS
        for s in (1, 448)
    ]
    assert max(gauss[0::2]) == pytest.approx(max(gauss[1::2]), rel=0.1)
    assert gauss[-1] < gauss[0] / 3
