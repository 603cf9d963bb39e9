// Step 4, tensor cores: mma.sync on 64 rows x 64 keys, operands by ldmatrix.
//
// Up to here one FMA instruction did 64 operations for a warp; an m16n8k16 mma does 4096. What was
// arithmetic becomes a question of feeding: of the bytes that ldmatrix brings from shared memory.
// The tile is large for that: a key that came into shared memory serves 64 rows, and the output
// stays in registers for the whole walk. row_tile.cuh has the arithmetic.
//
// Rows lie in shared memory as in global memory, 1152 bytes apart: see step 5 for what that costs.
// Threads fetch a tile through their registers and wait for it: see step 6.
#pragma once

#include "ladder/row_tile.cuh"

namespace mla::ladder::step4 {

struct Plain {
  // Where 16-byte piece `piece` of a row of `pieces` lies.
  static __device__ int at(int row, int piece, int pieces) { return row * pieces + piece; }
};

// Keys [begin, begin + 64), zeros from kv_len on: what lies there may be NaN, and a weight of 0
// would not make that 0.
template <class Layout>
__device__ void copy_keys(const Request& request, uint4* keys, int begin) {
  for (int i = threadIdx.x; i < kKeyTile; i += kTileThreads) {
    const int key = i / kTokenPieces;
    const int piece = i - key * kTokenPieces;
    uint4 words = {};
    if (begin + key < request.kv_len) {
      words = reinterpret_cast<const uint4*>(request.token(begin + key))[piece];
    }
    keys[Layout::at(key, piece, kTokenPieces)] = words;
  }
}

template <class Layout>
__global__ void __launch_bounds__(kTileThreads, 1) attend(const __grid_constant__ Call call) {
  const Request request(call, blockIdx.y);
  const int first_row = blockIdx.x * kTileRows;
  if (first_row >= request.rows) return;
  const int last_row = min(first_row + kTileRows, request.rows) - 1;
  const int end = request.visible(last_row);

  const Memory memory(1);
  RowTile<Layout, 4> tile(request, memory, first_row);
  tile.copy_query();
  for (int begin = 0; begin < end; begin += kTileKeys) {
    __syncthreads();  // every warp is done with the keys before
    copy_keys<Layout>(request, memory.keys, begin);
    __syncthreads();  // the keys are there
    tile.attend(memory.keys, begin);
  }
  tile.store_result();
}

template <class Layout>
cudaError_t run(const Call& call, cudaStream_t stream) {
  const unsigned batch = call.batch;
  const Shape shape{dim3(ceil_div(call.max_rows, kTileRows), batch), kTileThreads,
                    Memory::bytes(1)};
  return launch(shape, stream, attend<Layout>, call);
}

}  // namespace mla::ladder::step4
