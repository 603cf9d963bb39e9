// P V of a tile: every warp of a team takes all tokens and its own columns of V.
//
// V lies in shared memory with tokens as rows, so ldmatrix transposes it, as 16-bit elements. For
// e4m3 that leaves bytes of two columns and two tokens in a register: prmt takes a column's bytes
// out of it (for fp16: out of one register; for m16n8k32, whose k-slots 4t .. 4t + 3 then are
// tokens 2t, 2t + 1, 2t + 8, 2t + 9: out of two), even columns for one accumulator, odd ones for
// another.
//
// The sum of a row's weights is one more column of V that is all ones: so it is a sum of the very
// weights that were multiplied, rounded as they are.
#pragma once

#include "xqa/softmax.h"

namespace mla::xqa {

struct Output {
  static constexpr uint32_t kOnes = Config::kMma == Mma::kBf16   ? 0x3f803f80u
                                    : Config::kMma == Mma::kFp16 ? 0x3c003c00u
                                                                 : 0x38383838u;
  Accumulator sum[Config::kMTiles];  // columns are equal
  // [.][16-column block][which 8 of its columns], see `column`
  Accumulator out[Config::kMTiles][Config::kColumns][2];

  __device__ Output() {
#pragma unroll
    for (int m = 0; m < Config::kMTiles; ++m) {
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        sum[m][c] = 0.0f;
#pragma unroll
        for (int n = 0; n < 2 * Config::kColumns; ++n) out[m][n / 2][n % 2][c] = 0.0f;
      }
    }
  }

  // Column inside a 16-column block of element c of accumulator `half`.
  __device__ static int column(int half, int c) {
    const int t = threadIdx.x % 4;
    return Config::kBytes ? 4 * t + 2 * (c % 2) + half : 8 * half + 2 * t + c % 2;
  }

  __device__ void scale(const float (&factor)[Config::kMTiles][2]) {
#pragma unroll
    for (int m = 0; m < Config::kMTiles; ++m) {
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        sum[m][c] *= factor[m][c / 2];
#pragma unroll
        for (int n = 0; n < 2 * Config::kColumns; ++n) out[m][n / 2][n % 2][c] *= factor[m][c / 2];
      }
    }
  }

  // Adds weights x values of a tile. `values`: its first value row in shared memory.
  __device__ void add(const Scores& weights, uint32_t values, const Team& team) {
    const int lane = threadIdx.x % kLanes;
    values += team.warp * Config::kColumns * 16 * Config::kElement;
    if constexpr (Config::kBytes) {
      values += lane * Config::kValuePitch;  // matrix l / 8: tokens 8 (l / 8), ...
#pragma unroll
      for (int token = 0; token < Config::kTile; token += 32) {
        add_bytes(weights, token, values + token * Config::kValuePitch);
      }
    } else {
      // matrices: tokens 0 and 8 of the first 8 columns, then of the next 8
      values += lane % 16 * Config::kValuePitch + lane / 16 * 16;
#pragma unroll
      for (int token = 0; token < Config::kTile; token += 16) {
        add_halves(weights, token, values + token * Config::kValuePitch);
      }
    }
  }

 private:
  // Operand A of one k-step of mma: 16 tokens (e4m3: 32) from `token`.
  __device__ static void weight_fragment(const Accumulator* weights, int token, Fragment& a) {
    const Accumulator* s = weights + token / 8;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int c = 2 * (i % 2);  // rows g, then g + 8
      if constexpr (Config::kMma == Mma::kE4m3) {
        const int n = i / 2 * 2;
        a[i] = e4m3_pair(s[n][c], s[n][c + 1]) | e4m3_pair(s[n + 1][c], s[n + 1][c + 1]) << 16;
      } else if constexpr (Config::kMma == Mma::kFp16) {
        a[i] = fp16_pair(s[i / 2][c], s[i / 2][c + 1]);
      } else {
        a[i] = bf16_pair(s[i / 2][c], s[i / 2][c + 1]);
      }
    }
  }

  __device__ void add_halves(const Scores& weights, int token, uint32_t values) {
    Fragment a[Config::kMTiles];
#pragma unroll
    for (int m = 0; m < Config::kMTiles; ++m) {
      weight_fragment(weights[m], token, a[m]);
      mma<Config::kMma>(sum[m], a[m], kOnes, kOnes);
    }
#pragma unroll
    for (int n = 0; n < Config::kColumns; ++n) {
      Fragment b;
      load_matrices_transposed(b, values + n * 32);
#pragma unroll
      for (int m = 0; m < Config::kMTiles; ++m) {
        mma<Config::kMma>(out[m][n][0], a[m], b[0], b[1]);
        mma<Config::kMma>(out[m][n][1], a[m], b[2], b[3]);
      }
    }
  }

  __device__ void add_bytes(const Scores& weights, int token, uint32_t values) {
    constexpr int kSteps = Config::kMma == Mma::kE4m3 ? 1 : 2;  // of 32 tokens
    Fragment a[Config::kMTiles][kSteps];
#pragma unroll
    for (int m = 0; m < Config::kMTiles; ++m) {
#pragma unroll
      for (int k = 0; k < kSteps; ++k) {
        weight_fragment(weights[m], token + 16 * k, a[m][k]);
        mma<Config::kMma>(sum[m], a[m][k], kOnes, kOnes);
      }
    }
#pragma unroll
    for (int n = 0; n < Config::kColumns; ++n) {
      Fragment r;
      load_matrices_transposed(r, values + n * 16);
      uint32_t b[2][kSteps][2];  // [even or odd columns][k-step][half of its tokens]
      split_columns(r, b);
#pragma unroll
      for (int m = 0; m < Config::kMTiles; ++m) {
#pragma unroll
        for (int k = 0; k < kSteps; ++k) {
          mma<Config::kMma>(out[m][n][0], a[m][k], b[0][k][0], b[0][k][1]);
          mma<Config::kMma>(out[m][n][1], a[m][k], b[1][k][0], b[1][k][1]);
        }
      }
    }
  }

  template <int kSteps>
  __device__ static void split_columns(const Fragment& r, uint32_t (&b)[2][kSteps][2]) {
    if constexpr (Config::kMma == Mma::kE4m3) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        b[0][0][i] = __byte_perm(r[2 * i], r[2 * i + 1], 0x6420);
        b[1][0][i] = __byte_perm(r[2 * i], r[2 * i + 1], 0x7531);
      }
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint32_t columns = __byte_perm(r[i], 0, 0x3120);
        half_pairs(columns, b[0][i / 2][i % 2], b[1][i / 2][i % 2]);
      }
    }
  }
};

}  // namespace mla::xqa
