// Keys and values of a team's tiles, from pages into shared memory, by 16-byte cp.async.
//
// A row of the tile is loaded by 4 or 8 neighbouring lanes, so that a thread works out one address
// for all chunks of its row. Page ids are fetched one tile ahead of the loads that need them.
// Rows that no query row sees are filled with zeros: what the cache holds there may be NaN.
#pragma once

#include "xqa/mma.h"
#include "xqa/work.h"

namespace mla::xqa {

// Rows of kBytes bytes, loaded by the threads of a team.
template <int kBytes, int kPitch>
struct RowLoader {
  static constexpr int kThreads = kLanes * Config::kTeam;
  static constexpr int kChunks = kBytes / 16;
  static constexpr int kWide = kChunks % 8 == 0 ? 8 : 4;  // lanes of a row
  static constexpr int kRowsAtOnce = kThreads / kWide;
  static constexpr int kPasses = (Config::kTile + kRowsAtOnce - 1) / kRowsAtOnce;
  // pages have at least 16 tokens and tiles begin at multiples of 16
  static constexpr bool kOwnPage = kRowsAtOnce > 16;  // lanes of a pass are in several pages
  static constexpr int kPages = kOwnPage ? kPasses : Config::kTile / 16;
  static_assert(kChunks % kWide == 0 && Config::kTile % kRowsAtOnce == 0);

  const int32_t* table;
  const uint8_t* from;  // this lane's place in token `row` of page 0
  int64_t page_stride;
  int token_stride, page_shift, first_key, keys;
  int row, chunk;
  int32_t page[kPages];

  __device__ RowLoader(const Params& p, const Pages& pages, const Work& work, int thread)
      : table(pages.table + work.request * p.table_stride),
        page_stride(pages.page_stride),
        token_stride(static_cast<int>(pages.token_stride)),
        page_shift(p.page_shift),
        first_key(work.first_key),
        keys(work.end_key - work.first_key),
        row(thread / kWide),
        chunk(thread % kWide) {
    from = pages.data + work.kv_head * pages.head_stride + chunk * 16;
    if (!kOwnPage) from += row * token_stride;
  }

  // Page ids of the tile that `load` will be asked for next; page 0 where no key is seen.
  __device__ void look_up(int tile) {
#pragma unroll
    for (int i = 0; i < kPages; ++i) {
      const int begin = tile * Config::kTile + (kOwnPage ? row + i * kRowsAtOnce : 16 * i);
      const int last = kOwnPage ? begin : begin + 15;
      page[i] = begin < first_key + keys && last >= first_key ? table[begin >> page_shift] : 0;
    }
  }

  __device__ void load(int tile, uint32_t to) const {
    to += row * kPitch + chunk * 16;
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      const int first = pass * kRowsAtOnce;  // row of the tile, for the first lanes
      const int key = tile * Config::kTile + first + row;
      const bool seen = static_cast<unsigned>(key - first_key) < static_cast<unsigned>(keys);
      // own page: the lane's token in it; else the page's part that begins with this tile's 16 rows
      const int token = kOwnPage ? key : tile * Config::kTile + first / 16 * 16;
      const int in_page = token & ((1 << page_shift) - 1);
      const int beyond = kOwnPage ? 0 : first % 16;
      const uint8_t* place = from + page[kOwnPage ? pass : first / 16] * page_stride +
                             in_page * token_stride + beyond * token_stride;
      copy(place, to + first * kPitch, seen ? 16 : 0);
    }
  }

 private:
  __device__ static void copy(const uint8_t* place, uint32_t to, int bytes) {
#pragma unroll
    for (int i = 0; i < kChunks / kWide; ++i) {
      asm volatile(
          "cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to + i * kWide * 16),
          "l"(place + i * kWide * 16), "r"(bytes));
    }
  }
};

// Stages of one team: tiles first, first + step, ... in turn.
struct Loader {
  static constexpr int kAhead = Config::kStages - 1;
  RowLoader<Config::kQkDim * Config::kElement, Config::kKeyPitch> keys;
  RowLoader<Config::kVDim * Config::kElement, Config::kValuePitch> values;
  uint32_t stages;  // shared memory
  int next, step, end;
  int stage = 0;

  __device__ Loader(const Params& p, const Work& work, uint32_t stages, int thread, int first,
                    int step)
      : keys(p, p.keys, work, thread),
        values(p, p.values, work, thread),
        stages(stages),
        next(first),
        step(step),
        end(work.end) {
    look_up();
#pragma unroll
    for (int i = 0; i < kAhead; ++i) issue();
  }

  __device__ void look_up() {
    if (next >= end) return;
    keys.look_up(next);
    if constexpr (!Config::kSharedKv) values.look_up(next);
  }

  // Begins to load the next tile, or nothing: groups are counted by tiles either way.
  __device__ void issue() {
    if (next < end) {
      const uint32_t to = stages + stage * Config::kStageBytes;
      keys.load(next, to);
      if constexpr (!Config::kSharedKv) values.load(next, to + Config::kValueOffset);
      next += step;
      look_up();
    }
    asm volatile("cp.async.commit_group;");
    stage = stage + 1 == Config::kStages ? 0 : stage + 1;
  }

  // This thread's part of the oldest tile is there. Others' parts: after a barrier.
  __device__ void wait() const { asm volatile("cp.async.wait_group %0;" ::"n"(kAhead - 1)); }
  __device__ void wait_for_all() const { asm volatile("cp.async.wait_group 0;"); }
};

}  // namespace mla::xqa
