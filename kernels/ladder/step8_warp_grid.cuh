// Step 8, the shape of a warp's share: fewer bytes from shared memory for the same products.
//
// A warp that multiplies m rows by n columns reads m + n rows of operands for m n products: a
// square share reads least. With 4 warps down and 2 across, as so far, a warp's share of the
// values is 16 rows x 256 columns; with 2 down and 4 across it is 32 x 128. Per tile of 64 keys, in
// KB that ldmatrix reads for all 8 warps:
//
//            scores                      values
//   4 x 2    8 x 36 x (0.5 + 1.0) = 432  8 x 4 x (0.5 + 8) = 272
//   2 x 4    8 x 36 x (1.0 + 0.5) = 432  8 x 4 x (1.0 + 4) = 160
//
// 704 becomes 592. Everything else stays; row_tile.cuh takes the grid as a parameter.
#pragma once

#include "ladder/step7_split.cuh"

namespace mla::ladder::step8 {

constexpr int kDown = 2;

inline cudaError_t run(const Call& call, cudaStream_t stream) {
  return step7::run<kDown>(call, stream);
}

}  // namespace mla::ladder::step8
