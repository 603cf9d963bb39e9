// The int32 words that a plan is made of, as kernels load them and planners store them.
// The same layouts as mla_lab/plan/tile.py.
#pragma once

#include <cstdint>

namespace mla {

// One row of `tiles` [n, 8]: attend one row tile over KV blocks [block_begin, block_end).
struct alignas(16) WorkTile {
  int32_t request;
  int32_t row_tile;
  int32_t block_begin;
  int32_t block_end;
  int32_t split_idx;
  int32_t num_splits;
  int32_t slot;   // of the partial; -1 where the tile is its whole row tile
  int32_t group;  // index among the split row tiles; -1 where slot is -1
};

}  // namespace mla
