"""FlashMLA's greedy payload: workers take one line of requests and cut where a payload is full.

Source: FlashMLA, csrc/smxx/decode/get_decoding_sched_meta (commit 9241ae3), with
csrc/api/dense_decode.h for the number of parts and the overhead of 5 blocks.

Definition, in integers throughout:

1. Only requests with query rows take part, in batch order. Request i has n_i = max(1, number of
   KV blocks) and r_i row tiles; R = max r_i.
2. parts P = max(1, workers // R), unless given. A *part* is a bundle of R workers, one a row tile.
3. With overhead F: X_i = sum over j < i of (n_j + F), N requests, T = X_N;
   payload L = ceil(T / P) + F, unless given.
4. Part p begins at request j, with k of its blocks already taken (part 0: j = k = 0).
   Let e be the largest index in [j, N] with X_e - X_j - k <= L. The part finishes requests
   j .. e-1. Let rest = L - max(0, X_e - X_j - k), and k' = k if e == j, else 0. If e < N and
   rest > F, it also takes blocks [k', k' + rest - F) of request e, and part p+1 begins at
   (e, k' + rest - F). Otherwise part p+1 begins at (e, k').
5. Row tile t of a piece in part p belongs to worker (p * R + t) mod workers. Tiles are ordered by
   (worker, request, row tile, split); workers without tiles stay, empty.

Each step of 4 is one binary search in X, so P sequential steps cut any batch; the tiles then follow
from prefix sums. With L as in 3 every part advances by at least L - F >= T / P along the line, so P
parts suffice. A part cuts at most one request short, so pieces <= requests + P - 1, and the
blocks plus F a piece of any part are at most L.

FlashMLA has one number of row tiles for all requests; for such batches this is its plan. Where row
tiles differ between requests, the workers of a bundle beyond a request's own row tiles idle while
its pieces run, and the cost policy is the better choice.
"""

from __future__ import annotations

from bisect import bisect_right

import numpy as np

from ..core.errors import invalid
from .cuts import Cuts, Shape

#: FlashMLA's fixed cost of a piece, in blocks
OVERHEAD = 5


def greedy(
    shape: Shape, parts: int | None = None, overhead: int = OVERHEAD, payload: int | None = None
) -> Cuts:
    """Cut as FlashMLA does; `parts`, `overhead` and `payload` (in blocks) as in the definition."""
    if parts is None:
        parts = max(1, shape.workers // shape.max_row_tiles)
    if parts < 1 or overhead < 0:
        raise invalid("parts, overhead", (parts, overhead), "parts >= 1 and overhead >= 0")
    if payload is None:
        payload = greedy_payload(shape.blocks, parts, overhead)
    cuts = contiguous_cuts(shape.blocks, parts, overhead, payload)
    if cuts is None:
        raise invalid("payload", payload, f"enough for {parts} parts to cover the batch")
    return cuts


def greedy_payload(blocks: np.ndarray, parts: int, overhead: int) -> int:
    """Blocks and overheads that one part takes on: step 3 of the definition."""
    total = int(blocks.sum()) + overhead * blocks.size
    return -(-total // parts) + overhead


def contiguous_cuts(blocks: np.ndarray, parts: int, overhead: int, payload: int) -> Cuts | None:
    """Step 4 of the definition; None where the parts end before the requests do."""
    line = [0, *np.cumsum(blocks + overhead).tolist()]
    last = len(line) - 1
    stops: list[tuple[int, int]] = []
    j = k = 0
    while j < last and len(stops) < parts and payload > overhead:
        e = bisect_right(line, line[j] + k + payload) - 1
        rest = payload - max(0, line[e] - line[j] - k)
        k = k if e == j else 0
        if e < last and rest > overhead:
            k += rest - overhead
        j = e
        stops.append((j, k))
    return _pieces(blocks, stops) if j == last else None


def _pieces(blocks: np.ndarray, stops: list[tuple[int, int]]) -> Cuts:
    """Pieces between the parts' stops: the union of the stops and the requests' own ends."""
    first = np.cumsum(blocks) - blocks
    at = np.array([first[j] + k if j < blocks.size else blocks.sum() for j, k in stops], dtype=int)
    edges = np.union1d(np.append(first, blocks.sum()), at)
    begin, end = edges[:-1], edges[1:]
    request = np.searchsorted(first, begin, side="right") - 1
    part = np.searchsorted(at, begin, side="right")
    return Cuts(request, begin - first[request], end - first[request], part)
