// From accumulators to results: teams are merged in shared memory, pieces of a split row tile
// through the workspace by whoever arrives last. Both add in a fixed order, so equal calls give
// equal bits.
#pragma once

#include <cuda_bf16.h>

#include "xqa/values.h"

namespace mla::xqa {

constexpr float kLn2 = 0.6931471805599453f;
constexpr float kLog2E = 1.4426950408889634f;
constexpr unsigned kAllLanes = 0xffffffffu;

// Maximum (base 2, of scores) and sum (of weights) of a row.
struct alignas(8) RowState {
  float max, sum;
};

// Shared memory while results are put together: the stages' room is free by then.
struct Bench {
  static constexpr int kPitch = Config::kVDim + 8;  // floats; rows of a fragment in other banks
  static constexpr int kTeamFloats = 16 * kPitch;
  static constexpr int kBytes = Config::kTeams * kTeamFloats * 4;
  static_assert(kBytes <= Config::kTeams * Config::kStages * Config::kStageBytes);

  float* out;       // [teams][16 rows][kPitch]
  RowState* state;  // [teams][kRows]
};

// Four neighbouring columns in the result's type.
__device__ inline void store4(const Params& p, int64_t at, float4 v) {
  switch (p.out_type) {
    case Type::kBf16:
      static_cast<uint2*>(p.out)[at / 4] = make_uint2(bf16_pair(v.x, v.y), bf16_pair(v.z, v.w));
      return;
    case Type::kFp16:
      static_cast<uint2*>(p.out)[at / 4] = make_uint2(fp16_pair(v.x, v.y), fp16_pair(v.z, v.w));
      return;
    case Type::kE4m3:
      static_cast<uint32_t*>(p.out)[at / 4] = e4m3_pair(v.x, v.y) | e4m3_pair(v.z, v.w) << 16;
      return;
    case Type::kFp32:
      static_cast<float4*>(p.out)[at / 4] = v;
  }
}

struct Finish {
  static constexpr int kWarps = Config::kTeam * Config::kTeams;
  static constexpr int kFloat4s = Config::kVDim / 4;
  static constexpr int kOfLane = (kFloat4s + kLanes - 1) / kLanes;  // float4s of a row

  const Params& p;
  const Work& work;
  int warp = threadIdx.x / kLanes, lane = threadIdx.x % kLanes;

  __device__ void result(Output& output, const RowMax& max, const Team& team, const Bench& bench) {
    if (team.warp == 0 && lane % 4 == 0)
      put_state(output, max, bench.state + team.idx * Config::kRows);
#pragma unroll
    for (int m = 0; m < Config::kMTiles; ++m) {
      if (m > 0) __syncthreads();
      put_rows(output.out[m], team.warp, bench.out + team.idx * Bench::kTeamFloats);
      __syncthreads();
      for (int row = warp; row < 16 && m * 16 + row < work.rows; row += kWarps) {
        finish_row(bench, m * 16 + row);
      }
    }
    if (work.pieces > 1) merge_pieces(reinterpret_cast<int*>(bench.out));
  }

 private:
  __device__ void put_state(const Output& output, const RowMax& max, RowState* state) const {
#pragma unroll
    for (int m = 0; m < Config::kMTiles; ++m) {
#pragma unroll
      for (int below = 0; below < 2; ++below) {
        state[m * 16 + lane / 4 + 8 * below] = {max.value[m][below], output.sum[m][2 * below]};
      }
    }
  }

  __device__ void put_rows(const Accumulator (&out)[Config::kColumns][2], int warp_of_team,
                           float* to) const {
    to += lane / 4 * Bench::kPitch + warp_of_team * Config::kColumns * 16;
#pragma unroll
    for (int n = 0; n < Config::kColumns; ++n) {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const int half = i / 4, c = i % 4;
        to[c / 2 * 8 * Bench::kPitch + n * 16 + Output::column(half, c)] = out[n][half][c];
      }
    }
  }

  // One row by one warp: the sum over teams, divided by the sum of weights.
  __device__ void finish_row(const Bench& bench, int row) const {
    float most = -INFINITY;
#pragma unroll
    for (int i = 0; i < Config::kTeams; ++i) {
      most = fmaxf(most, bench.state[i * Config::kRows + row].max);
    }
    float weight[Config::kTeams], sum = 0.0f;
#pragma unroll
    for (int i = 0; i < Config::kTeams; ++i) {
      const RowState state = bench.state[i * Config::kRows + row];
      weight[i] = state.max == -INFINITY ? 0.0f : exp2_fast(state.max - most);
      sum += weight[i] * state.sum;
    }
    const bool has_keys = sum > 0.0f;
    const float lse = has_keys ? logf(sum) + (most - kWeightShift) * kLn2 : -INFINITY;
    const float factor = has_keys ? 1.0f / sum : 0.0f;
#pragma unroll
    for (int j = 0; j < kOfLane; ++j) {
      const int at = lane + j * kLanes;
      if (kFloat4s % kLanes != 0 && at >= kFloat4s) break;
      float4 v = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
      for (int i = 0; i < Config::kTeams; ++i) {
        const float* from = bench.out + i * Bench::kTeamFloats + row % 16 * Bench::kPitch;
        add(v, weight[i], reinterpret_cast<const float4*>(from)[at]);
      }
      v = {v.x * factor, v.y * factor, v.z * factor, v.w * factor};
      put(row, at, v, lse);
    }
    if (lane == 0) put_lse(row, lse);
  }

  __device__ static void add(float4& total, float weight, float4 v) {
    total.x += weight * v.x, total.y += weight * v.y;
    total.z += weight * v.z, total.w += weight * v.w;
  }

  __device__ void put(int row, int at, float4 v, float lse) const {
    if (work.pieces == 1) {
      put_final(row, at, v, lse);
    } else {
      const int64_t slot = static_cast<int64_t>(work.slot + work.split) * Config::kRows + row;
      __stcg(reinterpret_cast<float4*>(p.partial_out) + slot * kFloat4s + at, v);
    }
  }

  __device__ void put_lse(int row, float lse) const {
    if (work.pieces > 1) {
      const int64_t slot = static_cast<int64_t>(work.slot + work.split) * Config::kRows + row;
      __stcg(p.partial_lse + slot, lse);
    } else if (p.lse != nullptr) {
      p.lse[work.result(p, row)] = lse * p.lse_scale;
    }
  }

  // The output's scale and the sink, which is one more term of the denominator.
  __device__ void put_final(int row, int at, float4 v, float lse) const {
    float factor = p.bmm2_scale ? *p.bmm2_scale : p.bmm2;
    if (p.sinks != nullptr && lse != -INFINITY) {
      factor /= 1.0f + expf(p.sinks[work.head(row)] - lse);
    }
    v = {v.x * factor, v.y * factor, v.z * factor, v.w * factor};
    store4(p, work.result(p, row) * Config::kVDim + 4 * at, v);
  }

  __device__ void merge_pieces(int* is_last) const {
    __threadfence();  // this thread's partials, before the count
    __syncthreads();
    if (threadIdx.x == 0) {
      int* counter = p.counters + work.counter;
      const bool last = atomicAdd(counter, 1) == work.pieces - 1;
      if (last) *counter = 0;
      __threadfence();
      *is_last = last;
    }
    __syncthreads();
    if (!*is_last) return;
    for (int row = warp; row < work.rows; row += kWarps) merge_row(row);
  }

  // One row of all pieces, in their order; a lane holds the weight of every 32nd piece.
  __device__ void merge_row(int row) const {
    const int64_t first = static_cast<int64_t>(work.slot) * Config::kRows + row;
    const float* lses = p.partial_lse + first;
    float most = -INFINITY;
    for (int i = lane; i < work.pieces; i += kLanes)
      most = fmaxf(most, __ldcg(lses + i * Config::kRows));
    for (int step = kLanes / 2; step > 0; step /= 2) {
      most = fmaxf(most, __shfl_xor_sync(kAllLanes, most, step));
    }
    float4 total[kOfLane] = {};
    float sum = 0.0f;
    for (int chunk = 0; chunk < work.pieces; chunk += kLanes) {
      float mine = 0.0f;
      if (chunk + lane < work.pieces) {
        const float lse = __ldcg(lses + (chunk + lane) * Config::kRows);
        mine = lse == -INFINITY ? 0.0f : exp2_fast((lse - most) * kLog2E);
      }
      const int in_chunk = min(kLanes, work.pieces - chunk);
#pragma unroll 4
      for (int i = 0; i < in_chunk; ++i) {
        const float weight = __shfl_sync(kAllLanes, mine, i);
        sum += weight;
        const int64_t slot = first + static_cast<int64_t>(chunk + i) * Config::kRows;
        add_partial(total, weight, slot);
      }
    }
    const bool has_keys = sum > 0.0f;
    const float lse = has_keys ? most + logf(sum) : -INFINITY;
    const float factor = has_keys ? 1.0f / sum : 0.0f;
#pragma unroll
    for (int j = 0; j < kOfLane; ++j) {
      const int at = lane + j * kLanes;
      if (kFloat4s % kLanes != 0 && at >= kFloat4s) break;
      const float4 v = total[j];
      put_final(row, at, {v.x * factor, v.y * factor, v.z * factor, v.w * factor}, lse);
    }
    if (lane == 0 && p.lse != nullptr) p.lse[work.result(p, row)] = lse * p.lse_scale;
  }

  __device__ void add_partial(float4 (&total)[kOfLane], float weight, int64_t slot) const {
#pragma unroll
    for (int j = 0; j < kOfLane; ++j) {
      const int at = lane + j * kLanes;
      if (kFloat4s % kLanes != 0 && at >= kFloat4s) break;
      const float4* from = reinterpret_cast<const float4*>(p.partial_out) + slot * kFloat4s;
      add(total[j], weight, __ldcg(from + at));
    }
  }
};

}  // namespace mla::xqa
