// The planner's working arrays: shared memory on the device, a vector on the host.
#pragma once

#include <cstdint>

#include "planner/team.h"

namespace mla::planner {

// Arrays over the requests that have query rows, in batch order, unless said otherwise.
//
// One region serves in turn: as the keys to be sorted, then as the order and rank that come of it.
struct Scratch {
  uint64_t* keys;       // [2 batch, a power of two]: classes of equal tiles, to be sorted
  int32_t* order;       // [2 batch]: class at a position of the sorted order
  int32_t* rank;        // [2 batch]: tiles before a class in the sorted order
  int32_t* count;       // [2 batch]: tiles of a class, then their prefix sums
  int32_t* request;     // index in the batch
  int32_t* blocks;      // KV blocks, at least 1
  int32_t* rows;        // row tiles
  int32_t* splits;      // pieces
  int32_t* piece;       // blocks of a piece
  int32_t* slot_base;   // slots before the request
  int32_t* group_base;  // split row tiles before the request
  int32_t* line;        // tiles before the request

  static constexpr int64_t power_of_two(int64_t n) {
    int64_t size = 1;
    while (size < n) size *= 2;
    return size;
  }
  static constexpr int64_t region_words(int64_t batch) { return 2 * power_of_two(2 * batch); }
  static constexpr int64_t bytes(int64_t batch) { return 4 * (region_words(batch) + 10 * batch); }

  MLA_PLANNER_FN Scratch(void* memory, int64_t batch) {
    int32_t* next = static_cast<int32_t*>(memory);
    const auto take = [&next](int64_t n) {
      int32_t* taken = next;
      next += n;
      return taken;
    };
    order = take(region_words(batch));
    rank = order + 2 * batch;
    keys = reinterpret_cast<uint64_t*>(order);
    count = take(2 * batch);
    request = take(batch);
    blocks = take(batch);
    rows = take(batch);
    splits = take(batch);
    piece = take(batch);
    slot_base = take(batch);
    group_base = take(batch);
    line = take(batch);
  }
};

}  // namespace mla::planner
