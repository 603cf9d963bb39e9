// Step 2, one pass: the online softmax, so that a row walks its keys once.
//
// A running maximum m, a running sum l and a running output o; key after key
//
//   m' = max(m, s)     f = exp2(m - m')     w = exp2(s - m')
//   l' = f l + w       o' = f o + w v
//
// (Milakov and Gimelshein, arXiv:1805.02867.) No score leaves the registers, so that the scratch of
// step 1, 4 bytes a row and key written once and read five times, is gone, and so are two launches.
// In MLA the value is the first 512 columns of the key: what a lane loaded for the score is what it
// needs for the output. The token is read once, not twice.
//
// One warp a row. The row's three parts follow each other key by key, so that a single warp is
// slow; many warps of an SM hide that.
#pragma once

#include "ladder/launch.cuh"
#include "ladder/warp_row.cuh"

namespace mla::ladder::step2 {

constexpr int kWarps = 4;

// One row on its way through the keys; every lane holds max and sum, and 16 columns of out.
struct OnlineRow {
  float max = -INFINITY;
  float sum = 0.0f;
  float out[kLaneLatent] = {};

  __device__ void attend(const WarpRow& query, const WarpRow& key, float scale_log2) {
    const float score = query.dot(key) * scale_log2;
    const float larger = fmaxf(max, score);
    const float factor = exp2f(max - larger);  // 0 at the first key
    const float weight = exp2f(score - larger);
    max = larger;
    sum = sum * factor + weight;
#pragma unroll
    for (int i = 0; i < kLaneLatent; ++i) out[i] = out[i] * factor + weight * key.value[i];
  }

  // A row without a key leaves out 0 and lse -inf.
  __device__ void store(const Request& request, int row) {
    const float factor = sum > 0.0f ? request.call.out_scale / sum : 0.0f;
#pragma unroll
    for (int i = 0; i < kLaneLatent; ++i) out[i] *= factor;
    uint4* pieces = reinterpret_cast<uint4*>(request.out(row));
    pieces[lane_id()] = pack8(out);
    pieces[kWarp + lane_id()] = pack8(out + 8);
    if (lane_id() == 0) request.call.lse[request.first_row + row] = natural_lse(max, sum);
  }
};

__global__ void attend(const __grid_constant__ Call call) {
  const Request request(call, blockIdx.y);
  const int row = blockIdx.x * kWarps + threadIdx.x / kWarp;
  if (row >= request.rows) return;
  const WarpRow query(request.query(row));
  OnlineRow online;
  const int visible = request.visible(row);
  for (int key = 0; key < visible; ++key) {
    online.attend(query, WarpRow(request.token(key)), call.scale_log2);
  }
  online.store(request, row);
}

inline cudaError_t run(const Call& call, cudaStream_t stream) {
  const unsigned batch = call.batch;
  const Shape shape{dim3(ceil_div(call.max_rows, kWarps), batch), kWarps * kWarp};
  return launch(shape, stream, attend, call);
}

}  // namespace mla::ladder::step2
