// A query row or a cached token spread over a warp: 18 of its 576 numbers a lane.
//
// Lane i holds columns 8 i .. 8 i + 7 and 256 + 8 i .. 256 + 8 i + 7 of the latent part and columns
// 512 + 2 i, 513 + 2 i of the rope part: two loads of 16 bytes and one of 4, in each of which
// neighbouring lanes read neighbouring bytes.
#pragma once

#include "ladder/request.cuh"

namespace mla::ladder {

constexpr unsigned kAllLanes = 0xffffffffu;
constexpr int kLaneLatent = kLatent / kWarp;             // latent columns of a lane
constexpr int kLaneRope = (kHeadDim - kLatent) / kWarp;  // rope columns of a lane
constexpr int kLaneColumns = kLaneLatent + kLaneRope;

__device__ inline int lane_id() { return threadIdx.x % kWarp; }

__device__ inline float warp_sum(float value) {
  for (int step = kWarp / 2; step > 0; step /= 2) {
    value += __shfl_xor_sync(kAllLanes, value, step);
  }
  return value;
}

__device__ inline float warp_max(float value) {
  for (int step = kWarp / 2; step > 0; step /= 2) {
    value = fmaxf(value, __shfl_xor_sync(kAllLanes, value, step));
  }
  return value;
}

// Two bf16 in one word, the first in the low half.
__device__ inline float2 unpack(uint32_t pair) {
  return {__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u)};
}

__device__ inline uint32_t pack(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}

__device__ inline void unpack8(uint4 words, float* values) {
  const uint32_t word[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 pair = unpack(word[i]);
    values[2 * i] = pair.x;
    values[2 * i + 1] = pair.y;
  }
}

__device__ inline uint4 pack8(const float* values) {
  return {pack(values[0], values[1]), pack(values[2], values[3]), pack(values[4], values[5]),
          pack(values[6], values[7])};
}

struct WarpRow {
  float value[kLaneColumns];  // the latent columns first

  // `row` points to global or shared memory.
  __device__ explicit WarpRow(const bf16* row) {
    const int lane = lane_id();
    const uint4* pieces = reinterpret_cast<const uint4*>(row);
    unpack8(pieces[lane], value);
    unpack8(pieces[kWarp + lane], value + 8);
    const float2 rope = unpack(reinterpret_cast<const uint32_t*>(row + kLatent)[lane]);
    value[kLaneLatent] = rope.x;
    value[kLaneLatent + 1] = rope.y;
  }

  // The whole warp's dot product, in every lane.
  __device__ float dot(const WarpRow& other) const {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kLaneColumns; ++i) sum += value[i] * other.value[i];
    return warp_sum(sum);
  }
};

}  // namespace mla::ladder
