"""Float64 oracle of an MLA decode call.

One request at a time. `attend` is attention in four lines; each feature of the contract is a
small function beside it, or is resolved in `operands` (pages, token formats, visibility):

    attend          scores -> mask -> softmax -> out, lse
    skip_tiles      KV tiles that skip-softmax drops
    add_sinks       one more term in the denominator
    merge_partials  partials of splits or ranks, by their lse

Values are the latent columns of the keys (DeepSeek-V2, arXiv:2405.04434, section 2.1).
On a GPU all tensors stay there; dtype=torch.float32 is faster, with errors of about 1e-6 as long
as TF32 is off (torch's default).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from ..call.decode_args import DecodeArgs
from ..core.errors import invalid
from .operands import Operands, operands


class Result(NamedTuple):
    """out `query.shape[:-1] + (latent,)` and lse [total_q, heads], in the oracle's dtype."""

    out: Tensor
    lse: Tensor


@dataclass(frozen=True)
class TileWalk:
    """The tiles and splits on which the definition of skip-softmax depends.

    A row tile is `tile_rows` consecutive rows (row = token x heads + head) of a request, a KV
    tile `tile_kv` consecutive positions; KV tiles are processed in rising order. `split_begins[b]`
    are the KV tiles at which request b's splits start (none given: one split from tile 0); each
    split starts its running maximum anew and never skips its first tile.
    """

    tile_rows: int = 64
    tile_kv: int = 64
    split_begins: Sequence[Sequence[int]] | None = None

    def starts(self, request: int) -> set[int]:
        """KV tiles of a request that are the first of a split."""
        return {0} if self.split_begins is None else set(self.split_begins[request])


def decode_reference(
    call: DecodeArgs,
    *,
    walk: TileWalk | None = None,
    dtype: torch.dtype = torch.float64,
    counted: Callable[[int, int], None] = lambda done, total: None,
) -> Result:
    """Exact result of a decode call. The lse excludes the sinks, and is in the call's base.

    A row without a key has out 0 and lse -inf. walk: used by skip-softmax only, by default
    one split of 64 x 64 tiles. counted: called after each request with (done, total). Raises
    InvalidInput or Unsupported for contradictory arguments.
    """
    scale = float(call.bmm1_scale)
    factor = call.skip_softmax_threshold_scale_factor
    parts = []
    for b, request in enumerate(operands(call, dtype)):
        if factor is not None:
            request = skip_tiles(request, scale, float(factor), walk or TileWalk(), b)
        parts.append(attend(request, scale))
        counted(len(parts), len(call.seq_lens))
    lse = torch.cat([part.lse for part in parts])
    out = add_sinks(torch.cat([part.out for part in parts]), lse, call.sinks)
    out = (out * float(call.bmm2_scale)).reshape(*call.query.shape[:-1], call.kv_lora_rank)
    return Result(out, in_base(lse, call.return_lse_base))


def attend(request: Operands, scale: float) -> Result:
    """Attention of one request: out [q_len, heads, latent], natural lse [q_len, heads]."""
    scores = (scale * (request.query @ request.keys.mT)).masked_fill(~request.visible, -math.inf)
    lse = torch.logsumexp(scores, dim=-1)
    weights = torch.exp(scores - _zero_if_empty(lse).unsqueeze(-1))
    return Result(weights @ seen_values(request), lse)


def seen_values(request: Operands) -> Tensor:
    """Values, with zeros for keys that no row sees, whose memory may hold NaN."""
    seen = request.visible.any(1)
    if len(request.values) == 1:
        seen = seen.any(0, keepdim=True)
    return request.values.masked_fill(~seen.unsqueeze(-1), 0.0)


def merge_partials(
    outs: Tensor, lses: Tensor, sinks: Tensor | Sequence[Tensor] | None = None
) -> Result:
    """Merge of partials over disjoint keys, each weighted by exp(its lse - lse of all).

    outs: [parts, ..., heads, latent]; lses: natural, sinks excluded, [parts, ..., heads] or, as
    calls return them, [parts, tokens, heads]. A partial without keys (lse -inf) has no effect,
    whatever its out holds. sinks: fp32 [heads] or a list of one, added here once; the
    returned lse excludes them.
    """
    lse = torch.logsumexp(lses, dim=0)
    weights = torch.exp(lses - _zero_if_empty(lse)).reshape(*outs.shape[:-1], 1)
    out = torch.where(weights == 0, 0.0, weights * outs).sum(0)
    return Result(add_sinks(out, lse.reshape(out.shape[:-1]), sinks), lse)


def add_sinks(out: Tensor, lse: Tensor, sinks: Tensor | Sequence[Tensor] | None) -> Tensor:
    """out x exp(lse) / (exp(lse) + exp(sink)), which is a sigmoid; rows without keys stay 0."""
    if sinks is None:
        return out
    sink = sinks if isinstance(sinks, Tensor) else sinks[0]
    share = torch.sigmoid(lse - sink.to(lse))
    return out * torch.where(lse.isneginf(), 0.0, share).unsqueeze(-1)


def in_base(lse: Tensor, base: str | None) -> Tensor:
    """Natural lse converted to the call's base: None or "basee", or "base2"."""
    if base not in (None, "basee", "base2"):
        raise invalid("return_lse_base", repr(base), (None, "basee", "base2"))
    return lse / math.log(2) if base == "base2" else lse


def _zero_if_empty(lse: Tensor) -> Tensor:
    """lse with 0 for -inf, so that the weights of a row without keys are exp(-inf) = 0."""
    return lse.masked_fill(lse.isneginf(), 0.0)


def skip_tiles(
    request: Operands, scale: float, factor: float, walk: TileWalk, b: int = 0
) -> Operands:
    """Request b without the KV tiles that skip-softmax skips.

    A KV tile is skipped for a row tile when exp(tile_max - running_max) < factor / kv_len in
    each of its rows. running_max is over the tiles of the same split taken so far; a row that
    sees no key of the tile does not count. So every skipped weight is below factor / kv_len
    and the dropped mass at most `factor`.
    """
    q_len, heads, _ = request.query.shape
    kv_len = request.keys.shape[1]
    scores = (scale * (request.query @ request.keys.mT)).masked_fill(~request.visible, -math.inf)
    tile_max = _tile_max(scores.flatten(0, 1), walk)  # [row tiles, tile_rows, kv tiles]
    taken = torch.ones(tile_max.shape[0], tile_max.shape[2], dtype=torch.bool, device=scores.device)
    starts = walk.starts(b)
    running = torch.full_like(tile_max[..., 0], -math.inf) if kv_len else tile_max[..., :0]
    for tile in range(tile_max.shape[2]):
        top = tile_max[..., tile]
        if tile in starts:
            running = top
            continue
        ratio = torch.where(top.isneginf(), 0.0, torch.exp(top - running))
        taken[:, tile] = ~(ratio < factor / kv_len).all(-1)
        running = torch.where(taken[:, tile, None], torch.maximum(running, top), running)
    rows = taken.repeat_interleave(walk.tile_rows, 0)[: q_len * heads]
    kept = rows.repeat_interleave(walk.tile_kv, 1)[:, :kv_len].unflatten(0, (q_len, heads))
    return replace(request, visible=request.visible & kept)


def _tile_max(scores: Tensor, walk: TileWalk) -> Tensor:
    """Greatest score in each KV tile: [rows, kv] -> [row tiles, tile_rows, kv tiles]."""
    rows, kv = scores.shape
    pad = (0, -kv % walk.tile_kv, 0, -rows % walk.tile_rows)
    padded = torch.nn.functional.pad(scores, pad, value=-math.inf)
    return padded.unflatten(1, (-1, walk.tile_kv)).amax(-1).unflatten(0, (-1, walk.tile_rows))
