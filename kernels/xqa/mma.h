// Warp-level tensor core instructions, fragments from shared memory, conversions of e4m3.
//
// Fragments of mma.sync (PTX ISA, "Matrix fragments for mma.m16n8k16" and "m16n8k32"): lane = 4 g +
// t; accumulators c0, c1 are row g, columns 2t and 2t + 1, c2 and c3 are row g + 8.
#pragma once

#include <cuda_fp16.h>

#include "xqa/config.h"

namespace mla::xqa {

using Fragment = uint32_t[4];
using Accumulator = float[4];

template <Mma kMma>
__device__ inline void mma(Accumulator& d, const Fragment& a, uint32_t b0, uint32_t b1) {
  // asm: one text for each type
#define MLA_XQA_MMA(shape_and_types)                                              \
  asm volatile("mma.sync.aligned." shape_and_types                                \
               " {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};" \
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])                   \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1))
  if constexpr (kMma == Mma::kBf16) {
    MLA_XQA_MMA("m16n8k16.row.col.f32.bf16.bf16.f32");
  } else if constexpr (kMma == Mma::kFp16) {
    MLA_XQA_MMA("m16n8k16.row.col.f32.f16.f16.f32");
  } else {
    MLA_XQA_MMA("m16n8k32.row.col.f32.e4m3.e4m3.f32");
  }
#undef MLA_XQA_MMA
}

__device__ inline uint32_t shared_address(const void* at) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(at));
}

// Four 8 x 16-byte matrices; lane l gives the address of row l % 8 of matrix l / 8.
__device__ inline void load_matrices(Fragment& r, uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address));
}

// The same, transposed as matrices of 16-bit elements.
__device__ inline void load_matrices_transposed(Fragment& r, uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address));
}

// Four e4m3 as two pairs of fp16, which holds every e4m3 exactly.
__device__ inline void half_pairs(uint32_t four, uint32_t& low, uint32_t& high) {
  asm("{\n\t.reg .b16 l, h;\n\tmov.b32 {l, h}, %2;\n\t"
      "cvt.rn.f16x2.e4m3x2 %0, l;\n\tcvt.rn.f16x2.e4m3x2 %1, h;\n\t}"
      : "=r"(low), "=r"(high)
      : "r"(four));
}

__device__ inline uint32_t e4m3_pair(float low, float high) {
  uint16_t pair;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
  return pair;
}

__device__ inline uint32_t fp16_pair(float low, float high) {
  uint32_t pair;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

__device__ inline uint32_t bf16_pair(float low, float high) {
  uint32_t pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

__device__ inline float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

}  // namespace mla::xqa
