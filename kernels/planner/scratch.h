// The planner's working arrays: shared memory on the device, a vector on the host.
#pragma once

#include <cstdint>

#include "planner/team.h"

namespace mla::planner {

// A part of the greedy policy ends in request `request`, with `blocks` of its blocks taken.
struct Stop {
  int32_t request;
  int32_t blocks;
};

// Arrays over the requests that have query rows, in batch order, unless said otherwise.
struct Scratch {
  uint64_t* keys;       // [2 batch, a power of two]: classes of equal tiles, to be sorted
  int32_t* request;     // index in the batch
  int32_t* blocks;      // KV blocks, at least 1
  int32_t* rows;        // row tiles
  int32_t* splits;      // pieces
  int32_t* piece;       // greedy: part of the first piece; fixed size: blocks of a piece
  int32_t* slot_base;   // slots before the request
  int32_t* group_base;  // split row tiles before the request
  int32_t* line;        // [batch + 1] greedy: blocks and overheads before; fixed size: tiles before
  int32_t* rank;        // [2 batch]: position of a class in the sorted order
  int32_t* count;       // [2 batch]: tiles of a class, then their prefix sums
  Stop* stops;          // [workers]
  int32_t* num_stops;   // [1]

  static constexpr int64_t power_of_two(int64_t n) {
    int64_t size = 1;
    while (size < n) size *= 2;
    return size;
  }
  static constexpr int64_t bytes(int64_t batch, int64_t workers) {
    return 8 * power_of_two(2 * batch) + 4 * (12 * batch + 2) + 8 * workers;
  }

  MLA_PLANNER_FN Scratch(void* memory, int64_t batch, int64_t workers) {
    keys = static_cast<uint64_t*>(memory);
    stops = reinterpret_cast<Stop*>(keys + power_of_two(2 * batch));
    int32_t* next = reinterpret_cast<int32_t*>(stops + workers);
    const auto take = [&next](int64_t n) {
      int32_t* taken = next;
      next += n;
      return taken;
    };
    request = take(batch);
    blocks = take(batch);
    rows = take(batch);
    splits = take(batch);
    piece = take(batch);
    slot_base = take(batch);
    group_base = take(batch);
    line = take(batch + 1);
    rank = take(2 * batch);
    count = take(2 * batch);
    num_stops = take(1);
  }
};

}  // namespace mla::planner
