// Step 0, the formula: scores, softmax, values. Three kernels, one thread a result.
//
//   scores   thread = (row, key)     s = scale * q . k
//   softmax  thread = row            w = exp2(s - max) / sum
//   values   thread = (row, column)  out = sum over keys of w * v
//
// Nothing is shared and nothing is kept: each thread fetches all that it needs from global memory,
// one number at a time. Scores and weights travel through global memory too, 4 bytes a row and key.
// Neighbouring threads of `scores` read neighbouring keys, 1152 bytes apart: a warp's load of 64
// bytes touches 32 sectors of 32 bytes.
#pragma once

#include "ladder/launch.cuh"

namespace mla::ladder::step0 {

constexpr int kThreads = 128;

// Scores of one row, [max_kv] in the call's scratch.
__device__ inline float* scores_of(const Call& call, const Request& request, int row) {
  return call.scratch + static_cast<int64_t>(request.first_row + row) * call.max_kv;
}

__global__ void scores(const __grid_constant__ Call call) {
  const Request request(call, blockIdx.z);
  const int row = blockIdx.y;
  const int key = blockIdx.x * kThreads + threadIdx.x;
  if (row >= request.rows || key >= request.visible(row)) return;
  const bf16* q = request.query(row);
  const bf16* k = request.token(key);
  float sum = 0.0f;
  for (int column = 0; column < kHeadDim; ++column) {
    sum += __bfloat162float(q[column]) * __bfloat162float(k[column]);
  }
  scores_of(call, request, row)[key] = sum * call.scale_log2;
}

__global__ void softmax(const __grid_constant__ Call call) {
  const Request request(call, blockIdx.y);
  const int row = blockIdx.x * kThreads + threadIdx.x;
  if (row >= request.rows) return;
  const int visible = request.visible(row);
  float* score = scores_of(call, request, row);
  float max = -INFINITY;
  for (int key = 0; key < visible; ++key) max = fmaxf(max, score[key]);
  float sum = 0.0f;
  for (int key = 0; key < visible; ++key) sum += exp2f(score[key] - max);
  for (int key = 0; key < visible; ++key) score[key] = exp2f(score[key] - max) / sum;
  call.lse[request.first_row + row] = natural_lse(max, sum);
}

__global__ void values(const __grid_constant__ Call call) {
  const Request request(call, blockIdx.z);
  const int row = blockIdx.y;
  const int column = blockIdx.x * kThreads + threadIdx.x;
  if (row >= request.rows) return;
  const int visible = request.visible(row);
  const float* weight = scores_of(call, request, row);
  float sum = 0.0f;
  for (int key = 0; key < visible; ++key) {
    sum += weight[key] * __bfloat162float(request.token(key)[column]);
  }
  request.out(row)[column] = __float2bfloat16(sum * call.out_scale);
}

inline int64_t scratch_floats(const Call& call) {
  return static_cast<int64_t>(call.total_rows) * call.max_kv;
}

inline cudaError_t run(const Call& call, cudaStream_t stream) {
  const unsigned rows = call.max_rows, batch = call.batch;
  const Shape all_scores{dim3(ceil_div(call.max_kv, kThreads), rows, batch), kThreads};
  const Shape all_rows{dim3(ceil_div(call.max_rows, kThreads), batch), kThreads};
  const Shape all_values{dim3(kLatent / kThreads, rows, batch), kThreads};
  cudaError_t error = launch(all_scores, stream, scores, call);
  if (error == cudaSuccess) error = launch(all_rows, stream, softmax, call);
  if (error == cudaSuccess) error = launch(all_values, stream, values, call);
  return error;
}

}  // namespace mla::ladder::step0
