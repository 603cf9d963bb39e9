// A batch-invariant plan made on the device, from lengths in device memory. See plan.h for the
// rules.
#pragma once

#include "abi/words.h"

namespace mla::planner {

constexpr int kMaxBatch = 4096;

struct Params {
  const int32_t* seq_lens;  // [batch], tokens in the cache
  const int32_t* q_begin;   // [batch + 1], query tokens before each request
  int32_t batch;
  int32_t total_q;  // query tokens of the call, to which q_begin is cut
  int32_t heads;
  int32_t tile_rows;
  int32_t tile_kv;
  int32_t workers;
  int32_t split_blocks;  // blocks a piece has at least
  int32_t max_splits;    // pieces a request has at most
  int32_t half_blocks;   // halves of a request that are no longer are pieces
  // results; a plan that would not fit, as of requests that share query tokens, leaves every worker
  // idle and sets counts[3]
  WorkTile* tiles;        // [tile_capacity]
  int32_t* worker_begin;  // [workers + 1]
  int32_t* counts;        // [4]: tiles, slots, groups, 1 if a capacity was too small
  int32_t tile_capacity;
  int32_t slot_capacity;
  int32_t group_capacity;
};

}  // namespace mla::planner
