// Keys and values of a team's tiles, from pages into shared memory, by 16-byte cp.async. Page ids
// are fetched one tile ahead of the loads that need them. Rows that no query row sees are filled
// with zeros: what the cache holds there may be NaN.
//
// Eight neighbouring lanes copy 128 neighbouring bytes, so that an instruction of a warp touches
// four lines of 128 bytes. Rows of 576 or 64 bytes are taken in pairs for that: with four lanes a
// row an instruction took 15 wavefronts of shared memory, not 4 (H200, 2026-11-20, ncu).
#pragma once

#include "xqa/mma.h"
#include "xqa/work.h"

namespace mla::xqa {

// Rows of kBytes bytes, loaded by the threads of a team.
template <int kBytes, int kPitch>
struct RowLoader {
  static constexpr int kWide = 8;  // lanes that copy neighbouring chunks of 16 bytes
  static constexpr int kChunks = kBytes / 16;
  static constexpr int kUnit = kChunks % kWide == 0 ? 1 : 2;  // rows that they take together
  static constexpr int kRowsAtOnce = kLanes * Config::kTeam / kWide * kUnit;
  static constexpr int kPasses = Config::kTile / kRowsAtOnce;
  static constexpr int kOfPass = kChunks * kUnit / kWide;
  static constexpr int kCopies = kPasses * kOfPass;  // of a lane, for a tile
  // tiles begin at multiples of 16; where pages are not small, they have at least as many tokens
  static constexpr bool kSmall = Config::kSmallPages;  // each row of a lane has a page id
  static constexpr bool kOwnPage = kRowsAtOnce > 16;   // lanes of a pass are in several pages
  static constexpr int kPages =
      kSmall ? kPasses * kUnit : (kOwnPage ? kPasses : Config::kTile / 16);
  static_assert(kChunks % kWide == 0 || kChunks % kWide == kWide / 2);
  static_assert(Config::kTile % kRowsAtOnce == 0);

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
        row(thread / kWide * kUnit),
        chunk(thread % kWide) {
    from = pages.data + work.kv_head * pages.head_stride + chunk * 16;
    if (!kOwnPage && !kSmall) from += row * token_stride;
  }

  // Page ids that `load` of this tile needs; page 0 where no key is seen.
  __device__ void look_up(int tile, PageIds& page) const {
#pragma unroll
    for (int i = 0; i < kPages; ++i) {
      if constexpr (kSmall) {
        const int key = tile * Config::kTile + i / kUnit * kRowsAtOnce + row + i % kUnit;
        page[i] = bytes(key) ? table[key >> page_shift] : 0;
        continue;
      }
      const int begin = tile * Config::kTile + (kOwnPage ? row + i * kRowsAtOnce : 16 * i);
      const int last = begin + (kOwnPage ? kUnit : 16) - 1;
      page[i] = begin < first_key + keys && last >= first_key ? table[begin >> page_shift] : 0;
    }
  }

  // Copy number `i` of this tile, if `wanted`.
  __device__ void copy(int i, int tile, uint32_t to, const PageIds& page, bool wanted) const {
    const int pass = i / kOfPass, in_pass = i % kOfPass;
    const int first = pass * kRowsAtOnce;  // row of the tile, for the first lanes
    // in a pair, the second row begins half way through copy kOfPass / 2
    const bool second =
        kUnit == 2 && (in_pass > kOfPass / 2 || (in_pass == kOfPass / 2 && chunk >= kWide / 2));
    const uint8_t* place = kSmall
                               ? in_small_page(pass, tile, page, second)
                               : in_page(first, tile, page[kSmall || kOwnPage ? pass : first / 16]);
    if (second) place += (kSmall ? 0 : token_stride) - kBytes;
    to += (first + row) * kPitch + chunk * 16 + (second ? kPitch - kBytes : 0);
    const int key = tile * Config::kTile + first + row + (second ? kUnit - 1 : 0);
    asm volatile(
        "{\n\t.reg .pred p;\n\tsetp.ne.b32 p, %3, 0;\n\t"
        "@p cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;\n\t}" ::"r"(to + in_pass *
                                                                                        kWide * 16),
        "l"(place + in_pass * kWide * 16), "r"(bytes(key)), "r"(static_cast<int>(wanted)));
  }

 private:
  // The lane's token of a pass in page `id`, or that page's part that begins with its 16 rows.
  __device__ const uint8_t* in_page(int first, int tile, int id) const {
    const int token = tile * Config::kTile + (kOwnPage ? first + row : first / 16 * 16);
    const int in_page = token & ((1 << page_shift) - 1);
    const int beyond = kOwnPage ? 0 : first % 16;
    return from + id * page_stride + in_page * token_stride + beyond * token_stride;
  }

  // The lane's token of a pass, or of a pair its `second` one, whose page may be another.
  __device__ const uint8_t* in_small_page(int pass, int tile, const PageIds& page,
                                          bool second) const {
    const int token = tile * Config::kTile + pass * kRowsAtOnce + row + (second ? 1 : 0);
    const int id = second ? page[pass * kUnit + kUnit - 1] : page[pass * kUnit];
    return from + id * page_stride + (token & ((1 << page_shift) - 1)) * token_stride;
  }

  __device__ int bytes(int key) const {
    return static_cast<unsigned>(key - first_key) < static_cast<unsigned>(keys) ? 16 : 0;
  }
};

// Fills the stages of one team in turn with tiles first, first + step, ...
struct Loader {
  static constexpr int kAhead = Config::kStages - 1;
  using Keys = RowLoader<Config::kQkDim * Config::kElement, Config::kKeyPitch>;
  using Values = RowLoader<Config::kVDim * Config::kElement, Config::kValuePitch>;
  struct PageIds {
    Keys::PageIds keys;
    Values::PageIds values;
  };
  Keys keys;
  Values values;
  uint32_t memory;  // of the stages, shared
  int next, step, end;
  int stage = 0;
  PageIds ahead[kAhead];  // while nothing is loaded
  PageIds ids;            // of tile `next`

  __device__ Loader(const Params& p, const Work& work, uint32_t memory, int thread, int first,
                    int step)
      : keys(p, p.keys, work, thread),
        values(p, p.values, work, thread),
        memory(memory),
        next(first),
        step(step),
        end(work.end) {
#pragma unroll
    for (int i = 0; i < kAhead; ++i) look_up(first + i * step, ahead[i]);
    look_up(first + kAhead * step, ids);
  }

  // The first tiles, all but the last stage.
  __device__ void start() {
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      load<0, 1>(ahead[i]);
      advance();
    }
  }

  // Begins to load a part of the next tile, number kPart of kParts, or nothing.
  template <int kPart, int kParts>
  __device__ void issue() {
    load<kPart, kParts>(ids);
  }

  // After all parts. Groups are counted by tiles, whether there was one or not.
  __device__ void issued() {
    advance();
    look_up(next, ids);
  }

  // This thread's part of the oldest tile is there. Others' parts: after a barrier.
  __device__ void wait() const { asm volatile("cp.async.wait_group %0;" ::"n"(kAhead - 1)); }
  __device__ void wait_for_all() const { asm volatile("cp.async.wait_group 0;"); }

 private:
  __device__ void look_up(int tile, PageIds& to) const {
    if (tile >= end) return;
    keys.look_up(tile, to.keys);
    if constexpr (!Config::kSharedKv) values.look_up(tile, to.values);
  }

  template <int kPart, int kParts>
  __device__ void load(const PageIds& from) {
    constexpr int kCopies = Keys::kCopies + (Config::kSharedKv ? 0 : Values::kCopies);
    const bool wanted = next < end;
    const uint32_t to = memory + stage * Config::kStageBytes;
#pragma unroll
    for (int i = kPart * kCopies / kParts; i < (kPart + 1) * kCopies / kParts; ++i) {
      if (i < Keys::kCopies) {
        keys.copy(i, next, to, from.keys, wanted);
      } else if constexpr (!Config::kSharedKv) {
        values.copy(i - Keys::kCopies, next, to + Config::kValueOffset, from.values, wanted);
      }
    }
  }

  __device__ void advance() {
    asm volatile("cp.async.commit_group;");
    next += step;
    stage = stage + 1 == Config::kStages ? 0 : stage + 1;
  }
};

}  // namespace mla::xqa
