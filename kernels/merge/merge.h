// Merge of split partials: parameters and launch. See merge.cu for the kernel.
#pragma once

#include <cuda_runtime_api.h>

#include "abi/words.h"

namespace mla::merge {

enum class OutType : int32_t { kBf16, kFp16, kFp32 };

constexpr int kLatent = 512;

struct Params {
  const float* partial_out;      // [slots, tile_rows, 512]
  const float* partial_lse;      // [slots, tile_rows], base e, without the sink
  const MergeItem* merge_items;  // [groups]
  const int32_t* q_begin;        // [batch + 1], query tokens before each request
  const float* sinks;            // [heads], or null
  void* out;                     // [total_q * heads, 512]
  float* lse;                    // [total_q * heads], or null
  int32_t groups;
  int32_t tile_rows;
  int32_t heads;
  float out_scale;
  const float* scale;  // [1], in place of out_scale, or null
  float lse_scale;     // 1 for the natural log, log2(e) for base 2
  OutType out_type;
  bool programmatic_launch;  // may start while the kernel before it drains
};

// Enqueues the merge on `stream`; returns cudaGetLastError's value.
cudaError_t launch(const Params& params, cudaStream_t stream);

}  // namespace mla::merge
