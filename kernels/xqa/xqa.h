// XQA-style decode by warp-level mma: parameters and launch. See xqa.cu for the kernel.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace mla::xqa {

enum class Type : int32_t { kBf16, kFp16, kE4m3, kFp32 };

constexpr int32_t kMaxSplits = 128;

// A paged cache of keys or of values; strides in bytes. Page p of request b is
// table[b * Params::table_stride + p], token t of it at page * page_stride + t * token_stride.
struct Pages {
  const uint8_t* data;
  const int32_t* table;
  int64_t page_stride;
  int64_t token_stride;
  int64_t head_stride;
};

struct Params {
  const uint8_t* query;     // rows of qk_dim elements; strides in bytes
  int64_t query_token;      // from one query token to the next
  int64_t query_head;       // from one head to the next
  Pages keys;               // [pages][kv_heads][page_size], in any order of strides
  Pages values;             // read only where values are not a part of the keys
  int64_t table_stride;     // int32 words from one request's page ids to the next one's
  int32_t max_pages;        // page ids of a request
  int32_t page_shift;       // log2 of the page size
  const int32_t* seq_lens;  // [batch]
  const int32_t* q_begin;   // [batch + 1], query tokens before each request; null: q_len each
  const uint16_t* mask;     // [total_q, mask_words], bit c: the row sees draft column c; or null
  int32_t mask_words;
  const float* sinks;       // [heads], or null
  const float* bmm1_scale;  // on the device, or null
  const float* bmm2_scale;
  float bmm1;  // where the pointers are null
  float bmm2;
  float lse_scale;  // 1 for the natural log, log2(e) for base 2
  void* out;        // [total_q, heads, v_dim]
  Type out_type;
  float* lse;          // [total_q, heads], or null
  float* partial_out;  // [groups, max_splits, tile_rows, v_dim], normalised
  float* partial_lse;  // [groups, max_splits, tile_rows], base e, without the sink
  int32_t* counters;   // [groups], zero between launches
  int32_t batch;
  int32_t total_q;  // query tokens of all requests
  int32_t heads;
  int32_t kv_heads;
  int32_t q_len;        // the greatest of the batch
  int32_t window_left;  // keys that a token sees before its own; -1: all
  int32_t max_splits;
  int32_t split_tokens;  // keys of a piece, as long as max_splits are enough
  bool programmatic_launch;
};

// Enqueues the kernel on `stream`; returns cudaGetLastError's value.
cudaError_t launch(const Params& params, cudaStream_t stream);

// CTAs that one SM of the current device holds.
cudaError_t occupancy(int32_t* ctas);

}  // namespace mla::xqa
