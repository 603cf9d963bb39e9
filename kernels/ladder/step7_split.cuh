// Step 7, split-kv: several blocks share the keys of one row tile; their partials are merged.
//
// A block a row tile leaves most of the card idle when there are few requests: one request of 128
// heads is 2 blocks for 132 SMs. Each row tile's keys are cut into `num_splits` pieces. A piece's
// result is a softmax over its own keys, out_i and lse_i; the whole is
//
//   lse = log sum_i exp(lse_i)      out = sum_i exp(lse_i - lse) out_i
//
// ("Flash-Decoding for long-context inference", Dao, Haziza, Massa, Sizov, 2023.) Partials travel
// in fp32 through global memory, 2 KB a row and piece, and the merge is a second launch. A call
// with one piece has neither.
#pragma once

#include "ladder/step6_cp_async.cuh"

namespace mla::ladder::step7 {

using step5::Swizzled;

constexpr int kMergeWarps = 4;

// In the call's scratch: partial results [num_splits, total_rows, 512], then their lse in base 2
// [num_splits, total_rows].
struct Partials {
  float* out;
  float* lse_log2;

  __device__ explicit Partials(const Call& call)
      : out(call.scratch),
        lse_log2(call.scratch + int64_t{call.num_splits} * call.total_rows * kLatent) {}
};

inline int64_t scratch_floats(const Call& call) {
  return call.num_splits > 1 ? int64_t{call.num_splits} * call.total_rows * (kLatent + 1) : 0;
}

template <class Tile>
__device__ void store_partial(Tile& tile, const Request& request, int split) {
  const Call& call = request.call;
  const Partials partials(call);
  const int64_t first = int64_t{split} * call.total_rows + request.first_row;
  tile.finish(
      [&](int row, int column, float2 pair) {
        *reinterpret_cast<float2*>(partials.out + (first + row) * kLatent + column) = pair;
      },
      [&](int row, float max_log2, float total) {
        partials.lse_log2[first + row] = total == 0.0f ? -INFINITY : max_log2 + log2f(total);
      });
}

template <int kDown, class Fetch>
__global__ void __launch_bounds__(kTileThreads, 1) attend(const __grid_constant__ Call call) {
  const Request request(call, blockIdx.y);
  const int first_row = blockIdx.x * kTileRows;
  if (first_row >= request.rows) return;
  const int last_row = min(first_row + kTileRows, request.rows) - 1;
  const int visible = request.visible(last_row);
  const int tiles = (visible + kTileKeys - 1) / kTileKeys;
  const int split = blockIdx.z;
  const int begin = static_cast<int>(int64_t{tiles} * split / call.num_splits) * kTileKeys;
  const int end = static_cast<int>(int64_t{tiles} * (split + 1) / call.num_splits) * kTileKeys;

  const Memory memory(step6::kStages);
  RowTile<Swizzled, kDown> tile(request, memory, first_row);
  step6::walk<Fetch>(tile, memory, begin, min(end, visible));
  if (call.num_splits == 1) {
    tile.store_result();
  } else {
    store_partial(tile, request, split);
  }
}

// One warp a row, its splits in their order.
__global__ void merge(const __grid_constant__ Call call) {
  const int row = blockIdx.x * kMergeWarps + threadIdx.x / kWarp;
  if (row >= call.total_rows) return;
  const Partials partials(call);
  float max = -INFINITY;
  for (int i = 0; i < call.num_splits; ++i) {
    max = fmaxf(max, partials.lse_log2[int64_t{i} * call.total_rows + row]);
  }
  float sum = 0.0f;
  float out[kLaneLatent] = {};
  for (int i = 0; i < call.num_splits; ++i) {
    const int64_t at = int64_t{i} * call.total_rows + row;
    const float lse = partials.lse_log2[at];
    const float weight = lse == -INFINITY ? 0.0f : exp2f(lse - max);
    sum += weight;
    const float* part = partials.out + at * kLatent + lane_id() * kLaneLatent;
#pragma unroll
    for (int c = 0; c < kLaneLatent; ++c) out[c] += weight * part[c];
  }
  const float factor = sum > 0.0f ? call.out_scale / sum : 0.0f;
#pragma unroll
  for (int c = 0; c < kLaneLatent; ++c) out[c] *= factor;
  uint4* pieces = reinterpret_cast<uint4*>(call.out + int64_t{row} * kLatent) + 2 * lane_id();
  pieces[0] = pack8(out);
  pieces[1] = pack8(out + 8);
  if (lane_id() == 0) call.lse[row] = natural_lse(max, sum);
}

template <int kDown, class Fetch = step6::Fetch>
cudaError_t run(const Call& call, cudaStream_t stream) {
  const unsigned batch = call.batch, splits = call.num_splits;
  const Shape pieces{dim3(ceil_div(call.max_rows, kTileRows), batch, splits), kTileThreads,
                     Memory::bytes(step6::kStages)};
  const Shape rows{dim3(ceil_div(call.total_rows, kMergeWarps)), kMergeWarps * kWarp};
  cudaError_t error = launch(pieces, stream, attend<kDown, Fetch>, call);
  if (error == cudaSuccess && splits > 1) error = launch(rows, stream, merge, call);
  return error;
}

}  // namespace mla::ladder::step7
