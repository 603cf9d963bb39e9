// Keys and values of a team's tiles, from pages into shared memory. Page ids are fetched one tile
// ahead of the loads that need them. Rows that no query row sees are filled with zeros: what the
// cache holds there may be NaN.
//
// CopyLoader works by 16-byte cp.async, on any card: a row of the tile is loaded by 4 or 8
// neighbouring lanes, so that a thread works out one address for all chunks of its row.
// BulkLoader, from sm_90 on, has a lane copy a whole row by one cp.async.bulk: rows of 576 bytes by
// cp.async kept the load-store unit a quarter of the time (H200, 2026-11-20, ncu).
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
  using PageIds = int32_t[kPages];

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

  // Page ids that `load` of this tile needs; page 0 where no key is seen.
  __device__ void look_up(int tile, PageIds& page) const {
#pragma unroll
    for (int i = 0; i < kPages; ++i) {
      const int begin = tile * Config::kTile + (kOwnPage ? row + i * kRowsAtOnce : 16 * i);
      const int last = kOwnPage ? begin : begin + 15;
      page[i] = begin < first_key + keys && last >= first_key ? table[begin >> page_shift] : 0;
    }
  }

  __device__ void load(int tile, uint32_t to, const PageIds& page) const {
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

// What both loaders are: the stages of one team, filled in turn with tiles first, first + step, ...
struct Stages {
  static constexpr int kAhead = Config::kStages - 1;
  uint32_t memory;  // shared
  int next, step, end;
  int stage = 0;

  __device__ Stages(const Work& work, uint32_t memory, int first, int step)
      : memory(memory), next(first), step(step), end(work.end) {}

  __device__ uint32_t target() const { return memory + stage * Config::kStageBytes; }
  __device__ void advance() {
    next += step;
    stage = stage + 1 == Config::kStages ? 0 : stage + 1;
  }
};

struct CopyLoader : Stages {
  using Keys = RowLoader<Config::kQkDim * Config::kElement, Config::kKeyPitch>;
  using Values = RowLoader<Config::kVDim * Config::kElement, Config::kValuePitch>;
  struct PageIds {
    Keys::PageIds keys;
    Values::PageIds values;
  };
  static constexpr bool kNeedsBarrier = true;  // after `wait`, for the team

  Keys keys;
  Values values;
  PageIds ahead[kAhead];  // while nothing is loaded
  PageIds ids;            // of tile `next`

  __device__ CopyLoader(const Params& p, const Work& work, uint32_t memory, uint64_t*, int thread,
                        int first, int step)
      : Stages(work, memory, first, step),
        keys(p, p.keys, work, thread),
        values(p, p.values, work, thread) {
#pragma unroll
    for (int i = 0; i < kAhead; ++i) look_up(first + i * step, ahead[i]);
    look_up(first + kAhead * step, ids);
  }

  // The first tiles, all but the last stage.
  __device__ void start() {
#pragma unroll
    for (int i = 0; i < kAhead; ++i) load(ahead[i]);
  }

  // Begins to load the next tile, or nothing: groups are counted by tiles either way.
  __device__ void issue() {
    load(ids);
    look_up(next, ids);
  }

  // This thread's part of the oldest tile is there.
  __device__ void wait() { asm volatile("cp.async.wait_group %0;" ::"n"(kAhead - 1)); }
  __device__ void wait_for_all() const { asm volatile("cp.async.wait_group 0;"); }

 private:
  __device__ void look_up(int tile, PageIds& to) const {
    if (tile >= end) return;
    keys.look_up(tile, to.keys);
    if constexpr (!Config::kSharedKv) values.look_up(tile, to.values);
  }

  __device__ void load(const PageIds& from) {
    if (next < end) {
      keys.load(next, target(), from.keys);
      if constexpr (!Config::kSharedKv) {
        values.load(next, target() + Config::kValueOffset, from.values);
      }
    }
    asm volatile("cp.async.commit_group;");
    advance();
  }
};

#if MLA_BULK

__device__ inline void copy_row(uint32_t to, const uint8_t* from, int bytes, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(to),
      "l"(from), "r"(bytes), "r"(barrier)
      : "memory");
}

// Rows of kBytes bytes, one a lane and pass.
template <int kBytes, int kPitch>
struct BulkRows {
  static constexpr int kPasses = (Config::kTile + kLanes - 1) / kLanes;
  using PageIds = int32_t[kPasses];

  const int32_t* table;
  const uint8_t* data;
  int64_t page_stride;
  int token_stride, page_shift, first_key, keys;

  __device__ BulkRows(const Params& p, const Pages& pages, const Work& work)
      : table(pages.table + work.request * p.table_stride),
        data(pages.data + work.kv_head * pages.head_stride),
        page_stride(pages.page_stride),
        token_stride(static_cast<int>(pages.token_stride)),
        page_shift(p.page_shift),
        first_key(work.first_key),
        keys(work.end_key - work.first_key) {}

  __device__ bool seen(int key) const {
    return static_cast<unsigned>(key - first_key) < static_cast<unsigned>(keys);
  }

  __device__ void look_up(int tile, int lane, PageIds& page) const {
#pragma unroll
    for (int i = 0; i < kPasses; ++i) {
      const int key = tile * Config::kTile + i * kLanes + lane;
      page[i] = i * kLanes + lane < Config::kTile && seen(key) ? table[key >> page_shift] : 0;
    }
  }

  // Bytes that `load` of a tile copies.
  __device__ int bytes(int tile) const {
    const int begin = max(tile * Config::kTile, first_key);
    return (min((tile + 1) * Config::kTile, first_key + keys) - begin) * kBytes;
  }

  __device__ void clear_unseen(int tile, uint32_t to, int lane) const {
#pragma unroll 1
    for (int row = lane; row < Config::kTile; row += kLanes) {
      if (seen(tile * Config::kTile + row)) continue;
#pragma unroll 1
      for (int at = 0; at < kBytes; at += 16) {
        asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(to + row * kPitch + at),
                     "r"(0)
                     : "memory");
      }
    }
  }

  __device__ void load(int tile, uint32_t to, const PageIds& page, uint32_t barrier,
                       int lane) const {
#pragma unroll
    for (int i = 0; i < kPasses; ++i) {
      const int row = i * kLanes + lane, key = tile * Config::kTile + row;
      if (row >= Config::kTile || !seen(key)) continue;
      const int in_page = key & ((1 << page_shift) - 1);
      copy_row(to + row * kPitch, data + page[i] * page_stride + in_page * token_stride, kBytes,
               barrier);
    }
  }
};

// The team's first warp loads. Barrier `stage` completes a phase when the stage's bytes are there;
// that a stage is free again the team's own barrier says, between `wait` and `issue`.
struct BulkLoader : Stages {
  using Keys = BulkRows<Config::kQkDim * Config::kElement, Config::kKeyPitch>;
  using Values = BulkRows<Config::kVDim * Config::kElement, Config::kValuePitch>;
  struct PageIds {
    Keys::PageIds keys;
    Values::PageIds values;
  };
  static constexpr bool kNeedsBarrier = false;

  Keys keys;
  Values values;
  uint32_t barriers;  // shared, [kStages]
  bool loads;         // this warp does
  int lane;
  int full = 0, phase = 0;  // the stage that `wait` waits for next
  PageIds ahead[kAhead];
  PageIds ids;

  __device__ BulkLoader(const Params& p, const Work& work, uint32_t memory, uint64_t* full_barriers,
                        int thread, int first, int step)
      : Stages(work, memory, first, step),
        keys(p, p.keys, work),
        values(p, p.values, work),
        barriers(shared_address(full_barriers)),
        loads(thread < kLanes),
        lane(thread % kLanes) {
    if (thread == 0) {
      for (int i = 0; i < Config::kStages; ++i) {
        asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(barriers + 8 * i) : "memory");
      }
      asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    if (!loads) return;
#pragma unroll
    for (int i = 0; i < kAhead; ++i) look_up(first + i * step, ahead[i]);
    look_up(first + kAhead * step, ids);
  }

  // The first tiles, all but the last stage. Other warps may wait after the next block barrier.
  __device__ void start() {
    if (!loads) return;
    __syncwarp();
#pragma unroll
    for (int i = 0; i < kAhead; ++i) load(ahead[i]);
  }

  __device__ void issue() {
    if (!loads) return;
    load(ids);
    look_up(next, ids);
  }

  __device__ void wait() {
    uint32_t done = 0;
    while (!done) {
      asm volatile(
          "{\n\t.reg .pred p;\n\t"
          "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n\t"
          "selp.b32 %0, 1, 0, p;\n\t}"
          : "=r"(done)
          : "r"(barriers + 8 * full), "r"(phase)
          : "memory");
    }
    full = full + 1 == Config::kStages ? 0 : full + 1;
    if (full == 0) phase ^= 1;
  }
  __device__ void wait_for_all() const {}  // each tile was waited for

 private:
  __device__ void look_up(int tile, PageIds& to) const {
    if (tile >= end) return;
    keys.look_up(tile, lane, to.keys);
    if constexpr (!Config::kSharedKv) values.look_up(tile, lane, to.values);
  }

  __device__ void load(const PageIds& from) {
    if (next < end) {
      const uint32_t to = target(), barrier = barriers + 8 * stage;
      int bytes = keys.bytes(next);
      const bool whole = bytes == Config::kTile * Config::kQkDim * Config::kElement;
      if (!whole) clear(to);
      if constexpr (!Config::kSharedKv) bytes += values.bytes(next);
      if (lane == 0) {
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier),
                     "r"(bytes)
                     : "memory");
      }
      __syncwarp();
      keys.load(next, to, from.keys, barrier, lane);
      if constexpr (!Config::kSharedKv) {
        values.load(next, to + Config::kValueOffset, from.values, barrier, lane);
      }
    }
    advance();
  }

  // Zeros where nothing is copied to; a later copy to this stage comes after them.
  __device__ void clear(uint32_t to) const {
    keys.clear_unseen(next, to, lane);
    if constexpr (!Config::kSharedKv) values.clear_unseen(next, to + Config::kValueOffset, lane);
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncwarp();
  }
};

using Loader = BulkLoader;

#else

using Loader = CopyLoader;

#endif

}  // namespace mla::xqa
