// Step 3, shared memory: 16 rows of a block share one tile of keys.
//
// In MLA all heads of a token attend the same keys. Step 2 fetches a key anew for each row; here a
// block of 16 warps, a row each, copies 32 keys into shared memory once and all of its rows read
// them there: a sixteenth of the traffic through L2. What each row does with a key is step 2's.
#pragma once

#include "ladder/step2_online.cuh"

namespace mla::ladder::step3 {

using step2::OnlineRow;

constexpr int kRows = 16;  // a warp each
constexpr int kThreads = kRows * kWarp;
constexpr int kKeys = 32;
constexpr int kPieces = kHeadDim * sizeof(bf16) / sizeof(uint4);  // 72 of a token
constexpr size_t kSharedBytes = kKeys * kHeadDim * sizeof(bf16);  // 36 KB

// All threads copy keys [begin, end) side by side.
__device__ inline void copy_keys(const Request& request, int begin, int end) {
  for (int i = threadIdx.x; i < (end - begin) * kPieces; i += kThreads) {
    const int key = i / kPieces;
    const int piece = i - key * kPieces;
    const bf16* token = request.token(begin + key);
    shared_memory[i] = reinterpret_cast<const uint4*>(token)[piece];
  }
}

__global__ void __launch_bounds__(kThreads) attend(const __grid_constant__ Call call) {
  const Request request(call, blockIdx.y);
  const int first_row = blockIdx.x * kRows;
  if (first_row >= request.rows) return;
  // a warp past the last row helps to copy; it repeats that row, and stores nothing
  const int wanted = first_row + threadIdx.x / kWarp;
  const int row = min(wanted, request.rows - 1);
  const int visible = request.visible(row);
  const int most_visible = request.visible(min(first_row + kRows, request.rows) - 1);

  const WarpRow query(request.query(row));
  OnlineRow online;
  const bf16* keys = reinterpret_cast<const bf16*>(shared_memory);
  for (int begin = 0; begin < most_visible; begin += kKeys) {
    __syncthreads();  // every warp is done with the tile before
    copy_keys(request, begin, min(begin + kKeys, most_visible));
    __syncthreads();  // the tile is there
    const int end = min(begin + kKeys, visible);
    for (int key = begin; key < end; ++key) {
      online.attend(query, WarpRow(keys + (key - begin) * kHeadDim), call.scale_log2);
    }
  }
  if (row == wanted) online.store(request, row);
}

inline cudaError_t run(const Call& call, cudaStream_t stream) {
  const unsigned batch = call.batch;
  const Shape shape{dim3(ceil_div(call.max_rows, kRows), batch), kThreads, kSharedBytes};
  return launch(shape, stream, attend, call);
}

}  // namespace mla::ladder::step3
