// Warp-level PTX: ldmatrix, mma.sync, cp.async. All 32 lanes call these together.
//
// Shapes and lanes as in the PTX ISA, "Matrix fragments for mma.m16n8k16". An 8x8 matrix of 16-bit
// numbers takes one register a lane: lane i holds row i / 4, columns 2 (i % 4) and the next.
// (tests/cuda_on_host has the same functions in plain C++.)
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace mla::ladder {

// Four 8x8 matrices: lanes 8 j .. 8 j + 7 give the addresses of the eight rows of matrix j.
__device__ inline void load_matrices(uint32_t (&to)[4], const uint4* row) {
  const uint32_t address = static_cast<uint32_t>(__cvta_generic_to_shared(row));
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(address)
               : "memory");
}

// The same, each matrix transposed on its way.
__device__ inline void load_transposed(uint32_t (&to)[4], const uint4* row) {
  const uint32_t address = static_cast<uint32_t>(__cvta_generic_to_shared(row));
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(address)
               : "memory");
}

// c += a b: a is 16 x 16 (rows below and above 8, then columns), b 16 x 8, c 16 x 8 in fp32.
// Lane i holds of c rows i / 4 and i / 4 + 8, columns 2 (i % 4) and the next.
__device__ inline void multiply_add(float (&c)[4], const uint32_t (&a)[4], uint32_t b0,
                                    uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// 16 bytes from global to shared memory, past the registers, done some time before the next
// wait_for_copies; zeros where `valid` is false, and then `from` is not read.
__device__ inline void copy_async(uint4* to, const uint4* from, bool valid) {
  const uint32_t address = static_cast<uint32_t>(__cvta_generic_to_shared(to));
  const int bytes = valid ? 16 : 0;
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
               :
               : "r"(address), "l"(from), "r"(bytes)
               : "memory");
}

// All of this thread's copies have landed; other threads see them after a __syncthreads.
__device__ inline void wait_for_copies() { asm volatile("cp.async.wait_all;" : : : "memory"); }

}  // namespace mla::ladder
