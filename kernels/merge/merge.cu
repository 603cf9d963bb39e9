// Merge of split partials, in split order.
//
// out = sum_i w_i partial_out_i / sum_i w_i, with w_i = exp(lse_i - max lse), and the sink's
// term in the denominator alone: a factor 1 / (1 + exp(sink - lse)).
//
// One block of 128 threads merges one query row: four latent columns a thread, so that a split is
// one 2 KB read. The splits are added one after another whatever their number (a row's bits depend
// on its own partials alone), with kInFlight of them loaded ahead: at 2 KB a row and split, 16
// loads of 16 bytes a thread hide the latency of L2 where there are few rows and many splits.
// The weights are computed by every warp for itself, a lane a split.
//
// A partial without keys has lse -inf and is skipped, whatever its out holds.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cmath>

#include "merge/merge.h"

namespace mla::merge {
namespace {

constexpr int kThreads = kLatent / 4;
constexpr int kLanes = 32;
constexpr int kInFlight = 8;
constexpr unsigned kAllLanes = 0xffffffffu;

__device__ float warp_max(float value) {
  for (int step = kLanes / 2; step > 0; step /= 2) {
    value = fmaxf(value, __shfl_xor_sync(kAllLanes, value, step));
  }
  return value;
}

__device__ float warp_sum(float value) {
  for (int step = kLanes / 2; step > 0; step /= 2) {
    value += __shfl_xor_sync(kAllLanes, value, step);
  }
  return value;
}

__device__ void store4(float* at, float4 v) { *reinterpret_cast<float4*>(at) = v; }

__device__ void store4(__nv_bfloat16* at, float4 v) {
  __nv_bfloat162 pair[2] = {__floats2bfloat162_rn(v.x, v.y), __floats2bfloat162_rn(v.z, v.w)};
  *reinterpret_cast<uint2*>(at) = *reinterpret_cast<uint2*>(pair);
}

__device__ void store4(__half* at, float4 v) {
  __half2 pair[2] = {__floats2half2_rn(v.x, v.y), __floats2half2_rn(v.z, v.w)};
  *reinterpret_cast<uint2*>(at) = *reinterpret_cast<uint2*>(pair);
}

// The lse values of one row, one a split, and their common maximum and sum of weights.
struct Weights {
  const float* lse;  // of split 0; split i is `stride` floats further
  int64_t stride;
  int splits;
  float max;
  float sum;

  __device__ Weights(const float* first, int64_t stride, int splits)
      : lse(first), stride(stride), splits(splits) {
    const int lane = threadIdx.x % kLanes;
    float largest = -INFINITY;
    for (int i = lane; i < splits; i += kLanes) largest = fmaxf(largest, at(i));
    max = warp_max(largest);
    float total = 0.0f;
    for (int i = lane; i < splits; i += kLanes) total += weight(i);
    sum = warp_sum(total);
  }

  __device__ float at(int i) const { return __ldcg(lse + i * stride); }
  // 0 for an empty partial; with only empty ones max is -inf too, and nothing is subtracted
  __device__ float weight(int i) const {
    const float value = at(i);
    return value == -INFINITY ? 0.0f : __expf(value - max);
  }
};

__device__ void add(float4& total, float weight, float4 part) {
  if (weight != 0.0f) {
    total.x += weight * part.x;
    total.y += weight * part.y;
    total.z += weight * part.z;
    total.w += weight * part.w;
  }
}

// Sum over the splits, in their order, of this thread's four columns.
__device__ float4 weighted_sum(const float* first, int64_t stride, const Weights& weights) {
  const int lane = threadIdx.x % kLanes;
  float4 total = {0.0f, 0.0f, 0.0f, 0.0f};
  for (int chunk = 0; chunk < weights.splits; chunk += kLanes) {
    const float mine = chunk + lane < weights.splits ? weights.weight(chunk + lane) : 0.0f;
    const int in_chunk = min(kLanes, weights.splits - chunk);
    for (int i = 0; i < in_chunk; i += kInFlight) {
      float4 part[kInFlight];
#pragma unroll
      for (int j = 0; j < kInFlight; ++j) {
        const float* from = first + (chunk + min(i + j, in_chunk - 1)) * stride;
        part[j] = __ldcg(reinterpret_cast<const float4*>(from));
      }
#pragma unroll
      for (int j = 0; j < kInFlight; ++j) {
        // lanes past the last split hold weight 0
        add(total, __shfl_sync(kAllLanes, mine, (i + j) % kLanes), part[j]);
      }
    }
  }
  return total;
}

template <class Out>
__global__ void __launch_bounds__(kThreads) merge_rows(const __grid_constant__ Params p) {
#if __CUDA_ARCH__ >= 900
  cudaGridDependencySynchronize();
#endif
  const MergeItem item = p.merge_items[blockIdx.y];
  if (item.num_splits == 0) return;
  const int row_in_tile = blockIdx.x;
  const int row_in_request = item.row_tile * p.tile_rows + row_in_tile;
  const int first_token = p.q_begin[item.request];
  const int rows = (p.q_begin[item.request + 1] - first_token) * p.heads;
  if (row_in_request >= rows) return;

  const int64_t first = static_cast<int64_t>(item.first_slot) * p.tile_rows + row_in_tile;
  const Weights weights(p.partial_lse + first, p.tile_rows, item.num_splits);
  const int column = threadIdx.x * 4;
  const float* partial = p.partial_out + first * kLatent + column;
  float4 out = weighted_sum(partial, static_cast<int64_t>(p.tile_rows) * kLatent, weights);

  const bool has_keys = weights.sum > 0.0f;
  const float lse = has_keys ? weights.max + logf(weights.sum) : -INFINITY;
  const float out_scale = p.scale != nullptr ? *p.scale : p.out_scale;
  float factor = has_keys ? out_scale / weights.sum : 0.0f;
  if (p.sinks != nullptr && has_keys) {
    factor /= 1.0f + expf(p.sinks[row_in_request % p.heads] - lse);
  }
  out = {out.x * factor, out.y * factor, out.z * factor, out.w * factor};

  const int64_t row = static_cast<int64_t>(first_token) * p.heads + row_in_request;
  store4(static_cast<Out*>(p.out) + row * kLatent + column, out);
  if (p.lse != nullptr && threadIdx.x == 0) p.lse[row] = lse * p.lse_scale;
}

template <class Out>
cudaError_t launch_as(const Params& params, cudaStream_t stream) {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = params.programmatic_launch;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(params.tile_rows, params.groups);
  config.blockDim = dim3(kThreads);
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, merge_rows<Out>, params);
}

}  // namespace

cudaError_t launch(const Params& params, cudaStream_t stream) {
  if (params.groups == 0) return cudaSuccess;
  switch (params.out_type) {
    case OutType::kBf16:
      return launch_as<__nv_bfloat16>(params, stream);
    case OutType::kFp16:
      return launch_as<__half>(params, stream);
    case OutType::kFp32:
      return launch_as<float>(params, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace mla::merge
