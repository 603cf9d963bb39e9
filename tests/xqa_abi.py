"""A stand-in for the CUDA decode kernel: its entry's arguments, the oracle behind them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from mla_lab.backends import base
from mla_lab.call.gqa_args import GqaArgs
from mla_lab.core import kv_cache as formats
from mla_lab.plan import KernelConfig
from mla_lab.plan.xqa import TILE_ROWS
from mla_lab.reference.gqa import decode_gqa_reference

NAMES = (
    "query", "keys", "values", "out", "lse", "partial_out", "partial_lse", "counters",
    "tables", "seq_lens", "q_begin", "mask", "sinks", "bmm1", "bmm2", "scale1", "scale2",
    "lse_scale", "q_len", "window_left", "max_splits", "split_tokens", "nhd", "pdl",
)  # fmt: skip


def with_current_card(monkeypatch: pytest.MonkeyPatch, index: int) -> list[int]:
    """Lets CPU tensors pass for those of card `index` where card 0 is the current one; the cards
    that are made current, in order.
    """
    entered: list[int] = []

    @contextmanager
    def card(device: torch.device) -> Iterator[None]:
        entered.append(index)
        yield

    elsewhere = base.is_elsewhere
    monkeypatch.setattr(base, "is_elsewhere", lambda _: elsewhere(torch.device("cuda", index)))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device", card)
    return entered


class AbiKernel:
    """Keeps what it was launched with; refuses what the binding refuses."""

    def __init__(self, config: KernelConfig, wrong_by: float = 0.0) -> None:
        self.config = config
        self.wrong_by = wrong_by
        self.launches: list[dict[str, Any]] = []

    def function(self, name: str) -> Any:
        assert name == "occupancy"
        return lambda: 2

    def launch(self, *arguments: Any) -> None:
        given = dict(zip(NAMES, arguments, strict=True))
        self.launches.append(given)
        if given["query"].data_ptr() % 16:
            raise ValueError("query: supported: multiples of 16 bytes")
        options = dict(self.config.options)
        qk_dim = options.get("qk_dim", 576)
        value_dim = qk_dim if "qk_dim" in options else 512
        assert given["query"].shape[-1] == qk_dim
        self._check_room(given, value_dim)
        assert (given["tables"].dim() == 3) <= (not options.get("shared_kv", int(qk_dim == 576)))
        result = decode_gqa_reference(_call(given, value_dim))
        out = result.out * (1 + self.wrong_by)
        written = self._written(given)
        where = given["out"].view(-1, *out.shape[-2:])
        packed = formats.pack(out, _name(given["out"])).view(where.shape)
        where[written] = packed[written]
        if given["lse"].numel():
            lse = (result.lse * given["lse_scale"]).view(written.shape)
            given["lse"].view(written.shape)[written] = lse[written].float()

    def _written(self, given: dict[str, Any]) -> Tensor:
        """bool [tokens, heads]: rows that the grid has a row tile for."""
        heads, keys = given["query"].shape[-2], given["keys"]
        tokens = given["query"].numel() // given["query"].shape[-1] // heads
        kv_heads = 1 if keys.dim() == 3 else keys.shape[2 if given["nhd"] else 1]
        group = heads // kv_heads
        tile = TILE_ROWS * dict(self.config.options).get("row_tiles", 1)
        token = torch.arange(tokens)
        if given["q_begin"].numel():
            begins = given["q_begin"]
            token = token - begins[torch.searchsorted(begins, token, right=True) - 1]
        else:
            token = token % given["q_len"]
        row = token[:, None] * group + torch.arange(heads) % group
        return row < -(-given["q_len"] * group // tile) * tile

    def _check_room(self, given: dict[str, Any], value_dim: int) -> None:
        """Partials and counters for every piece and row tile, as the binding looks at them."""
        if given["max_splits"] == 1:
            assert not given["partial_out"].numel()
            return
        heads = given["query"].shape[-2]
        keys, rows = given["keys"], TILE_ROWS * dict(self.config.options).get("row_tiles", 1)
        kv_heads = 1 if keys.dim() == 3 else keys.shape[2 if given["nhd"] else 1]
        tiles = -(-given["q_len"] * (heads // kv_heads) // rows) * kv_heads
        groups = tiles * len(given["seq_lens"])
        assert given["partial_out"].shape[1:] == (rows, value_dim)
        assert len(given["partial_out"]) >= groups * given["max_splits"]
        assert given["partial_lse"].shape == given["partial_out"].shape[:2]
        assert len(given["counters"]) >= groups
        assert not given["counters"].any()


def _name(tensor: Tensor) -> str:
    return formats.DTYPE_NAMES[tensor.dtype]


def _pages(cache: Tensor, nhd: bool) -> Tensor:
    """[pages, page_size, kv_heads, dim], widened."""
    cache = cache.float()
    if cache.dim() == 3:
        return cache.unsqueeze(2)
    return cache if nhd else cache.transpose(1, 2)


def _call(given: dict[str, Any], value_dim: int) -> GqaArgs:
    def scale(number: str, tensor: str) -> float:
        return float(given[tensor]) if given[tensor].numel() else given[number]

    query = given["query"]
    mask = given["mask"]
    return GqaArgs(
        workspace_buffer=None,
        max_seq_len=0,
        query=query.reshape(-1, *query.shape[-2:]).float(),
        kv_cache=(
            _pages(given["keys"], given["nhd"]),
            _pages(given["values"], given["nhd"])[..., :value_dim],
        ),
        block_tables=given["tables"],
        seq_lens=given["seq_lens"],
        bmm1_scale=scale("scale1", "bmm1"),
        bmm2_scale=scale("scale2", "bmm2"),
        window_left=given["window_left"],
        sinks=given["sinks"] if given["sinks"].numel() else None,
        kv_layout="NHD",
        q_len_per_req=given["q_len"],
        mask=mask.view(-1, mask.shape[-1]) if mask.numel() else None,
        cum_seq_lens_q=given["q_begin"] if given["q_begin"].numel() else None,
        uses_shared_paged_kv_idx=given["tables"].dim() == 2,
    )
