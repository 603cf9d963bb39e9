// A plan made on the device, from lengths that only the device knows. See plan.h for the rules.
#pragma once

#include "abi/words.h"

namespace mla::planner {

enum class Policy : int32_t { kGreedy, kFixedSize };

constexpr int kMaxBatch = 4096;
constexpr int kMaxWorkers = 1024;

struct Params {
  const int32_t* seq_lens;  // [batch], tokens in the cache
  const int32_t* q_begin;   // [batch + 1], query tokens before each request
  int32_t batch;
  int32_t heads;
  int32_t tile_rows;
  int32_t tile_kv;
  int32_t workers;
  Policy policy;
  int32_t overhead;      // greedy: cost of a piece, in blocks
  int32_t split_blocks;  // fixed size: blocks a piece has at least
  int32_t max_splits;    // fixed size: pieces a request has at most
  int32_t half_blocks;   // fixed size: halves of a request that are no longer are pieces
  int32_t least_rows;    // requests of fewer query rows, or of more, have no tile here
  int32_t most_rows;
  // results; a plan that would not fit leaves every worker idle and says so in counts[3]
  WorkTile* tiles;         // [tile_capacity]
  int32_t* worker_begin;   // [workers + 1]
  MergeItem* merge_items;  // [group_capacity], num_splits 0 where unused
  int32_t* counts;         // [4]: tiles, slots, groups, 1 if a capacity was too small
  int32_t tile_capacity;
  int32_t slot_capacity;
  int32_t group_capacity;
};

}  // namespace mla::planner
