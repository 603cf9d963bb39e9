// The rules of mla_lab/plan (greedy.py, policies.fixed_size, cuts.number, assign.py) in integers:
// the same tiles in the same places.
//
//   collect    requests with query rows, in batch order; their blocks and row tiles
//   cut        pieces of each request: greedy parts, or pieces of a fixed size
//   number     slots and groups, by prefix sums over the requests
//   place      the tiles, where their workers will walk them
//   merge list the row tiles that have partials
#pragma once

#include "planner/planner.h"
#include "planner/scratch.h"
#include "planner/team.h"

namespace mla::planner {

MLA_PLANNER_FN inline int32_t ceil_div(int32_t a, int32_t b) { return (a + b - 1) / b; }
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

// Stops before (request, blocks), in reading order.
MLA_PLANNER_FN inline int32_t stops_before(const Scratch& s, int32_t request, int32_t blocks) {
  int32_t low = 0;
  int32_t high = *s.num_stops;
  while (low < high) {
    const int32_t middle = (low + high) / 2;
    const Stop stop = s.stops[middle];
    if (stop.request < request || (stop.request == request && stop.blocks < blocks)) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low;
}

// What the steps hand on.
struct Sizes {
  int32_t requests;
  int32_t bundle;  // the most row tiles of any request
  int32_t parts;   // of the greedy policy
  int32_t tiles;
  int32_t slots;
  int32_t groups;
};

// Query rows of request i; 0 where they are not for this plan.
MLA_PLANNER_FN inline int32_t rows_of(const Params& p, int32_t i) {
  const int32_t rows = (p.q_begin[i + 1] - p.q_begin[i]) * p.heads;
  return rows >= p.least_rows && rows <= p.most_rows ? most(0, rows) : 0;
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

// One step of the greedy walk: where the part that begins at `from` ends.
MLA_PLANNER_FN inline Stop part_end(const Lanes& lanes, const Scratch& s, int32_t requests,
                                    Stop from, int32_t payload, int32_t overhead) {
  const int32_t start = s.line[from.request] + from.blocks;
  const int32_t whole = lanes.count_while(from.request + 1, requests + 1,
                                          [&](int32_t e) { return s.line[e] - start <= payload; });
  const int32_t e = from.request + whole;
  const int32_t rest = payload - most(0, s.line[e] - start);
  int32_t taken = whole == 0 ? from.blocks : 0;
  if (e < requests && rest > overhead) taken += rest - overhead;
  return {e, taken};
}

template <class Team>
MLA_PLANNER_FN void cut_greedy(Team& team, const Params& p, const Scratch& s, Sizes& sizes) {
  const int32_t n = sizes.requests;
  team.each(n, [&](int32_t i) { s.line[i] = s.blocks[i] + p.overhead; });
  const int32_t total = team.scan(s.line, n);
  sizes.parts = most(1, p.workers / most(1, sizes.bundle));
  const int32_t payload = ceil_div(total, sizes.parts) + p.overhead;
  team.each(1, [&](int32_t) { s.line[n] = total; });
  team.each_warp(1, [&](const Lanes& lanes, int32_t) {
    Stop at{0, 0};
    int32_t stops = 0;
    while (at.request < n && stops < sizes.parts) {
      at = part_end(lanes, s, n, at, payload, p.overhead);
      if (lanes.first()) s.stops[stops] = at;
      ++stops;
    }
    if (lanes.first()) *s.num_stops = stops;
  });
  team.each(n, [&](int32_t i) {
    s.piece[i] = stops_before(s, i, 1);  // a stop at the request's own beginning is behind it
    s.splits[i] = 1 + stops_before(s, i + 1, 0) - s.piece[i];
  });
}

template <class Team>
MLA_PLANNER_FN void cut_fixed_size(Team& team, const Params& p, const Scratch& s,
                                   const Sizes& sizes) {
  team.each(sizes.requests, [&](int32_t i) {
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
    s.slot_base[i] = s.group_base[i] * s.splits[i];
    s.count[i] = s.rows[i] * s.splits[i];
  });
  sizes.groups = team.scan(s.group_base, n);
  sizes.slots = team.scan(s.slot_base, n);
  sizes.tiles = team.scan(s.count, n);
}

MLA_PLANNER_FN inline WorkTile make_tile(const Params& p, const Scratch& s, int32_t i, int32_t row,
                                         int32_t split) {
  WorkTile tile{s.request[i], row, 0, s.blocks[i], split, s.splits[i], -1, -1};
  if (p.policy == Policy::kFixedSize) {
    tile.block_begin = split * s.piece[i];
    tile.block_end = least(tile.block_begin + s.piece[i], s.blocks[i]);
  } else {
    const int32_t part = s.piece[i] + split;
    if (split > 0) tile.block_begin = s.stops[part - 1].blocks;
    if (split + 1 < tile.num_splits) tile.block_end = s.stops[part].blocks;
  }
  if (p.seq_lens[tile.request] <= 0) tile.block_end = 0;
  if (tile.num_splits > 1) {
    tile.slot = s.slot_base[i] + row * tile.num_splits + split;
    tile.group = s.group_base[i] + row;
  }
  return tile;
}

// Tiles of one greedy worker: row tiles `row`, `row` + workers, ... of the requests in its part.
struct Share {
  int32_t part;
  int32_t row;
  int32_t begin;  // requests
  int32_t end;
};

MLA_PLANNER_FN inline Share share_of(const Params& p, const Scratch& s, const Sizes& sizes,
                                     int32_t worker) {
  // R row tiles a bundle: worker = part * R + row, or (one part alone) row modulo workers
  const bool bundled = sizes.bundle <= p.workers;
  Share share{bundled ? worker / most(1, sizes.bundle) : 0,
              bundled ? worker % most(1, sizes.bundle) : worker, 0, 0};
  if (share.part >= *s.num_stops) return share;
  const Stop end = s.stops[share.part];
  share.begin = share.part > 0 ? s.stops[share.part - 1].request : 0;
  share.end = end.request + (end.blocks > 0);
  return share;
}

MLA_PLANNER_FN inline int32_t tiles_of(const Params& p, const Share& share, int32_t rows) {
  return share.row < rows ? (rows - 1 - share.row) / p.workers + 1 : 0;
}

template <class Team>
MLA_PLANNER_FN void place_greedy(Team& team, const Params& p, const Scratch& s,
                                 const Sizes& sizes) {
  team.each_warp(p.workers, [&](const Lanes& lanes, int32_t worker) {
    const Share share = share_of(p, s, sizes, worker);
    int32_t sum = 0;
    for (int32_t base = share.begin; base < share.end; base += Lanes::width) {
      const int32_t i = base + lanes.lane;
      int32_t total;
      lanes.scan(i < share.end ? tiles_of(p, share, s.rows[i]) : 0, total);
      sum += total;
    }
    if (lanes.first()) p.worker_begin[worker] = sum;
  });
  const int32_t all = team.scan(p.worker_begin, p.workers);
  team.each(1, [&](int32_t) { p.worker_begin[p.workers] = all; });
  team.each_warp(p.workers, [&](const Lanes& lanes, int32_t worker) {
    const Share share = share_of(p, s, sizes, worker);
    int32_t at = p.worker_begin[worker];
    for (int32_t base = share.begin; base < share.end; base += Lanes::width) {
      const int32_t i = base + lanes.lane;
      const int32_t mine = i < share.end ? tiles_of(p, share, s.rows[i]) : 0;
      int32_t total;
      const int32_t first = at + lanes.scan(mine, total);
      for (int32_t k = 0; k < mine; ++k) {
        const int32_t row = share.row + k * p.workers;
        p.tiles[first + k] = make_tile(p, s, i, row, share.part - s.piece[i]);
      }
      at += total;
    }
  });
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
MLA_PLANNER_FN void place_in_turn(Team& team, const Params& p, const Scratch& s,
                                  const Sizes& sizes) {
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
MLA_PLANNER_FN void list_merges(Team& team, const Params& p, const Scratch& s, const Sizes& sizes) {
  team.each(p.group_capacity, [&](int32_t group) {
    MergeItem item{0, 0, 0, 0};
    if (group < sizes.groups) {
      const int32_t i = last_at_most(s.group_base, sizes.requests, group);
      const int32_t row = group - s.group_base[i];
      item = {s.request[i], row, s.slot_base[i] + row * s.splits[i], s.splits[i]};
    }
    p.merge_items[group] = item;
  });
}

template <class Team>
MLA_PLANNER_FN void make_plan(Team& team, const Params& p, const Scratch& s) {
  Sizes sizes{};
  sizes.requests = collect(team, p, s);
  sizes.bundle = team.max(s.rows, sizes.requests);
  if (p.policy == Policy::kGreedy) {
    cut_greedy(team, p, s, sizes);
  } else {
    cut_fixed_size(team, p, s, sizes);
  }
  number(team, s, sizes);
  const bool fits = sizes.tiles <= p.tile_capacity && sizes.slots <= p.slot_capacity &&
                    sizes.groups <= p.group_capacity;
  team.each(1, [&](int32_t) {
    p.counts[0] = sizes.tiles;
    p.counts[1] = sizes.slots;
    p.counts[2] = sizes.groups;
    p.counts[3] = !fits;
  });
  if (!fits) {
    sizes = Sizes{};
    team.each(p.workers + 1, [&](int32_t w) { p.worker_begin[w] = 0; });
  } else if (p.policy == Policy::kGreedy) {
    place_greedy(team, p, s, sizes);
  } else {
    place_in_turn(team, p, s, sizes);
  }
  list_merges(team, p, s, sizes);
}

}  // namespace mla::planner
