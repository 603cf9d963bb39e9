// The query rows of a CTA as fragments (operand A of Q K^T).
//
// Which element of K a fragment's slot stands for is free, as long as Q and K agree: e4m3 keys that
// are multiplied in fp16 come four neighbours to a register, hence the order in `offset`.
//
// A bf16 query over e4m3 keys is multiplied in fp16 too: each row is scaled by a power of two so
// that its greatest element lies in [2^14, 2^15), and scores are scaled back. Elements down to
// 2^-31 of the greatest keep all their bits.
#pragma once

#include "xqa/mma.h"
#include "xqa/team.h"
#include "xqa/work.h"

namespace mla::xqa {

struct Query {
  static constexpr bool kScaled = Config::kQuery == Type::kBf16 && Config::kMma == Mma::kFp16;
  static constexpr int kElement = Config::kQuery == Type::kE4m3 ? 1 : 2;
  static constexpr uint32_t kSigns = kElement == 1 ? 0x80808080u : 0x80008000u;
  static constexpr int kKept = Config::kQueryInRegisters ? Config::kMTiles * Config::kSteps : 1;

  Fragment kept[kKept];
  float unscale[Config::kMTiles][2];  // of rows g and g + 8
  const uint4* shared;                // fragments of this warp's steps, where not in registers
  int lane;
  uint32_t signs;  // bits to be flipped

  // This warp takes the k-steps of its k way. With fragments in shared memory all teams and token
  // ways need the same ones: each of those warps writes a share, and a barrier must follow.
  // `negative`: the rows times -1, so that the scale of scores can be taken as positive.
  __device__ Query(const Params& p, const Work& work, uint4* memory, const Team& team,
                   bool negative)
      : lane(threadIdx.x % kLanes), signs(negative ? kSigns : 0) {
    const int k_way = team.warp % Config::kKWays;
    shared = memory + k_way * Config::kMTiles * Config::kSteps * kLanes;
    constexpr int kCount = Config::kMTiles * Config::kSteps;
    if constexpr (Config::kQueryInRegisters) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        load(p, work, i / Config::kSteps, k_way * Config::kSteps + i % Config::kSteps, kept[i]);
      }
    } else {
      uint4* to = memory + k_way * kCount * kLanes + lane;
      constexpr int kWriters = Config::kTeams * Config::kTokenWays;
      const int writer = team.idx * Config::kTokenWays + team.warp / Config::kKWays;
      for (int i = writer; i < kCount; i += kWriters) {
        Fragment a;
        load(p, work, i / Config::kSteps, k_way * Config::kSteps + i % Config::kSteps, a);
        widen(a);
        to[i * kLanes] = make_uint4(a[0], a[1], a[2], a[3]);
      }
    }
  }

  // After the loads have had time.
  __device__ void prepare() {
    if constexpr (Config::kQueryInRegisters) {
#pragma unroll
      for (int i = 0; i < kKept; ++i) widen(kept[i]);
    }
    if constexpr (kScaled) scale();
  }

  __device__ void get(int m_tile, int step, Fragment& a) const {
    const int i = m_tile * Config::kSteps + step;
    if constexpr (Config::kQueryInRegisters) {
#pragma unroll
      for (int j = 0; j < 4; ++j) a[j] = kept[i][j];
    } else {
      const uint4 four = shared[i * kLanes + lane];
      a[0] = four.x, a[1] = four.y, a[2] = four.z, a[3] = four.w;
    }
  }

 private:
  // Byte of the row that register a0 or a1 (second: a2 or a3) of k-step `step` begins at.
  __device__ int offset(int step, bool second) const {
    const int t = lane % 4;
    if constexpr (Config::kMma == Mma::kE4m3) return 32 * step + 4 * t + 16 * second;
    if constexpr (Config::kBytes) return (16 * step + 4 * t + 2 * second) * kElement;
    return (16 * step + 2 * t + 8 * second) * kElement;
  }

  __device__ void load(const Params& p, const Work& work, int m_tile, int step, Fragment& a) const {
#pragma unroll
    for (int below = 0; below < 2; ++below) {
      // padding rows repeat the last one; nobody reads what comes of them
      const int row = min(m_tile * 16 + lane / 4 + 8 * below, work.rows - 1);
      const int64_t at =
          (work.first_query + work.token(row)) * p.query_token + work.head(row) * p.query_head;
      a[below] = read(p.query + at + offset(step, false)) ^ signs;
      a[2 + below] = read(p.query + at + offset(step, true)) ^ signs;
    }
  }

  static constexpr bool kWidened = kElement == 1 && Config::kMma == Mma::kFp16;

  // Elements of one register, two of them e4m3 where these will be widened.
  __device__ static uint32_t read(const uint8_t* at) {
    if constexpr (kWidened) return *reinterpret_cast<const uint16_t*>(at);
    return *reinterpret_cast<const uint32_t*>(at);
  }

  // Two e4m3 become two fp16 where that is what is multiplied.
  __device__ static void widen(Fragment& a) {
    if constexpr (kWidened) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        uint32_t unused;
        half_pairs(a[i], a[i], unused);
      }
    }
  }

  __device__ void scale() {
#pragma unroll
    for (int m = 0; m < Config::kMTiles; ++m) {
#pragma unroll
      for (int below = 0; below < 2; ++below) {
        scale_row(&kept[m * Config::kSteps], below, unscale[m][below]);
      }
    }
  }

  // Registers a0 and a2 (below: a1 and a3) of all k-steps, bf16 pairs, become fp16 pairs.
  __device__ static void scale_row(Fragment* a, int below, float& back) {
    float most = 0.0f;
#pragma unroll
    for (int i = 0; i < 2 * Config::kSteps; ++i) {
      const uint32_t pair = a[i / 2][2 * (i % 2) + below];
      most = fmaxf(most, fmaxf(fabsf(low(pair)), fabsf(high(pair))));
    }
    most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 1));
    most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 2));
    const int exponent = static_cast<int>(__float_as_uint(most) >> 23) - 127;
    const int shift = min(14 - exponent, 126);
    const float factor = __uint_as_float((127 + shift) << 23);
    back = __uint_as_float((127 - shift) << 23);
#pragma unroll
    for (int i = 0; i < 2 * Config::kSteps; ++i) {
      uint32_t& pair = a[i / 2][2 * (i % 2) + below];
      pair = fp16_pair(low(pair) * factor, high(pair) * factor);
    }
  }

  __device__ static float low(uint32_t bf16_two) { return __uint_as_float(bf16_two << 16); }
  __device__ static float high(uint32_t bf16_two) {
    return __uint_as_float(bf16_two & 0xffff0000u);
  }
};

}  // namespace mla::xqa
