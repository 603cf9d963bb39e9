// What steps 4 to 9 do alike: 64 query rows of a block against one tile of 64 keys after another.
//
// Each tile has three parts.
//   scores   S[64 x 64] = Q K^T        36 k-steps of 16 columns, fp32 in registers
//   softmax  maxima across the warps that share rows; weights to shared memory as bf16
//   values   O[64 x 512] += W V        4 k-steps of 16 keys; V is the latent part of the same keys
// O stays in registers: 64 x 512 fp32 over 256 threads are 128 a thread.
//
// What the steps change are the two parameters: the Layout of rows in shared memory and the grid of
// warps. kDown warps share out the rows, kAcross the keys (in scores) and latent columns (in
// values).
#pragma once

#include "ladder/tensor_core.cuh"
#include "ladder/tile_memory.cuh"
#include "ladder/warp_row.cuh"

namespace mla::ladder {

template <class Layout, int kDown>
struct RowTile {
  static constexpr int kAcross = kTileWarps / kDown;
  static constexpr int kM = kTileRows / kDown / 16;  // 16-row pieces of a warp
  static constexpr int kKeys = kTileKeys / kAcross;  // keys of a warp
  static constexpr int kColumns = kLatent / kAcross;

  const Request& request;
  const Memory& memory;
  int first_row;  // of the tile, in its request
  int lane, down, across;
  int visible[kM][2];     // keys that this lane's rows see
  float max[kM][2];       // of a row, in log2 units; alike in all of its lanes and warps
  float sum[kM][2] = {};  // of the weights that this lane computed
  float out[kM][kColumns / 8][4] = {};

  __device__ RowTile(const Request& request, const Memory& memory, int first_row)
      : request(request), memory(memory), first_row(first_row), lane(lane_id()) {
    const int warp = threadIdx.x / kWarp;
    down = warp / kAcross;
    across = warp % kAcross;
    for (int m = 0; m < kM; ++m) {
      for (int half = 0; half < 2; ++half) {
        const int row = first_row + row_of(m, half);
        visible[m][half] = row < request.rows ? request.visible(row) : 0;
        max[m][half] = -INFINITY;
      }
    }
  }

  // Row of the tile that this lane holds in piece m, upper or lower half.
  __device__ int row_of(int m, int half) const {
    return (down * kM + m) * 16 + half * 8 + lane / 4;
  }

  __device__ void copy_query() const {
    for (int i = threadIdx.x; i < kTileRows * kTokenPieces; i += kTileThreads) {
      const int row = i / kTokenPieces;
      const int piece = i - row * kTokenPieces;
      uint4 words = {};
      if (first_row + row < request.rows) {
        words = reinterpret_cast<const uint4*>(request.query(first_row + row))[piece];
      }
      memory.query[Layout::at(row, piece, kTokenPieces)] = words;
    }
  }

  // All that a tile of keys at `keys` adds; `begin` is the position of its first key.
  __device__ void attend(const uint4* keys, int begin) {
    float score[kM][kKeys / 8][4] = {};
    scores(score, keys);
    softmax(score, begin);
    values(keys);
  }

  __device__ void scores(float (&score)[kM][kKeys / 8][4], const uint4* keys) const {
#pragma unroll 4
    for (int k = 0; k < kHeadDim / 16; ++k) {
      uint32_t a[kM][4];
#pragma unroll
      for (int m = 0; m < kM; ++m) {
        const int row = (down * kM + m) * 16 + lane % 16;
        load_matrices(a[m], memory.query + Layout::at(row, 2 * k + lane / 16, kTokenPieces));
      }
#pragma unroll
      for (int n = 0; n < kKeys / 16; ++n) {
        uint32_t b[4];  // keys 0-7 and 8-15, of each the first and the last 8 columns
        const int key = across * kKeys + n * 16 + lane / 16 * 8 + lane % 8;
        load_matrices(b, keys + Layout::at(key, 2 * k + lane / 8 % 2, kTokenPieces));
#pragma unroll
        for (int m = 0; m < kM; ++m) {
          multiply_add(score[m][2 * n], a[m], b[0], b[1]);
          multiply_add(score[m][2 * n + 1], a[m], b[2], b[3]);
        }
      }
    }
  }

  __device__ void softmax(float (&score)[kM][kKeys / 8][4], int begin) {
    const int first_key = begin + across * kKeys + lane % 4 * 2;
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float largest = -INFINITY;
#pragma unroll
        for (int n = 0; n < kKeys / 8; ++n) {
#pragma unroll
          for (int j = 0; j < 2; ++j) {
            float& s = score[m][n][2 * half + j];
            const bool seen = first_key + n * 8 + j < visible[m][half];
            s = seen ? s * request.call.scale_log2 : -INFINITY;
            largest = fmaxf(largest, s);
          }
        }
        largest = fmaxf(largest, __shfl_xor_sync(kAllLanes, largest, 1));
        largest = fmaxf(largest, __shfl_xor_sync(kAllLanes, largest, 2));
        if (lane % 4 == 0) memory.maxima[across * kTileRows + row_of(m, half)] = largest;
      }
    }
    __syncthreads();  // maxima of all warps are there
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) weigh(score[m], m, half);
    }
    __syncthreads();  // weights of all warps are there
  }

  // Weights of one row of this lane, and what went before brought to the new maximum.
  __device__ void weigh(const float (&score)[kKeys / 8][4], int m, int half) {
    const int row = row_of(m, half);
    float largest = max[m][half];
#pragma unroll
    for (int i = 0; i < kAcross; ++i) largest = fmaxf(largest, memory.maxima[i * kTileRows + row]);
    // a row that has seen no key yet: all its scores are -inf, and so its weights 0
    const float base = largest == -INFINITY ? 0.0f : largest;
    const float factor = exp2f(max[m][half] - base);
    max[m][half] = largest;
    float added = 0.0f;
#pragma unroll
    for (int n = 0; n < kKeys / 8; ++n) {
      const float low = exp2f(score[n][2 * half] - base);
      const float high = exp2f(score[n][2 * half + 1] - base);
      added += low + high;
      uint4* piece = memory.weights + Layout::at(row, across * (kKeys / 8) + n, kWeightPieces);
      reinterpret_cast<uint32_t*>(piece)[lane % 4] = pack(low, high);
    }
    sum[m][half] = sum[m][half] * factor + added;
#pragma unroll
    for (int c = 0; c < kColumns / 8; ++c) {
      out[m][c][2 * half] *= factor;
      out[m][c][2 * half + 1] *= factor;
    }
  }

  __device__ void values(const uint4* keys) {
// a loop: unrolled, its reads are moved ahead until registers are short on sm_120a
#pragma unroll 1
    for (int k = 0; k < kTileKeys / 16; ++k) {
      uint32_t a[kM][4];
#pragma unroll
      for (int m = 0; m < kM; ++m) {
        const int row = (down * kM + m) * 16 + lane % 16;
        load_matrices(a[m], memory.weights + Layout::at(row, 2 * k + lane / 16, kWeightPieces));
      }
#pragma unroll
      for (int c = 0; c < kColumns / 16; ++c) {
        uint32_t b[4];  // columns 0-7 and 8-15, of each the first and the last 8 keys
        const int piece = (across * kColumns + c * 16) / 8 + lane / 16;
        load_transposed(b, keys + Layout::at(k * 16 + lane % 16, piece, kTokenPieces));
#pragma unroll
        for (int m = 0; m < kM; ++m) {
          multiply_add(out[m][2 * c], a[m], b[0], b[1]);
          multiply_add(out[m][2 * c + 1], a[m], b[2], b[3]);
        }
      }
    }
  }

  // Sums over all lanes and warps of a row, into sum; then store(row in request, column, pair of
  // normalised results) for each pair of columns and lse(row, log2 units) once a row.
  template <class Store, class Lse>
  __device__ void finish(Store store, Lse lse) {
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float total = sum[m][half];
        total += __shfl_xor_sync(kAllLanes, total, 1);
        total += __shfl_xor_sync(kAllLanes, total, 2);
        if (lane % 4 == 0) memory.sums[across * kTileRows + row_of(m, half)] = total;
      }
    }
    __syncthreads();
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = row_of(m, half);
        if (first_row + row >= request.rows) continue;
        float total = 0.0f;
        for (int i = 0; i < kAcross; ++i) total += memory.sums[i * kTileRows + row];
        const float inverse = total > 0.0f ? 1.0f / total : 0.0f;
#pragma unroll
        for (int c = 0; c < kColumns / 8; ++c) {
          const int column = across * kColumns + c * 8 + lane % 4 * 2;
          const float2 pair = {out[m][c][2 * half] * inverse, out[m][c][2 * half + 1] * inverse};
          store(first_row + row, column, pair);
        }
        if (across == 0 && lane % 4 == 0) lse(first_row + row, max[m][half], total);
      }
    }
  }

  // `finish` for a block that has seen all keys of its rows.
  __device__ void store_result() {
    finish(
        [&](int row, int column, float2 pair) {
          const float scale = request.call.out_scale;
          *reinterpret_cast<uint32_t*>(request.out(row) + column) =
              pack(pair.x * scale, pair.y * scale);
        },
        [&](int row, float max_log2, float total) {
          request.call.lse[request.first_row + row] = natural_lse(max_log2, total);
        });
  }
};

}  // namespace mla::ladder
