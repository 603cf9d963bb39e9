// Step 5, the swizzle: rows of shared memory turned against each other, so that no bank is read
// twice.
//
// ldmatrix reads eight rows of 16 bytes at a time. Shared memory has 32 banks of 4 bytes, 128 bytes
// wide in all, and rows of 1152 = 9 x 128 bytes all begin at bank 0: in step 4 the eight pieces
// fall on the same four banks, and the read takes eight turns. The same is true of
// the weights, rows of 128 bytes.
//
// Piece p of row r moves to p ^ (r mod 8). The three lowest bits of p select sixteen of the 128
// bytes; for a fixed p, eight consecutive rows now take eight different ones. XOR with a
// row's own number is its own inverse, so that nothing collides, and it costs one instruction where
// the address is computed.
#pragma once

#include "ladder/step4_tensor_cores.cuh"

namespace mla::ladder::step5 {

struct Swizzled {
  static __device__ int at(int row, int piece, int pieces) {
    return row * pieces + (piece ^ (row & 7));
  }
};

inline cudaError_t run(const Call& call, cudaStream_t stream) {
  return step4::run<Swizzled>(call, stream);
}

}  // namespace mla::ladder::step5
