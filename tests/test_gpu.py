"""Cards: datasheet figures that agree with each other, measured ceilings, the card that is here."""

from __future__ import annotations

import math
import sys
from itertools import combinations_with_replacement
from types import SimpleNamespace

import pytest

from mla_lab.core.errors import InvalidInput
from mla_lab.core.gpu import B200, H100, H200, H800, HOPPER_CLUSTERS, PRESETS, Gpu, from_properties
from mla_lab.core.problem import Problem


@pytest.mark.parametrize("gpu", PRESETS, ids=lambda gpu: gpu.name)
def test_stated_rates_follow_from_clock_and_sms(gpu):
    flop_per_clock = 4096 if gpu.arch == "sm_90a" else 8192
    assert gpu.sms * flop_per_clock * gpu.clock_mhz * 1e6 == pytest.approx(
        gpu.bf16_tflops * 1e12, rel=2e-3
    )
    assert gpu.fp8_tflops == pytest.approx(2 * gpu.bf16_tflops, rel=1e-3)
    assert gpu.smem_per_sm - gpu.smem_per_block == 1024
    assert "NVIDIA" in gpu.source or "as H100" in gpu.source


def test_only_the_h200_was_measured():
    assert [gpu.ceilings is not None for gpu in PRESETS] == [False, False, True, False]
    ceilings = H200.ceilings
    assert ceilings is not None
    assert (ceilings.read_tbps, ceilings.copy_tbps, ceilings.date) == (4.33, 4.24, "2026-11-20")
    assert ceilings.read_tbps < H200.hbm_tbps
    assert ceilings.sustained_tflops[1] < ceilings.burst_tflops < H200.bf16_tflops


def test_ridge():
    assert H200.ridge() == pytest.approx(702 / 4.33)
    assert 160 < H200.ridge() < 180
    assert H100.ridge() == pytest.approx(989.4 / 3.35)
    assert H200.ridge("e4m3") == pytest.approx(2 * H200.ridge(), rel=1e-3)


def test_roofline_places_decode_shapes():
    """Large batches of the recorded table: 280 us of reads at 16 heads, 416 us of matrix at 128."""
    memory = Problem.uniform(128, 1, 8192, heads=16)
    compute = Problem.uniform(128, 1, 8192, heads=128)
    assert H200.bound(memory) == "memory"
    assert H200.bound(compute) == "compute"
    assert H200.roofline_time(memory) * 1e6 == pytest.approx(280, rel=0.01)
    assert H200.roofline_time(compute) * 1e6 == pytest.approx(416, rel=0.01)
    assert H200.roofline_time(compute) == H200.matrix_time(compute) > H200.memory_time(compute)


def test_both_operands_in_e4m3_double_the_matrix_rate():
    mixed = Problem.uniform(64, 1, 8192, heads=128, kv_format="e4m3")
    both = Problem.uniform(64, 1, 8192, heads=128, q_dtype="e4m3", kv_format="e4m3")
    assert H200.matrix_time(mixed) == pytest.approx(2 * H200.matrix_time(both), rel=1e-3)


def test_workers():
    assert [H200.workers(c) for c in (1, 2, 4, 8, 16)] == [132, 66, 30, 15, 7]
    assert (H100.workers(8), B200.workers(2), B200.workers(8)) == (15, 74, 18)


def test_cluster_counts_hold_for_every_die_that_the_observation_allows():
    """8 GPCs of at most 18 SMs in pairs, 132 in all, room for 15 clusters of 8."""
    for gpcs in combinations_with_replacement(range(0, 19, 2), 8):
        if sum(gpcs) == 132 and sum(n // 8 for n in gpcs) == 15:
            for size, count in HOPPER_CLUSTERS:
                assert count <= sum(n // size for n in gpcs)


def test_a_cluster_has_1_to_16_ctas():
    with pytest.raises(InvalidInput, match="cluster: got 0; supported: 1 to 16"):
        H200.workers(0)


@pytest.mark.parametrize(
    ("name", "gpu"), [("h200", H200), ("H100 SXM", H100), ("h100-sxm", H100), ("H800", H800)]
)
def test_presets_by_name(name, gpu):
    assert Gpu.preset(name) is gpu


def test_unknown_preset():
    with pytest.raises(InvalidInput, match=r"gpu: got 'A100'; supported: .*H200"):
        Gpu.preset("A100")


def properties(name: str, sms: int = 132) -> SimpleNamespace:
    return SimpleNamespace(
        name=name, multi_processor_count=sms, major=9, minor=0, total_memory=150 * 10**9
    )


def test_a_known_card_is_its_preset():
    assert from_properties(properties("NVIDIA H200")) is H200
    assert from_properties(properties("NVIDIA H100 80GB HBM3")) is H100
    assert from_properties(properties("NVIDIA B200", 148)) is B200


@pytest.mark.parametrize(
    ("name", "sms", "like"),
    [
        ("NVIDIA GH200 480GB", 132, H200),
        ("NVIDIA GB200", 148, B200),
        ("NVIDIA H100 PCIe", 114, H100),
        ("NVIDIA H200 NVL", 132, H200),
    ],
)
def test_a_board_with_other_memory_has_no_rate_of_another(name, sms, like):
    card = from_properties(properties(name, sms))
    assert (card.name, card.arch, card.sms, card.ceilings) == (name, like.arch, sms, None)
    assert math.isnan(card.read_tbps) and card.tflops() == like.bf16_tflops


def test_a_slice_of_a_card_keeps_no_measured_ceiling():
    part = from_properties(properties("NVIDIA H200 MIG 3g.71gb", 60))
    assert (part.name, part.sms, part.ceilings) == ("H200", 60, None)
    assert part.workers(8) == 7


def test_an_unknown_card_states_what_it_reports():
    card = from_properties(properties("NVIDIA H20", 78))
    assert (card.name, card.arch, card.sms) == ("NVIDIA H20", "sm_90a", 78)
    assert math.isnan(card.hbm_tbps)
    assert card.source == "device properties: rates unknown"


def test_here_without_torch_or_gpu(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    assert Gpu.here() is None
    absent = SimpleNamespace(cuda=SimpleNamespace(is_available=lambda: False))
    monkeypatch.setitem(sys.modules, "torch", absent)
    assert Gpu.here() is None


def test_here_reads_the_device(monkeypatch):
    cuda = SimpleNamespace(
        is_available=lambda: True,
        get_device_properties=lambda index: properties(("NVIDIA H200", "NVIDIA H800")[index]),
    )
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    assert Gpu.here() is H200
    assert Gpu.here(1) is H800


@pytest.mark.gpu
def test_here_knows_this_card():
    here = Gpu.here()
    assert here is not None
    assert here.arch == "sm_90a"
