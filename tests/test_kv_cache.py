from __future__ import annotations

import struct

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mla_lab.core import kv_cache as formats
from mla_lab.core.errors import InvalidInput
from mla_lab.core.problem import KV_FORMATS, Problem

#: relative distance of neighbouring values, halved: the most that packing may lose
ROUNDING = {"bf16": 2**-8, "fp16": 2**-11, "e4m3": 2**-4, "fp8_656": 2**-4, "fp32": 2**-24}


def gauss(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("kv_format", KV_FORMATS)
def test_pack_and_unpack_lose_only_rounding(kv_format):
    tokens = gauss(20, 576)
    back = formats.unpack(formats.pack(tokens, kv_format))
    # under e4m3's smallest normal (2^-6, times the scale in 656 bytes) steps are absolute
    slack = 2**-10 if kv_format in ("e4m3", "fp8_656", "fp16") else 0.0
    assert back.dtype is torch.float64
    assert ((back - tokens).abs() <= ROUNDING.get(kv_format, 0.0) * tokens.abs() + slack).all()


@pytest.mark.parametrize("kv_format", KV_FORMATS)
def test_stored_values_survive_a_second_packing(kv_format):
    once = formats.unpack(formats.pack(gauss(20, 576), kv_format))
    assert torch.equal(formats.unpack(formats.pack(once, kv_format)), once)


@pytest.mark.parametrize("kv_format", KV_FORMATS)
def test_bytes_agree_with_the_problem_and_the_tensor(kv_format):
    stored = formats.pack(gauss(3, 576), kv_format)
    assert formats.token_bytes(kv_format) == stored[0].numel() * stored.element_size()
    problem = Problem.uniform(1, 1, 1, 16, kv_format=kv_format)
    assert formats.token_bytes(kv_format) == problem.kv_token_bytes
    assert formats.storage(kv_format) == (stored.dtype, stored.shape[-1])
    assert formats.format_of(stored) == kv_format


def test_small_dims_have_their_bytes():
    assert formats.token_bytes("bf16", 256, 64) == 640
    assert formats.pack(gauss(3, 320), "e4m3").shape == (3, 320)


def test_656_bytes_by_hand():
    """The layout byte by byte: 512 e4m3, four fp32 scales, 64 bf16 rope values."""
    tokens = torch.zeros(1, 576)
    tokens[0, 0] = 448.0 * 2  # group 0: scale 2
    tokens[0, 130] = -3.5  # group 1: scale 2^-7, the least power of two not below 3.5 / 448
    tokens[0, 512] = 1.5
    raw = bytes(formats.pack(tokens, "fp8_656")[0].tolist())
    assert len(raw) == 656
    assert raw[0] == 0x7E  # 448
    assert raw[130] == 0x80 | 0x7E  # -448
    scales = struct.unpack("<4f", raw[512:528])
    assert scales[:2] == (2.0, 2.0**-7)
    assert struct.unpack("<H", raw[528:530])[0] == 0x3FC0  # 1.5 in bf16
    assert set(raw[530:]) == {0}


@given(st.integers(0, 2**32 - 1), st.floats(-8, 8))
def test_656_scales_are_powers_of_two_and_exact_in_bf16(seed, log_size):
    stored = formats.pack(gauss(2, 576, seed=seed) * 2.0**log_size, "fp8_656")
    scales = formats.split_656(stored)[1]
    assert torch.equal(scales.frexp().mantissa, torch.full_like(scales, 0.5))
    exact = formats.unpack(stored)
    assert torch.equal(formats.unpack(stored, torch.bfloat16).double(), exact)


def test_656_plain_scales_use_the_whole_range():
    stored = formats.pack(gauss(4, 576), "fp8_656", power_of_two_scales=False)
    latent = formats.split_656(stored)[0].float().unflatten(-1, (4, 128))
    assert torch.equal(latent.abs().amax(-1), torch.full((4, 4), 448.0))


def test_656_unpacks_to_bf16_with_one_rounding():
    stored = formats.pack(gauss(50, 576), "fp8_656", power_of_two_scales=False)
    exact = formats.unpack(stored)
    rounded = formats.unpack(stored, torch.bfloat16)
    assert ((rounded.double() - exact).abs() <= 2**-8 * exact.abs() * (1 + 2**-12)).all()


def test_656_zero_group_stays_zero():
    assert torch.equal(
        formats.unpack(formats.pack(torch.zeros(1, 576), "fp8_656")), torch.zeros(1, 576).double()
    )


def test_e4m3_saturates_where_a_cast_gives_nan():
    packed = formats.pack(torch.tensor([[1000.0, -1000.0]]), "e4m3")
    assert formats.unpack(packed).tolist() == [[448.0, -448.0]]


@pytest.mark.parametrize("kv_format", KV_FORMATS)
@pytest.mark.parametrize("gap", [0, 3])
def test_poisoned_pages_are_nan_everywhere(kv_format, gap):
    pool = formats.poisoned_pages(3, 4, kv_format, gap=gap)
    assert pool.shape[:2] == (3, 4)
    assert formats.unpack(pool).isnan().all()
    assert pool.stride(0) == (4 + gap) * pool.shape[2]


@given(
    kv_format=st.sampled_from(KV_FORMATS),
    page_size=st.integers(1, 9),
    length=st.integers(0, 40),
    gap=st.integers(0, 2),
    four_d=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_gather_returns_what_scatter_wrote(kv_format, page_size, length, gap, four_d, seed):
    needed = formats.pages_of(length, page_size)
    pool = formats.poisoned_pages(needed + 2, page_size, kv_format, gap=gap)
    if four_d:
        pool = pool.unsqueeze(1)
    ids = torch.randperm(needed + 2, generator=torch.Generator().manual_seed(seed))[:needed]
    table = torch.cat([ids, torch.tensor([1 << 30, -7])]).int()
    stored = formats.pack(gauss(length, 576, seed=seed), kv_format)
    formats.scatter(pool, table, stored)

    gathered = formats.gather(pool, table, length)
    assert gathered.dtype is stored.dtype
    assert torch.equal(formats.unpack(gathered), formats.unpack(stored))
    position = torch.arange(length)
    slots = ids[position // page_size] * page_size + position % page_size
    assert torch.equal(formats.unpack(formats.gather_slots(pool, slots)), formats.unpack(stored))
    # every other slot still holds its poison
    written = (~formats.unpack(formats.as_pages(pool)).isnan().any(-1)).sum()
    assert written == length


def test_unknown_formats_and_caches_are_refused():
    with pytest.raises(InvalidInput, match="kv_format"):
        formats.pack(gauss(1, 576), "int4")
    with pytest.raises(InvalidInput, match="655"):
        formats.format_of(torch.zeros(1, 1, 655, dtype=torch.uint8))
    with pytest.raises(TypeError, match="kv_cache"):
        formats.format_of(torch.zeros(1, 1, 576, dtype=torch.int32))
    with pytest.raises(InvalidInput, match="512"):
        formats.pack(gauss(1, 320), "fp8_656")
    with pytest.raises(InvalidInput, match="page_size"):
        formats.as_pages(torch.zeros(2, 2, 4, 576))
