// What one CTA does: rows of one request and KV head, and a piece of the keys they see.
#pragma once

#include "xqa/config.h"

namespace mla::xqa {

constexpr int kMaskWordBits = 16;

struct Work {
  int request, kv_head, group, split;
  int pieces;              // of the row tile's keys; 0: its results are NaN
  int first_query;         // token of the batch
  int q_len, prefix;       // prefix: keys before the first new token; negative where q_len > kv_len
  int first_row, rows;     // rows of this tile; row = token * group + head of the group
  int first_key, end_key;  // keys that some row of the tile may see
  int begin, end;          // this piece's tiles of keys
  int slot, counter;

  // False where there is nothing to do, not even rows without keys. Of a request that lies outside
  // of the call's tensors one CTA a row tile writes NaN to the rows that it has inside: its offsets
  // fall or leave [0, total_q], its length is beyond its row of the block table, or it has more
  // query tokens than a row of its mask has columns.
  __device__ bool find(const Params& p) {
    request = blockIdx.z;
    split = blockIdx.x;
    group = p.heads / p.kv_heads;
    kv_head = blockIdx.y % p.kv_heads;
    first_row = blockIdx.y / p.kv_heads * Config::kRows;
    const int begin = p.q_begin ? p.q_begin[request] : request * p.q_len;
    const int end = p.q_begin ? p.q_begin[request + 1] : begin + p.q_len;
    const int kv_len = p.seq_lens[request];
    first_query = max(0, min(begin, p.total_q));
    q_len = max(0, min(end, p.total_q)) - first_query;
    rows = min(q_len * group - first_row, Config::kRows);
    if (rows <= 0) return false;
    if (begin != first_query || end - begin != q_len || kv_len > p.max_pages << p.page_shift ||
        (p.mask && q_len > kMaskWordBits * p.mask_words)) {
      pieces = 0;
      return split == 0;
    }
    prefix = kv_len - q_len;
    end_key = p.mask ? kv_len : prefix + token(rows - 1) + 1;
    end_key = max(0, min(kv_len, end_key));
    first_key = p.window_left < 0 ? 0 : max(0, prefix + token(0) - p.window_left);
    return cut(p);
  }

  // Token of the request that a row of this tile belongs to.
  __device__ int token(int row) const { return (first_row + row) / group; }
  __device__ int head(int row) const { return kv_head * group + (first_row + row) % group; }
  // Row of out and lse.
  __device__ int64_t result(const Params& p, int row) const {
    return static_cast<int64_t>(first_query + token(row)) * p.heads + head(row);
  }

 private:
  __device__ bool cut(const Params& p) {
    const int first_tile = first_key / Config::kTile;
    const int tiles = max(0, (end_key + Config::kTile - 1) / Config::kTile - first_tile);
    const int wanted = (tiles * Config::kTile + p.split_tokens - 1) / p.split_tokens;
    pieces = max(1, min(wanted, p.max_splits));
    if (split >= pieces) return false;
    begin = first_tile + part(tiles, split);
    end = first_tile + part(tiles, split + 1);
    counter = request * gridDim.y + blockIdx.y;
    slot = counter * p.max_splits;
    return true;
  }

  // tiles * i / pieces, without a product that needs 64 bits.
  __device__ int part(int tiles, int i) const {
    return tiles / pieces * i + tiles % pieces * i / pieces;
  }
};

}  // namespace mla::xqa
