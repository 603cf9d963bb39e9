// Which keys a row sees, and the running softmax. In base 2: the scores' scale has log2(e) in it.
#pragma once

#include "xqa/scores.h"

namespace mla::xqa {

// Draft columns and windows. A key at position `prefix` + c is draft column c.
struct Visibility {
  const Params& p;
  const Work& work;              // in shared memory: read for few tiles only
  int all_see_from, all_see_to;  // keys that every row of the tile sees

  // `now`: the same work, in registers.
  __device__ Visibility(const Params& p, const Work& now, const Work& work) : p(p), work(work) {
    all_see_to = min(now.end_key, p.mask ? now.prefix : now.prefix + now.token(0) + 1);
    all_see_from = p.window_left < 0 ? 0 : now.prefix + now.token(now.rows - 1) - p.window_left;
  }

  __device__ void apply(Scores& s, int tile) const {
    const int first = tile * Config::kTile;
    if (first >= all_see_from && first + Config::kTile <= all_see_to) return;
#pragma unroll
    for (int m = 0; m < Config::kMTiles; ++m) {
      // padding rows see what the last row sees; they are not stored
      const int row = m * 16 + threadIdx.x % kLanes / 4;
      const int token[2] = {work.token(min(row, work.rows - 1)),
                            work.token(min(row + 8, work.rows - 1))};
#pragma unroll
      for (int i = 0; i < Config::kGroups; i += 4) {  // 32 keys at a time
        const uint32_t seen[2] = {keys_seen(token[0], first + 8 * i),
                                  keys_seen(token[1], first + 8 * i)};
#pragma unroll
        for (int n = i; n < min(i + 4, Config::kGroups); ++n) {
#pragma unroll
          for (int c = 0; c < 4; ++c) {
            const int bit = 8 * (n - i) + c % 2;
            if (!(seen[c / 2] >> (2 * (threadIdx.x % 4)) >> bit & 1)) s[m][n][c] = -INFINITY;
          }
        }
      }
    }
  }

 private:
  // Bit i: this token of the request sees key first + i.
  __device__ uint32_t keys_seen(int token, int first) const {
    const int column = first - work.prefix;
    uint32_t seen = p.mask == nullptr ? bits_below(token + 1 - column)
                                      : bits_below(-column) | drafts_seen(token, column);
    seen &= bits_below(work.end_key - first);
    return p.window_left < 0 ? seen : seen & ~bits_below(token - p.window_left - column);
  }

  // 32 bits of a mask's row, from any column; columns outside have none.
  __device__ uint32_t drafts_seen(int token, int column) const {
    const int word = column >> 4;
    const uint16_t* row = p.mask + static_cast<int64_t>(work.first_query + token) * p.mask_words;
    uint32_t three[3];
#pragma unroll
    for (int i = 0; i < 3; ++i) {
      const int at = word + i;
      three[i] = at >= 0 && at < p.mask_words ? row[at] : 0;
    }
    return __funnelshift_r(three[0] | three[1] << 16, three[2], column & 15);
  }

  __device__ static uint32_t bits_below(int n) { return n >= 32 ? ~0u : (1u << max(n, 0)) - 1; }
};

// Rows g and g + 8: the greatest score so far, and the exact sum of weights, for the lse alone: a
// result is divided by the sum of the weights as they were rounded (values.h).
struct Softmax {
  float max[Config::kMTiles][2];  // the same in the four lanes of a row
  float sum[Config::kMTiles][2];  // of this lane's columns

  __device__ Softmax() {
#pragma unroll
    for (int i = 0; i < 2 * Config::kMTiles; ++i) {
      max[i / 2][i % 2] = -INFINITY;
      sum[i / 2][i % 2] = 0.0f;
    }
  }

  // Scores become weights 2^((score - maximum) scale + shift), scale > 0. Returns whether a maximum
  // of this warp's rows has grown; sums so far must then be multiplied by `factor`.
  __device__ bool weigh(Scores& s, float scale, float (&factor)[Config::kMTiles][2]) {
    bool grown = false;
#pragma unroll
    for (int m = 0; m < Config::kMTiles; ++m) {
#pragma unroll
      for (int below = 0; below < 2; ++below) {
        const float before = max[m][below];
        const float most = row_max(s[m], below, before);
        grown = grown || most > before;
        // a row that has seen no key yet: nothing to subtract from -inf, no sum to be scaled
        const float base = (most == -INFINITY ? 0.0f : most * scale) - kWeightShift;
        factor[m][below] = before == -INFINITY ? 0.0f : exp2_fast((before - most) * scale);
        max[m][below] = most;
        float total = 0.0f;
#pragma unroll
        for (int i = 0; i < 2 * Config::kGroups; ++i) {
          float& weight = s[m][i / 2][2 * below + i % 2];
          weight = exp2_fast(fmaf(weight, scale, -base));
          total += weight;
        }
        sum[m][below] = sum[m][below] * factor[m][below] + total;
      }
    }
    return __any_sync(0xffffffffu, grown);
  }

  // The whole row's sum, in its four lanes.
  __device__ float row_sum(int m, int below) const {
    const float half = sum[m][below] + __shfl_xor_sync(0xffffffffu, sum[m][below], 1);
    return half + __shfl_xor_sync(0xffffffffu, half, 2);
  }

 private:
  __device__ static float row_max(const Accumulator (&s)[Config::kGroups], int below, float most) {
#pragma unroll
    for (int n = 0; n < Config::kGroups; ++n) {
      most = fmaxf(most, fmaxf(s[n][2 * below], s[n][2 * below + 1]));
    }
    most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 1));
    return fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 2));
  }
};

}  // namespace mla::xqa
