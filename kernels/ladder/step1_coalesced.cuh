// Step 1, coalesced: a warp reads a row together, 16 bytes a lane.
//
// The kernels are those of step 0, with work given to threads in another way:
//
//   scores   warp = (row, 32 keys)      the query row stays in registers; a key is read by all
//                                       lanes at once, and the lanes' sums meet by shuffles
//   softmax  warp = row                 lane i takes keys i, i + 32, ...
//   values   thread = (row, 8 columns)  16 bytes of a key at a time
//
// A load of 512 bytes now touches 16 sectors, all of them used, where step 0 touched 32 for 64.
#pragma once

#include "ladder/step0_formula.cuh"
#include "ladder/warp_row.cuh"

namespace mla::ladder::step1 {

using step0::scores_of;

constexpr int kWarps = 4;
constexpr int kThreads = kWarps * kWarp;
constexpr int kKeysPerWarp = kWarp;  // so that each lane stores one score
constexpr int kColumns = 8;          // of a thread in `values`

__global__ void scores(const __grid_constant__ Call call) {
  const Request request(call, blockIdx.z);
  const int row = blockIdx.y;
  if (row >= request.rows) return;
  const int visible = request.visible(row);
  const int begin = (blockIdx.x * kWarps + threadIdx.x / kWarp) * kKeysPerWarp;
  const int end = min(begin + kKeysPerWarp, visible);
  if (begin >= end) return;
  const WarpRow q(request.query(row));
  float own = 0.0f;
  for (int key = begin; key < end; ++key) {
    const float score = q.dot(WarpRow(request.token(key)));
    if (key - begin == lane_id()) own = score;
  }
  const int key = begin + lane_id();
  if (key < end) scores_of(call, request, row)[key] = own * call.scale_log2;
}

__global__ void softmax(const __grid_constant__ Call call) {
  const Request request(call, blockIdx.y);
  const int row = blockIdx.x * kWarps + threadIdx.x / kWarp;
  if (row >= request.rows) return;
  const int visible = request.visible(row);
  float* score = scores_of(call, request, row);
  float max = -INFINITY;
  for (int key = lane_id(); key < visible; key += kWarp) max = fmaxf(max, score[key]);
  max = warp_max(max);
  float sum = 0.0f;
  for (int key = lane_id(); key < visible; key += kWarp) sum += exp2f(score[key] - max);
  sum = warp_sum(sum);
  const float inverse = 1.0f / sum;
  for (int key = lane_id(); key < visible; key += kWarp) {
    score[key] = exp2f(score[key] - max) * inverse;
  }
  if (lane_id() == 0) call.lse[request.first_row + row] = natural_lse(max, sum);
}

__global__ void values(const __grid_constant__ Call call) {
  const Request request(call, blockIdx.z);
  const int row = blockIdx.y;
  if (row >= request.rows) return;
  const int visible = request.visible(row);
  const float* weight = scores_of(call, request, row);
  float sum[kColumns] = {};
  for (int key = 0; key < visible; ++key) {
    float value[kColumns];
    unpack8(reinterpret_cast<const uint4*>(request.token(key))[threadIdx.x], value);
#pragma unroll
    for (int i = 0; i < kColumns; ++i) sum[i] += weight[key] * value[i];
  }
#pragma unroll
  for (int i = 0; i < kColumns; ++i) sum[i] *= call.out_scale;
  reinterpret_cast<uint4*>(request.out(row))[threadIdx.x] = pack8(sum);
}

inline cudaError_t run(const Call& call, cudaStream_t stream) {
  const unsigned rows = call.max_rows, batch = call.batch;
  const int keys = kWarps * kKeysPerWarp;
  const Shape all_scores{dim3(ceil_div(call.max_kv, keys), rows, batch), kThreads};
  const Shape all_rows{dim3(ceil_div(call.max_rows, kWarps), batch), kThreads};
  const Shape all_values{dim3(1, rows, batch), kLatent / kColumns};
  cudaError_t error = launch(all_scores, stream, scores, call);
  if (error == cudaSuccess) error = launch(all_rows, stream, softmax, call);
  if (error == cudaSuccess) error = launch(all_values, stream, values, call);
  return error;
}

}  // namespace mla::ladder::step1
