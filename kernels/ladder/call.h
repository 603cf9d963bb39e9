// One decode call as every step of the ladder takes it.
//
// A row is one head of one query token: row = token * heads + head within its request. A cached
// token is 576 numbers, all of them its key, the first 512 its value. Causal, bottom-right: the
// last token of a request sees all of its keys, the one before it one less.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime_api.h>

#include <cstdint>

namespace mla::ladder {

using bf16 = __nv_bfloat16;

constexpr int kHeadDim = 576;
constexpr int kLatent = 512;

struct Call {
  const bf16* query;           // [total_q * heads, 576]
  const bf16* cache;           // [pages, page_size, 576]; pages may lie apart
  const int32_t* block_table;  // [batch, max_pages], rows may lie apart
  const int32_t* seq_lens;     // [batch]
  const int32_t* q_begin;      // [batch + 1], query tokens before each request
  bf16* out;                   // [total_q * heads, 512]
  float* lse;                  // [total_q * heads], natural log
  float* scratch;              // of scratch_floats(step, call) elements
  int64_t page_stride;         // elements
  int64_t table_stride;        // elements
  int32_t page_size;
  int32_t batch;
  int32_t heads;
  int32_t total_rows;  // total_q * heads
  int32_t max_rows;    // of one request
  int32_t max_kv;      // bound of seq_lens
  int32_t num_splits;  // pieces of a request's keys, where a step has them
  float scale_log2;    // softmax scale * log2(e)
  float out_scale;
};

// Elements of fp32 scratch that a step needs for a call.
int64_t scratch_floats(int step, const Call& call);

// Enqueues a step, 0 to kSteps - 1, on `stream`.
constexpr int kSteps = 10;
cudaError_t run(int step, const Call& call, cudaStream_t stream);

}  // namespace mla::ladder
