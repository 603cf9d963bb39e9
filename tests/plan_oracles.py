"""Slow, plain statements of what planners must do, to hold the vectorised ones against."""

from __future__ import annotations

from hypothesis import strategies as st

from mla_lab.core.problem import Problem
from mla_lab.plan import Plan


def flashmla_pieces(
    blocks: list[int], parts: int, overhead: int
) -> list[tuple[int, int, int, int]]:
    """(part, request, begin, end), block by block as FlashMLA's one planning thread goes."""
    payload = -(-sum(n + overhead for n in blocks) // parts) + overhead
    pieces, request, done = [], 0, 0
    for part in range(parts):
        left = payload
        while request < len(blocks):
            rest = blocks[request] - done
            if left >= rest + overhead:
                pieces.append((part, request, done, blocks[request]))
                left -= rest + overhead
                request, done = request + 1, 0
            else:
                if left > overhead:
                    pieces.append((part, request, done, done + left - overhead))
                    done += left - overhead
                break
    assert request == len(blocks)
    return pieces


def assert_covers(plan: Plan) -> None:
    """Every block of every row of every request exactly once; slots and groups dense, in order;
    workers' ranges join end to end. Counted tile by tile, from the definition.
    """
    problem = plan.problem
    seen: dict[tuple[int, int], list[tuple[int, int, int]]] = {}
    for tile in plan:
        for row in {r // plan.tile_rows for r in range(*plan.rows(tile))} or {tile.row_tile}:
            assert problem.top_k or row == tile.row_tile
        seen.setdefault((tile.request, tile.row_tile), []).append(
            (tile.block_begin, tile.block_end, tile.split_idx)
        )
        if tile.num_splits == 1:
            assert (tile.slot, tile.group) == (-1, -1)
    for b, q_len in enumerate(problem.q_lens):
        rows = sorted(
            row
            for tile in plan
            if tile.request == b and tile.split_idx == 0
            for row in range(*plan.rows(tile))
        )
        assert rows == list(range(q_len * problem.heads))
        tokens = problem.top_k or problem.kv_lens[b]
        for tiles in (t for (request, _), t in seen.items() if request == b):
            tiles.sort(key=lambda t: t[2])
            assert [t[2] for t in tiles] == list(range(len(tiles)))
            covered = [i for begin, end, _ in tiles for i in range(begin, end)]
            assert covered == list(range(-(-tokens // plan.tile_kv)))
            assert len(tiles) == 1 or all(end > begin for begin, end, _ in tiles)
    split = sorted(tile for tile in plan if tile.num_splits > 1)
    split.sort(key=lambda t: (t.request, t.row_tile, t.split_idx))
    assert [t.slot for t in split] == list(range(plan.num_slots))
    order = list(dict.fromkeys((t.request, t.row_tile) for t in split))
    assert [t.group for t in split] == [order.index((t.request, t.row_tile)) for t in split]
    begins = plan.worker_begin.tolist()
    assert (begins[0], begins[-1]) == (0, plan.num_tiles)
    assert begins == sorted(begins)


def problems(max_batch: int = 6, max_kv: int = 3000) -> st.SearchStrategy[Problem]:
    """Ragged problems, zero lengths and sparse ones among them."""

    @st.composite
    def draw_problem(draw) -> Problem:
        batch = draw(st.integers(1, max_batch))
        return Problem(
            q_lens=tuple(draw(st.lists(st.integers(0, 5), min_size=batch, max_size=batch))),
            kv_lens=tuple(draw(st.lists(st.integers(0, max_kv), min_size=batch, max_size=batch))),
            heads=draw(st.sampled_from((1, 8, 16, 20, 64, 128))),
            top_k=draw(st.sampled_from((0, 0, 0, 1, 200, 2048))),
        )

    return draw_problem()
