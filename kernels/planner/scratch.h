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
//
// One region serves in turn: as the greedy policy's stops, or as the keys to be sorted and then
// as the order and rank that come of it.
struct Scratch {
  Stop* stops;          // [workers]
  uint64_t* keys;       // [2 batch, a power of two]: classes of equal tiles, to be sorted
  int32_t* order;       // [2 batch]: class at a position of the sorted order
  int32_t* rank;        // [2 batch]: tiles before a class in the sorted order
  int32_t* count;       // [2 batch]: tiles of a class, then their prefix sums
  int32_t* request;     // index in the batch
  int32_t* blocks;      // KV blocks, at least 1
  int32_t* rows;        // row tiles
  int32_t* splits;      // pieces
  int32_t* piece;       // greedy: part of the first piece; fixed size: blocks of a piece
  int32_t* slot_base;   // slots before the request
  int32_t* group_base;  // split row tiles before the request
  int32_t* line;        // [batch + 1] greedy: blocks and overheads before; fixed size: tiles before
  int32_t* num_stops;   // [1]

  static constexpr int64_t power_of_two(int64_t n) {
    int64_t size = 1;
    while (size < n) size *= 2;
    return size;
  }
  static constexpr int64_t region_words(int64_t batch, int64_t workers) {
    const int64_t keys = 2 * power_of_two(2 * batch);
    return keys > 2 * workers ? keys : 2 * workers;
  }
  static constexpr int64_t bytes(int64_t batch, int64_t workers) {
    return 4 * (region_words(batch, workers) + 10 * batch + 2);
  }

  MLA_PLANNER_FN Scratch(void* memory, int64_t batch, int64_t workers) {
    int32_t* next = static_cast<int32_t*>(memory);
    const auto take = [&next](int64_t n) {
      int32_t* taken = next;
      next += n;
      return taken;
    };
    order = take(region_words(batch, workers));
    rank = order + 2 * batch;
    keys = reinterpret_cast<uint64_t*>(order);
    stops = reinterpret_cast<Stop*>(order);
    count = take(2 * batch);
    request = take(batch);
    blocks = take(batch);
    rows = take(batch);
    splits = take(batch);
    piece = take(batch);
    slot_base = take(batch);
    group_base = take(batch);
    line = take(batch + 1);
    num_stops = take(1);
  }
};

}  // namespace mla::planner
