"""The epilogue of a work tile: its result is written, or kept as a partial and merged later."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from ...call.bind import Call
from ...core import kv_cache as formats
from ...plan import Plan, WorkTile


def number(scale: float | Tensor) -> float | Tensor:
    """A scale as torch multiplies by it."""
    return scale if isinstance(scale, Tensor) else float(scale)


class Epilogue:
    """Writes out and lse of one call, and keeps its partials."""

    def __init__(self, call: Call, plan: Plan) -> None:
        self.call, self.plan = call, plan
        heads = call.problem.heads
        sums = [0]
        for q_len in call.problem.q_lens:
            sums.append(sums[-1] + q_len * heads)
        self.row_begin = sums
        self.out, self.lse = call.out_rows, call.lse_rows
        self.out.fill_(math.nan)
        if self.lse is not None:
            self.lse.fill_(math.nan)
        # float64 partials for float64 calls, which splits would round otherwise
        shape = (plan.num_slots, plan.tile_rows)
        dtype = torch.float64 if call.problem.q_dtype == "fp64" else torch.float32
        self.partial_out = self.out.new_empty((*shape, call.problem.latent_dim), dtype=dtype)
        self.partial_lse = self.out.new_empty(shape, dtype=dtype)

    def store(self, tile: WorkTile, out: Tensor, lse: Tensor) -> None:
        """Keep or write the normalised out [rows, latent] and natural lse [rows] of a work tile."""
        if tile.slot < 0:
            self._write(tile, out, lse)
        else:
            self.partial_out[tile.slot, : len(out)] = out
            self.partial_lse[tile.slot, : len(lse)] = lse

    def finish(self, arrived: Mapping[tuple[int, int], int]) -> None:
        """Merge row tiles whose splits have all arrived; the others stay NaN.

        arrived: number of work tiles of each (request, row tile).
        """
        for tile in self.plan:
            complete = arrived[tile.request, tile.row_tile] == tile.num_splits
            if complete and tile.num_splits > 1 and tile.split_idx == 0:
                self._write(tile, *self._merge(tile))
            elif not complete and tile.slot < 0:
                begin, end = self._rows(tile)
                self.out[begin:end] = math.nan
                if self.lse is not None:
                    self.lse[begin:end] = math.nan

    def _merge(self, tile: WorkTile) -> tuple[Tensor, Tensor]:
        """The partials of a row tile, added in split order; weights exp(lse - greatest lse)."""
        begin, end = self.plan.rows(tile)
        slots = slice(tile.slot, tile.slot + tile.num_splits)
        outs, lses = self.partial_out[slots], self.partial_lse[slots, : end - begin]
        greatest = lses.amax(0).clamp_min(torch.finfo(lses.dtype).min)
        weights = torch.exp(lses - greatest)
        total = torch.zeros_like(greatest)
        out = outs.new_zeros(end - begin, outs.shape[-1])
        for part, weight in zip(outs, weights, strict=True):
            total += weight
            out += part[: end - begin] * weight.unsqueeze(1)
        out /= total.masked_fill(total == 0, 1).unsqueeze(1)
        return out, greatest + total.log()

    def _write(self, tile: WorkTile, out: Tensor, lse: Tensor) -> None:
        """out x share of the sink x bmm2_scale, rounded once; lse in the caller's base."""
        begin, end = self._rows(tile)
        out = out * number(self.call.args.bmm2_scale)
        sink = self.call.args.sink
        if sink is not None:
            first = self.plan.rows(tile)[0]
            head = torch.arange(first, first + len(lse), device=lse.device) % len(sink)
            share = torch.sigmoid(lse - sink[head])
            out *= share.masked_fill(lse.isneginf(), 0).unsqueeze(1)
        self.out[begin:end] = formats.pack(out, self.call.problem.out_dtype)
        if self.lse is not None:
            base2 = self.call.args.return_lse_base == "base2"
            self.lse[begin:end] = lse * math.log2(math.e) if base2 else lse

    def _rows(self, tile: WorkTile) -> tuple[int, int]:
        """The tile's rows in the call's flattened out."""
        first = self.row_begin[tile.request]
        begin, end = self.plan.rows(tile)
        return first + begin, first + end
