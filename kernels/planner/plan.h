// The rules of mla_lab/plan (policies.fixed_size, cuts.number, assign.in_turn) in integers: the
// same tiles in the same places.
//
//   collect    requests with query rows, in batch order; their blocks and row tiles
//   cut        pieces of a fixed size of each request
//   number     slots and groups, by prefix sums over the requests
//   place      the tiles, where their workers will walk them
#pragma once

#include "planner/planner.h"
#include "planner/scratch.h"
#include "planner/team.h"

namespace mla::planner {

// Without a sum, which would overflow for a length near 2^31.
MLA_PLANNER_FN inline int32_t ceil_div(int32_t a, int32_t b) { return a / b + (a % b > 0); }
MLA_PLANNER_FN inline int32_t least(int32_t a, int32_t b) { return a < b ? a : b; }
MLA_PLANNER_FN inline int32_t most(int32_t a, int32_t b) { return a > b ? a : b; }

// Index of the last of n ascending values that is <= target; values[0] <= target.
MLA_PLANNER_FN inline int32_t last_at_most(const int32_t* values, int32_t n, int32_t target) {
  int32_t low = 0;
  int32_t high = n;
  while (high - low > 1) {
    const int32_t middle = (low + high) / 2;
    if (values[middle] <= target) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

// What the steps hand on.
struct Sizes {
  int32_t requests;
  int32_t tiles;
  int32_t slots;
  int32_t groups;
};

// Query tokens before request i, at most those of the call.
MLA_PLANNER_FN inline int32_t begin_of(const Params& p, int32_t i) {
  return most(0, least(p.q_begin[i], p.total_q));
}

// Query rows of request i.
MLA_PLANNER_FN inline int32_t rows_of(const Params& p, int32_t i) {
  return most(0, begin_of(p, i + 1) - begin_of(p, i)) * p.heads;
}

// A product that stops at 2^31 - 1, as the team's sums do: a plan of so many tiles fits nowhere.
MLA_PLANNER_FN inline int32_t product(int32_t a, int32_t b) {
  const int64_t exact = static_cast<int64_t>(a) * b;
  return exact < kMost ? static_cast<int32_t>(exact) : kMost;
}

template <class Team>
MLA_PLANNER_FN int32_t collect(Team& team, const Params& p, const Scratch& s) {
  team.each(p.batch, [&](int32_t i) { s.line[i] = rows_of(p, i) > 0; });
  const int32_t requests = team.scan(s.line, p.batch);
  team.each(p.batch, [&](int32_t i) {
    const int32_t rows = rows_of(p, i);
    if (rows == 0) return;
    const int32_t at = s.line[i];
    s.request[at] = i;
    s.blocks[at] = most(1, ceil_div(p.seq_lens[i], p.tile_kv));
    s.rows[at] = ceil_div(rows, p.tile_rows);
  });
  return requests;
}

template <class Team>
MLA_PLANNER_FN void cut(Team& team, const Params& p, const Scratch& s, int32_t requests) {
  team.each(requests, [&](int32_t i) {
    const int32_t least_size = most(p.split_blocks, ceil_div(s.blocks[i], p.max_splits));
    s.piece[i] = most(least_size, least(p.half_blocks, ceil_div(s.blocks[i], 2)));
    s.splits[i] = ceil_div(s.blocks[i], s.piece[i]);
  });
}

template <class Team>
MLA_PLANNER_FN void number(Team& team, const Scratch& s, Sizes& sizes) {
  const int32_t n = sizes.requests;
  team.each(n, [&](int32_t i) {
    s.group_base[i] = s.splits[i] > 1 ? s.rows[i] : 0;
    s.slot_base[i] = product(s.group_base[i], s.splits[i]);
    s.count[i] = product(s.rows[i], s.splits[i]);
  });
  sizes.groups = team.scan(s.group_base, n);
  sizes.slots = team.scan(s.slot_base, n);
  sizes.tiles = team.scan(s.count, n);
}

MLA_PLANNER_FN inline WorkTile make_tile(const Params& p, const Scratch& s, int32_t i, int32_t row,
                                         int32_t split) {
  const int32_t begin = split * s.piece[i];
  const int32_t end = least(begin + s.piece[i], s.blocks[i]);
  WorkTile tile{s.request[i], row, begin, end, split, s.splits[i], -1, -1};
  if (p.seq_lens[tile.request] <= 0) tile.block_end = 0;
  if (tile.num_splits > 1) {
    tile.slot = s.slot_base[i] + row * tile.num_splits + split;
    tile.group = s.group_base[i] + row;
  }
  return tile;
}

// Tiles of a request fall into classes of equal block counts: the full pieces and the last ones.
// Classes by falling block count, then by request, give every tile its place in the order of
// `in_turn` without sorting tiles.
struct Classes {
  int32_t full_blocks;
  int32_t last_blocks;
  int32_t full_tiles;  // all of them where the last piece is as long as the others
  int32_t last_tiles;

  MLA_PLANNER_FN Classes(const Params& p, const Scratch& s, int32_t i) {
    const int32_t whole = s.splits[i] - 1;
    full_blocks = s.piece[i];
    last_blocks = s.blocks[i] - whole * s.piece[i];
    if (p.seq_lens[s.request[i]] <= 0) last_blocks = 0;
    const bool same = last_blocks == full_blocks;
    full_tiles = s.rows[i] * (whole + same);
    last_tiles = same ? 0 : s.rows[i];
  }
};

MLA_PLANNER_FN inline uint64_t class_key(int32_t blocks, int32_t id) {
  return static_cast<uint64_t>(0x7fffffff - blocks) << 32 | static_cast<uint32_t>(id);
}

template <class Team>
MLA_PLANNER_FN void rank_classes(Team& team, const Params& p, const Scratch& s, int32_t n) {
  team.each(n, [&](int32_t i) {
    const Classes classes(p, s, i);
    s.keys[2 * i] = class_key(classes.full_blocks, 2 * i);
    s.keys[2 * i + 1] = class_key(classes.last_blocks, 2 * i + 1);
  });
  team.sort(s.keys, 2 * n);
  // by way of count, since order and rank take the place of the keys
  team.each(2 * n, [&](int32_t at) { s.count[at] = static_cast<int32_t>(s.keys[at]); });
  team.each(2 * n, [&](int32_t at) { s.order[at] = s.count[at]; });
  team.each(2 * n, [&](int32_t at) {
    const int32_t id = s.order[at];
    const Classes classes(p, s, id / 2);
    s.count[at] = id % 2 ? classes.last_tiles : classes.full_tiles;
  });
  team.scan(s.count, 2 * n);
  team.each(2 * n, [&](int32_t at) { s.rank[s.order[at]] = s.count[at]; });
}

template <class Team>
MLA_PLANNER_FN void place(Team& team, const Params& p, const Scratch& s, const Sizes& sizes) {
  const int32_t n = sizes.requests;
  team.each(n, [&](int32_t i) { s.line[i] = s.rows[i] * s.splits[i]; });
  team.scan(s.line, n);
  rank_classes(team, p, s, n);
  const int32_t each = sizes.tiles / p.workers;
  const int32_t longer = sizes.tiles % p.workers;  // workers that have one tile more
  // every other round goes backwards, and so does the one that does not reach all of them
  const int32_t others = each % 2 ? p.workers - longer : 0;
  team.each(p.workers + 1,
            [&](int32_t w) { p.worker_begin[w] = w * each + least(most(0, w - others), longer); });
  team.each(sizes.tiles, [&](int32_t index) {
    const int32_t i = last_at_most(s.line, n, index);
    const int32_t row = (index - s.line[i]) / s.splits[i];
    const int32_t split = (index - s.line[i]) % s.splits[i];
    const Classes classes(p, s, i);
    const bool last = split + 1 == s.splits[i] && classes.last_tiles > 0;
    const int32_t in_row = classes.last_tiles > 0 ? s.splits[i] - 1 : s.splits[i];
    const int32_t turn = last ? s.rank[2 * i + 1] + row : s.rank[2 * i] + row * in_row + split;
    const int32_t round = turn / p.workers;
    const int32_t at = turn % p.workers;
    const int32_t worker = round % 2 ? p.workers - 1 - at : at;
    p.tiles[p.worker_begin[worker] + round] = make_tile(p, s, i, row, split);
  });
}

template <class Team>
MLA_PLANNER_FN void make_plan(Team& team, const Params& p, const Scratch& s) {
  Sizes sizes{};
  sizes.requests = collect(team, p, s);
  cut(team, p, s, sizes.requests);
  number(team, s, sizes);
  const bool fits = sizes.tiles <= p.tile_capacity && sizes.slots <= p.slot_capacity &&
                    sizes.groups <= p.group_capacity;
  team.each(1, [&](int32_t) {
    p.counts[0] = sizes.tiles;
    p.counts[1] = sizes.slots;
    p.counts[2] = sizes.groups;
    p.counts[3] = !fits;
  });
  if (fits) {
    place(team, p, s, sizes);
  } else {
    team.each(p.workers + 1, [&](int32_t w) { p.worker_begin[w] = 0; });
  }
}

}  // namespace mla::planner
