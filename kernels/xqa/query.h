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
  static constexpr int kCount = Config::kMTiles * Config::kSteps;  // of a k way
  // warps that need the same fragments, and in shared memory each write a share
  static constexpr int kWriters =
      Config::kQueryInRegisters ? 1 : Config::kTeams * Config::kTokenWays;
  static constexpr int kKept = (kCount + kWriters - 1) / kWriters;

  Fragment kept[kKept];               // number writer + i * kWriters
  float unscale[Config::kMTiles][2];  // of rows g and g + 8
  uint32_t shared;  // this lane's place in the fragments of the k way, where not in registers
  int lane, writer;
  uint32_t signs;  // bits to be flipped

  // Begins to load the k-steps of this warp's k way, all of them or its share.
  // `negative`: the rows times -1, so that the scale of scores can be taken as positive.
  __device__ Query(const Params& p, const Work& work, uint4* memory, const Team& team,
                   bool negative)
      : lane(threadIdx.x % kLanes),
        writer(kWriters > 1 ? team.idx * Config::kTokenWays + team.warp / Config::kKWays : 0),
        signs(negative ? kSigns : 0) {
    const int k_way = team.warp % Config::kKWays;
    shared = shared_address(memory + k_way * kCount * kLanes + lane);
#pragma unroll
    for (int i = 0; i < kKept; ++i) {
      const int n = min(writer + i * kWriters, kCount - 1);
      load(p, work, n / Config::kSteps, k_way * Config::kSteps + n % Config::kSteps, kept[i]);
    }
  }

  // After the loads have had time. With fragments in shared memory, a barrier must follow.
  __device__ void prepare() {
#pragma unroll
    for (int i = 0; i < kKept; ++i) {
      widen(kept[i]);
      const int n = writer + i * kWriters;
      if (Config::kQueryInRegisters || n >= kCount) continue;
      asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(shared + n * kMatrix),
                   "r"(kept[i][0]), "r"(kept[i][1]), "r"(kept[i][2]), "r"(kept[i][3])
                   : "memory");
    }
    if constexpr (kScaled) scale();
  }

  __device__ void get(int m_tile, int step, Fragment& a) const {
    const int i = m_tile * Config::kSteps + step;
    if constexpr (Config::kQueryInRegisters) {
#pragma unroll
      for (int j = 0; j < 4; ++j) a[j] = kept[i][j];
    } else {
      // asm: the compiler would make four loads of this one where registers are few
      asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3])
                   : "r"(shared + i * kMatrix));
    }
  }

 private:
  // Byte of the row that register a0 or a1 of k-step `step` begins at; a2 or a3 begin after it by
  // 16 bytes, or where e4m3 keys are multiplied in fp16 as the next elements.
  __device__ int offset(int step) const {
    const int t = lane % 4;
    return kNeighbours ? (16 * step + 4 * t) * kElement : 32 * step + 4 * t;
  }

  // Whether a row's two registers of a k-step lie side by side in memory.
  static constexpr bool kNeighbours = Config::kBytes && Config::kMma == Mma::kFp16;

  __device__ void load(const Params& p, const Work& work, int m_tile, int step, Fragment& a) const {
#pragma unroll
    for (int below = 0; below < 2; ++below) {
      // padding rows repeat the last one; their results are not stored
      const int row = min(m_tile * 16 + lane / 4 + 8 * below, work.rows - 1);
      const int64_t at =
          (work.first_query + work.token(row)) * p.query_token + work.head(row) * p.query_head;
      const uint8_t* from = p.query + at + offset(step);
      if constexpr (kNeighbours && kElement == 1) {
        const uint32_t both = *reinterpret_cast<const uint32_t*>(from) ^ signs;
        a[below] = both & 0xffff;
        a[2 + below] = both >> 16;
      } else if constexpr (kNeighbours) {
        const uint2 both = *reinterpret_cast<const uint2*>(from);
        a[below] = both.x ^ signs;
        a[2 + below] = both.y ^ signs;
      } else {
        a[below] = *reinterpret_cast<const uint32_t*>(from) ^ signs;
        a[2 + below] = *reinterpret_cast<const uint32_t*>(from + 16) ^ signs;
      }
    }
  }

  static constexpr bool kWidened = kElement == 1 && Config::kMma == Mma::kFp16;

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
