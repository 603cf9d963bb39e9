// From accumulators to results: teams are merged in shared memory, pieces of a split row tile by
// their CTAs together where these are a cluster, else through the workspace by the CTA that
// arrives last. All add in a fixed order and by the same arithmetic, so equal calls give equal
// bits.
#pragma once

#include <cuda_bf16.h>

#include "xqa/cluster.h"
#include "xqa/values.h"

namespace mla::xqa {

constexpr float kLn2 = 0.6931471805599453f;
constexpr float kLog2E = 1.4426950408889634f;
constexpr unsigned kAllLanes = 0xffffffffu;

// A team's row: maximum (scaled, base 2), sums of its weights, exact and as they were rounded.
struct alignas(16) RowState {
  float max, sum, rounded;
};

// Shared memory while results are put together: the stages' room is free by then.
struct Bench {
  // floats; the rows that lanes of a quarter warp (of a half, two floats each) store are in other
  // banks then
  static constexpr int kPitch = Config::kVDim + (Config::kBytes ? 16 : 8);
  static constexpr int kTeamFloats = 16 * kPitch;
  static constexpr int kBytes = Config::kTeams * kTeamFloats * 4;
  static_assert(kBytes <= Config::kTeams * Config::kStages * Config::kStageBytes);
  static_assert(kBytes >= Config::kRows * kMaxSplits * 4, "weights of all pieces");

  float* out;       // [teams][16 rows][kPitch]
  RowState* state;  // [teams][kRows]
  float* lse;       // [16], of rows that other CTAs of a cluster read
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

// NaN in place of every result of the row tile.
__device__ inline void put_nan(const Params& p, const Work& work) {
  constexpr int kFloat4s = Config::kVDim / 4;
#pragma unroll 1
  for (int at = threadIdx.x; at < work.rows * kFloat4s; at += Config::kThreads) {
    const int64_t row = work.result(p, at / kFloat4s);
    store4(p, row * Config::kVDim + at % kFloat4s * 4, make_float4(NAN, NAN, NAN, NAN));
    if (at % kFloat4s == 0 && p.lse != nullptr) p.lse[row] = NAN;
  }
}

struct Finish {
  static constexpr int kWarps = Config::kTeam * Config::kTeams;
  static constexpr int kFloat4s = Config::kVDim / 4;
  static constexpr int kOfLane = (kFloat4s + kLanes - 1) / kLanes;  // float4s of a row

  // A result by one warp: lane l has float4s l, l + 32, ...
  struct Row {
    float lse;
    float4 v[kOfLane];
  };

  const Params& p;
  const Work& work;
  float scale;  // of scores
  int warp = threadIdx.x / kLanes, lane = threadIdx.x % kLanes;

  __device__ void result(const Output& output, const Softmax& softmax, const Team& team,
                         const Bench& bench) const {
    const bool whole = work.pieces == 1, together = !whole && cluster_size() > 1;
    put_state(output, softmax, team, bench.state + team.idx * Config::kRows);
#pragma unroll
    for (int m = 0; m < Config::kMTiles; ++m) {
      if (m > 0) __syncthreads();
      put_rows(output.out[m], team.warp, bench.out + team.idx * Bench::kTeamFloats);
      __syncthreads();
#pragma unroll 2
      for (int row = warp; row < 16 && m * 16 + row < work.rows; row += kWarps) {
        Row result = teams_row(bench, m * 16 + row);
        if (whole) {
          multiply(result, final_factor(m * 16 + row, result.lse));
          put(m * 16 + row, result);
        } else if (together) {
          show(row, result, bench);
        } else {
          put_piece(m * 16 + row, result);
        }
      }
      if (together) merge_cluster(m * 16, bench);
    }
    if (whole || together || !arrives_last(reinterpret_cast<int*>(bench.out))) return;
    __syncthreads();
    weigh_pieces(bench.out);
    __syncthreads();
    add_pieces(bench.out);
  }

 private:
  __device__ void put_state(const Output& output, const Softmax& softmax, const Team& team,
                            RowState* state) const {
#pragma unroll
    for (int m = 0; m < Config::kMTiles; ++m) {
#pragma unroll
      for (int below = 0; below < 2; ++below) {
        const float sum = softmax.row_sum(m, below);
        if (team.warp == 0 && lane % 4 == 0) {
          const float rounded = output.sum[m][2 * below];
          state[m * 16 + lane / 4 + 8 * below] = {softmax.max[m][below] * scale, sum, rounded};
        }
      }
    }
  }

  __device__ void put_rows(const Accumulator (&out)[Config::kColumns][2], int warp_of_team,
                           float* to) const {
    to += lane / 4 * Bench::kPitch + warp_of_team * Config::kColumns * 16;
#pragma unroll
    for (int n = 0; n < Config::kColumns; ++n) {
#pragma unroll
      for (int c = 0; c < 4; c += 2) {  // row g, then g + 8
        float* at = to + c / 2 * 8 * Bench::kPitch + n * 16;
        const Accumulator &a = out[n][0], &b = out[n][1];
        if constexpr (Config::kBytes) {  // both have columns of the same four
          *reinterpret_cast<float4*>(at + Output::column(0, 0)) =
              make_float4(a[c], b[c], a[c + 1], b[c + 1]);
        } else {
          *reinterpret_cast<float2*>(at + Output::column(0, 0)) = make_float2(a[c], a[c + 1]);
          *reinterpret_cast<float2*>(at + Output::column(1, 0)) = make_float2(b[c], b[c + 1]);
        }
      }
    }
  }

  // The sum over teams, divided by the sum of weights.
  __device__ Row teams_row(const Bench& bench, int row) const {
    const RowState* state = bench.state + row;
    float most = -INFINITY;
#pragma unroll
    for (int i = 0; i < Config::kTeams; ++i) most = fmaxf(most, state[i * Config::kRows].max);
    Row total{};
    float sum = 0.0f, rounded = 0.0f;
#pragma unroll
    for (int i = 0; i < Config::kTeams; ++i) {
      const RowState part = state[i * Config::kRows];
      const float weight = part.max == -INFINITY ? 0.0f : exp2_fast(part.max - most);
      sum += weight * part.sum;
      rounded += weight * part.rounded;
      const float* from = bench.out + i * Bench::kTeamFloats + row % 16 * Bench::kPitch;
      Row own;
      fetch(own, [&](int at) { return reinterpret_cast<const float4*>(from)[at]; });
      add(total, weight, own);
    }
    // weights that have all become 0, as by a scale of 1e10, are not those of a row without keys
    if (sum == 0.0f && most > -INFINITY) sum = NAN;
    total.lse = sum == 0.0f ? -INFINITY : logf(sum) + (most - kWeightShift) * kLn2;  // NaN stays
    multiply(total, sum == 0.0f ? 0.0f : 1.0f / rounded);
    return total;
  }

  // This lane's part of a row; 0 in lanes that have none.
  template <class Load>
  __device__ void fetch(Row& row, Load load) const {
#pragma unroll
    for (int j = 0; j < kOfLane; ++j) {
      const int at = lane + j * kLanes;
      row.v[j] = kFloat4s % kLanes == 0 || at < kFloat4s ? load(at) : float4{};
    }
  }

  __device__ static void add(Row& total, float weight, const Row& part) {
#pragma unroll
    for (int j = 0; j < kOfLane; ++j) {
      const float4 v = part.v[j];
      total.v[j].x += weight * v.x, total.v[j].y += weight * v.y;
      total.v[j].z += weight * v.z, total.v[j].w += weight * v.w;
    }
  }

  __device__ static void multiply(Row& row, float factor) {
#pragma unroll
    for (int j = 0; j < kOfLane; ++j) {
      row.v[j].x *= factor, row.v[j].y *= factor, row.v[j].z *= factor, row.v[j].w *= factor;
    }
  }

  template <class Store>
  __device__ void each(const Row& row, Store store) const {
#pragma unroll
    for (int j = 0; j < kOfLane; ++j) {
      const int at = lane + j * kLanes;
      if (kFloat4s % kLanes != 0 && at >= kFloat4s) break;
      store(at, row.v[j]);
    }
  }

  // A final row to out and lse.
  __device__ void put(int row, const Row& result) const {
    const int64_t to = work.result(p, row);
    each(result, [&](int at, float4 v) { store4(p, 4 * (to * kFloat4s + at), v); });
    if (lane == 0 && p.lse != nullptr) p.lse[to] = result.lse * p.lse_scale;
  }

  // To this piece's slot of the workspace.
  __device__ void put_piece(int row, const Row& result) const {
    float4* to = partial_row(work.split, row);
    each(result, [&](int at, float4 v) { __stcg(to + at, v); });
    if (lane == 0) __stcg(p.partial_lse + row_of_piece(work.split, row), result.lse);
  }

  // Where the cluster reads it: in place of the first team's part, which this very lane has read.
  __device__ void show(int row, const Row& result, const Bench& bench) const {
    float4* to = reinterpret_cast<float4*>(bench.out + row * Bench::kPitch);
    each(result, [&](int at, float4 v) { to[at] = v; });
    if (lane == 0) bench.lse[row] = result.lse;
  }

  // 16 rows from `first`: each CTA puts the pieces of its share of them together.
  __device__ void merge_cluster(int first, const Bench& bench) const {
    meet_cluster();
#pragma unroll 1
    for (int row = work.split + warp * work.pieces; row < 16 && first + row < work.rows;
         row += kWarps * work.pieces) {
      const float lse = lane < work.pieces ? load_peer(bench.lse + row, lane) : -INFINITY;
      const float4* from = reinterpret_cast<const float4*>(bench.out + row * Bench::kPitch);
      Row part[kMaxCluster];  // all loads before the first use
#pragma unroll
      for (int i = 0; i < kMaxCluster; ++i) {
        if (i < work.pieces) fetch(part[i], [&](int at) { return load_peer(from + at, i); });
      }
      const float most = over_warp(lse, [](float a, float b) { return fmaxf(a, b); });
      float weight = piece_weight(lse, most);
      const float sum = over_warp(weight, [](float a, float b) { return a + b; });
      Row total{};
      total.lse = sum == 0.0f ? -INFINITY : most + logf(sum);
      weight *= sum > 0.0f ? final_factor(first + row, total.lse) / sum : 0.0f;
#pragma unroll
      for (int i = 0; i < kMaxCluster; ++i) {
        const float of_piece = __shfl_sync(kAllLanes, weight, i);
        if (i < work.pieces) add(total, of_piece, part[i]);
      }
      put(first + row, total);
    }
    meet_cluster();  // no CTA exits, or overwrites its rows, while another one reads them
  }

  __device__ static float piece_weight(float lse, float most) {
    return lse == -INFINITY ? 0.0f : exp2_fast((lse - most) * kLog2E);
  }

  // The output's scale and the sink, which is one more term of the denominator. A row without keys
  // has out 0, whatever the scale.
  __device__ float final_factor(int row, float lse) const {
    if (lse == -INFINITY) return 0.0f;
    const float factor = p.bmm2_scale ? *p.bmm2_scale : p.bmm2;
    if (p.sinks == nullptr) return factor;
    return factor / (1.0f + expf(p.sinks[work.head(row)] - lse));
  }

  __device__ int64_t row_of_piece(int piece, int row) const {
    return static_cast<int64_t>(work.slot + piece) * Config::kRows + row;
  }
  __device__ float4* partial_row(int piece, int row) const {
    return reinterpret_cast<float4*>(p.partial_out) + row_of_piece(piece, row) * kFloat4s;
  }

  __device__ bool arrives_last(int* is_last) const {
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
    return *is_last;
  }

  // What each piece's rows are multiplied by, [rows][pieces]; and the lse of the rows.
  __device__ void weigh_pieces(float* weights) const {
    constexpr int kOwn = (Config::kRows + kWarps - 1) / kWarps;  // rows of a warp
    float first[kOwn];  // lse of a row in piece `lane`: all loads before the first use
#pragma unroll
    for (int i = 0; i < kOwn; ++i) first[i] = piece_lse(lane, warp + i * kWarps);
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const int row = warp + i * kWarps;
      if (row >= work.rows) break;
      float most = first[i];
      for (int j = lane + kLanes; j < work.pieces; j += kLanes) {
        most = fmaxf(most, piece_lse(j, row));
      }
      most = over_warp(most, [](float a, float b) { return fmaxf(a, b); });
      float* own = weights + row * work.pieces;
      float sum = 0.0f;
      for (int j = lane; j < work.pieces; j += kLanes) {
        const float lse = j == lane ? first[i] : piece_lse(j, row);
        own[j] = piece_weight(lse, most);
        sum += own[j];
      }
      sum = over_warp(sum, [](float a, float b) { return a + b; });
      const float lse = sum == 0.0f ? -INFINITY : most + logf(sum);
      const float factor = sum > 0.0f ? final_factor(row, lse) / sum : 0.0f;
      for (int j = lane; j < work.pieces; j += kLanes) own[j] *= factor;
      if (lane == 0 && p.lse != nullptr) p.lse[work.result(p, row)] = lse * p.lse_scale;
    }
  }

  __device__ float piece_lse(int piece, int row) const {
    if (piece >= work.pieces || row >= work.rows) return -INFINITY;
    return __ldcg(p.partial_lse + row_of_piece(piece, row));
  }

  template <class Merge>
  __device__ static float over_warp(float value, Merge merge) {
#pragma unroll
    for (int step = kLanes / 2; step > 0; step /= 2) {
      value = merge(value, __shfl_xor_sync(kAllLanes, value, step));
    }
    return value;
  }

  // The sum over pieces, in their order. A thread has several float4s at once: loads in flight.
  __device__ void add_pieces(const float* weights) const {
    constexpr int kAtOnce = 8;
    const int count = work.rows * kFloat4s;
#pragma unroll 1
    for (int first = threadIdx.x; first < count; first += kAtOnce * Config::kThreads) {
      float4 total[kAtOnce] = {};
#pragma unroll 4
      for (int piece = 0; piece < work.pieces; ++piece) {
        const float4* from = partial_row(piece, 0);
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          const int at = min(first + i * Config::kThreads, count - 1);
          const float4 v = __ldcg(from + at);
          const float weight = weights[at / kFloat4s * work.pieces + piece];
          // a piece without keys: whatever lies in its slot
          if (weight != 0.0f) {
            total[i].x += weight * v.x, total[i].y += weight * v.y;
            total[i].z += weight * v.z, total[i].w += weight * v.w;
          }
        }
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int at = first + i * Config::kThreads;
        if (at >= count) break;
        const int64_t row = work.result(p, at / kFloat4s);
        store4(p, row * Config::kVDim + at % kFloat4s * 4, total[i]);
      }
    }
  }
};

}  // namespace mla::xqa
