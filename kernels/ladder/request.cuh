// What every step needs of a row: where it lies, which keys it sees, where they are.
#pragma once

#include <cmath>

#include "ladder/call.h"

namespace mla::ladder {

constexpr int kWarp = 32;
constexpr float kLn2 = 0.693147180559945f;

// The rows of one request and their keys.
struct Request {
  const Call& call;
  const int32_t* pages;
  int first_row;  // of the call
  int rows;
  int q_len;
  int kv_len;

  __device__ Request(const Call& call, int index)
      : call(call),
        pages(call.block_table + index * call.table_stride),
        first_row(call.q_begin[index] * call.heads),
        q_len(call.q_begin[index + 1] - call.q_begin[index]),
        kv_len(min(call.seq_lens[index], call.max_kv)) {
    rows = q_len * call.heads;
  }

  // Keys that a row sees: those at positions 0 .. visible - 1.
  __device__ int visible(int row) const { return max(0, kv_len - q_len + row / call.heads + 1); }

  __device__ const bf16* query(int row) const {
    return call.query + static_cast<int64_t>(first_row + row) * kHeadDim;
  }

  // The cached token at a position below kv_len: only then does the block table name its page.
  __device__ const bf16* token(int position) const {
    const int page = position / call.page_size;
    const int slot = position - page * call.page_size;
    return call.cache + pages[page] * call.page_stride + static_cast<int64_t>(slot) * kHeadDim;
  }

  __device__ bf16* out(int row) const {
    return call.out + static_cast<int64_t>(first_row + row) * kLatent;
  }
};

__device__ inline float natural_lse(float max_log2, float sum) {
  return sum == 0.0f ? -INFINITY : (max_log2 + log2f(sum)) * kLn2;
}

}  // namespace mla::ladder
