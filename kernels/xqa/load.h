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

  const Pages& pages;
  const int32_t* table;
  const uint8_t* data;
  int page_shift, first_key, end_key;
  int row, chunk;
  int32_t page[kPages];

  __device__ RowLoader(const Params& p, const Pages& pages, const Work& work, int thread)
      : pages(pages),
        table(pages.table + work.request * p.table_stride),
        data(pages.data + work.kv_head * pages.head_stride),
        page_shift(p.page_shift),
        first_key(work.first_key),
        end_key(work.end_key),
        row(thread / kWide),
        chunk(thread % kWide) {}

  // Page ids of the tile that `load` will be asked for next.
  __device__ void look_up(int tile) {
#pragma unroll
    for (int i = 0; i < kPages; ++i) {
      const int from = tile * Config::kTile + (kOwnPage ? row + i * kRowsAtOnce : 16 * i);
      const int last = kOwnPage ? from : from + 15;
      page[i] = from < end_key && last >= first_key ? table[from >> page_shift] : 0;
    }
  }

  __device__ void load(int tile, uint32_t to) const {
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      const int row_in_tile = row + pass * kRowsAtOnce;
      const int key = tile * Config::kTile + row_in_tile;
      const bool seen = key >= first_key && key < end_key;
      const int64_t id = page[kOwnPage ? pass : pass * kRowsAtOnce / 16];
      const int in_page = key & ((1 << page_shift) - 1);
      const uint8_t* from = data + chunk * 16;
      if (seen) from += id * pages.page_stride + in_page * pages.token_stride;
      const uint32_t target = to + row_in_tile * kPitch + chunk * 16;
      const int bytes = seen ? 16 : 0;
#pragma unroll
      for (int i = 0; i < kChunks / kWide; ++i) {
        asm volatile(
            "cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(target + i * kWide * 16),
            "l"(from + i * kWide * 16), "r"(bytes));
      }
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
