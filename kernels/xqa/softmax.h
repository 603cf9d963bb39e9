// Who sees what, and the running softmax. In base 2: scores are multiplied by log2(e).
#pragma once

#include "xqa/scores.h"

namespace mla::xqa {

// Draft columns and windows. A key at position `prefix` + c is draft column c.
struct Visibility {
  const uint16_t* mask;  // of the request, or null: causal
  int mask_words, window_left, prefix, end_key;
  int all_see_from, all_see_to;  // keys that every row of the tile sees
  int token[Config::kMTiles][2];

  __device__ Visibility(const Params& p, const Work& work)
      : mask(p.mask ? p.mask + static_cast<int64_t>(work.first_query) * p.mask_words : nullptr),
        mask_words(p.mask_words),
        window_left(p.window_left),
        prefix(work.prefix),
        end_key(work.end_key) {
    all_see_to = min(end_key, mask ? prefix : prefix + work.token(0) + 1);
    all_see_from = window_left < 0 ? 0 : prefix + work.token(work.rows - 1) - window_left;
#pragma unroll
    for (int m = 0; m < Config::kMTiles; ++m) {
#pragma unroll
      for (int below = 0; below < 2; ++below) {
        // padding rows see what the last row sees; nobody reads them
        const int row = m * 16 + threadIdx.x % kLanes / 4 + 8 * below;
        token[m][below] = work.token(min(row, work.rows - 1));
      }
    }
  }

  __device__ bool sees(int token, int key) const {
    const int column = key - prefix;
    bool seen = key < end_key;
    if (mask == nullptr) {
      seen = seen && column <= token;
    } else if (seen && column >= 0) {
      seen = mask[token * mask_words + column / 16] >> (column % 16) & 1;
    }
    return seen && (window_left < 0 || column >= token - window_left);
  }

  __device__ void apply(Scores& s, int tile) const {
    const int first = tile * Config::kTile;
    if (first >= all_see_from && first + Config::kTile <= all_see_to) return;
#pragma unroll
    for (int m = 0; m < Config::kMTiles; ++m) {
#pragma unroll
      for (int n = 0; n < Config::kGroups; ++n) {
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          const int key = first + 8 * n + 2 * (threadIdx.x % 4) + c % 2;
          if (!sees(token[m][c / 2], key)) s[m][n][c] = -INFINITY;
        }
      }
    }
  }
};

// The greatest score of rows g and g + 8 so far, the same in the four lanes of a row.
struct RowMax {
  float value[Config::kMTiles][2];

  __device__ RowMax() {
#pragma unroll
    for (int i = 0; i < 2 * Config::kMTiles; ++i) value[i / 2][i % 2] = -INFINITY;
  }

  // Scores become weights 2^(score - maximum + shift). Returns whether a maximum of this warp's
  // rows has grown; sums so far must then be multiplied by `factor`.
  __device__ bool weigh(Scores& s, float (&factor)[Config::kMTiles][2]) {
    bool grown = false;
#pragma unroll
    for (int m = 0; m < Config::kMTiles; ++m) {
#pragma unroll
      for (int below = 0; below < 2; ++below) {
        float most = value[m][below];
#pragma unroll
        for (int n = 0; n < Config::kGroups; ++n) {
          most = fmaxf(most, fmaxf(s[m][n][2 * below], s[m][n][2 * below + 1]));
        }
        most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 1));
        most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 2));
        grown = grown || most > value[m][below];
        // a row that has seen no key yet: nothing to subtract from -inf, no sum to be scaled
        const float base = (most == -INFINITY ? 0.0f : most) - kWeightShift;
        factor[m][below] = exp2_fast(value[m][below] - most);
        if (value[m][below] == -INFINITY) factor[m][below] = 0.0f;
        value[m][below] = most;
#pragma unroll
        for (int n = 0; n < Config::kGroups; ++n) {
          s[m][n][2 * below] = exp2_fast(s[m][n][2 * below] - base);
          s[m][n][2 * below + 1] = exp2_fast(s[m][n][2 * below + 1] - base);
        }
      }
    }
    return __any_sync(0xffffffffu, grown);
  }
};

}  // namespace mla::xqa
