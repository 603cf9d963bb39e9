// Q K^T of a tile. Each warp of a team multiplies its tokens over its part of the columns; the
// parts meet in shared memory, as accumulators lie in registers (16 bytes a lane, no conflicts),
// and every warp of the team then reads the scores of the whole tile and does the same softmax. At
// 16 rows that is cheaper than a second round that hands weights out.
#pragma once

#include "xqa/load.h"
#include "xqa/query.h"

namespace mla::xqa {

// Scores of a tile over a warp: rows 16 m + g (+ 8), tokens 8 group + 2t (+ 1).
using Scores = Accumulator[Config::kMTiles][Config::kGroups];

// The threads of one team.
struct Team {
  int idx, warp;  // team, warp of the team

  __device__ Team()
      : idx(threadIdx.x / kLanes / Config::kTeam), warp(threadIdx.x / kLanes % Config::kTeam) {}
  __device__ int thread() const { return threadIdx.x % (kLanes * Config::kTeam); }

  __device__ void sync() const {
    if constexpr (Config::kTeam == 1) {
      __syncwarp();
    } else if constexpr (Config::kTeams == 1) {
      __syncthreads();
    } else {
      asm volatile("bar.sync %0, %1;" ::"r"(idx + 1), "n"(kLanes * Config::kTeam) : "memory");
    }
  }
};

// Address of this lane's row in matrices 4 i, ..., 4 i + 3 of a warp's keys: groups of 8 tokens, in
// each group the k-step's chunks of 16 bytes.
__device__ inline int key_offset(int lane) {
  const int matrix = lane / 8;
  const int group = matrix / Config::kChunks;
  return (group * 8 + lane % 8) * Config::kKeyPitch + matrix % Config::kChunks * 16;
}

using PartScores = Accumulator[Config::kMTiles][Config::kKeys];

// B operands of one k-step: chunks of a group of 8 tokens.
__device__ inline void key_pair(const uint32_t* matrices, int group, uint32_t& b0, uint32_t& b1) {
  if constexpr (Config::kChunks == 2) {
    b0 = matrices[2 * group];
    b1 = matrices[2 * group + 1];
  } else {
    half_pairs(matrices[group], b0, b1);
  }
}

// This warp's part: tokens of its token way, columns of its k way. `keys`: the tile in shared
// memory.
template <int kSize>
__device__ inline void multiply_keys(Accumulator (&s)[Config::kMTiles][kSize], const Query& query,
                                     uint32_t keys, const Team& team) {
  constexpr int kLoads = Config::kKeys * Config::kChunks / 4;  // of a k-step
  const int k_way = team.warp % Config::kKWays, token_way = team.warp / Config::kKWays;
  keys += token_way * Config::kKeys * 8 * Config::kKeyPitch +
          k_way * Config::kSteps * Config::kChunks * 16 + key_offset(threadIdx.x % kLanes);
#pragma unroll
  for (int m = 0; m < Config::kMTiles; ++m) {
#pragma unroll
    for (int n = 0; n < Config::kKeys; ++n) {
#pragma unroll
      for (int c = 0; c < 4; ++c) s[m][n][c] = 0.0f;
    }
  }
#pragma unroll
  for (int step = 0; step < Config::kSteps; ++step) {
    uint32_t matrices[kLoads][4];
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      load_matrices(matrices[i], keys + i * (4 / Config::kChunks) * 8 * Config::kKeyPitch +
                                     step * Config::kChunks * 16);
    }
#pragma unroll
    for (int m = 0; m < Config::kMTiles; ++m) {
      Fragment a;
      query.get(m, step, a);
#pragma unroll
      for (int n = 0; n < Config::kKeys; ++n) {
        uint32_t b0, b1;
        key_pair(&matrices[0][0], n, b0, b1);
        mma<Config::kMma>(s[m][n], a, b0, b1);
      }
    }
  }
  if constexpr (Query::kScaled) {
#pragma unroll
    for (int m = 0; m < Config::kMTiles; ++m) {
#pragma unroll
      for (int n = 0; n < Config::kKeys; ++n) {
#pragma unroll
        for (int c = 0; c < 4; ++c) s[m][n][c] *= query.unscale[m][c / 2];
      }
    }
  }
}

// From parts to the scores of the whole tile, times `scale`. `board`: this team's score memory.
__device__ inline void share_scores(Scores& s, const PartScores& part, float4* board,
                                    const Team& team, float scale) {
  const int lane = threadIdx.x % kLanes;
  const int k_way = team.warp % Config::kKWays, token_way = team.warp / Config::kKWays;
  constexpr int kWay = Config::kMTiles * Config::kGroups;
#pragma unroll
  for (int m = 0; m < Config::kMTiles; ++m) {
#pragma unroll
    for (int n = 0; n < Config::kKeys; ++n) {
      const int at = k_way * kWay + m * Config::kGroups + token_way * Config::kKeys + n;
      board[at * kLanes + lane] =
          make_float4(part[m][n][0], part[m][n][1], part[m][n][2], part[m][n][3]);
    }
  }
  team.sync();
#pragma unroll
  for (int i = 0; i < kWay; ++i) {
    float4 sum = board[i * kLanes + lane];
#pragma unroll
    for (int way = 1; way < Config::kKWays; ++way) {
      const float4 more = board[(way * kWay + i) * kLanes + lane];
      sum = make_float4(sum.x + more.x, sum.y + more.y, sum.z + more.z, sum.w + more.w);
    }
    Accumulator& to = s[i / Config::kGroups][i % Config::kGroups];
    to[0] = sum.x * scale, to[1] = sum.y * scale, to[2] = sum.z * scale, to[3] = sum.w * scale;
  }
}

__device__ inline void scores_of_tile(Scores& s, const Query& query, uint32_t keys, float4* board,
                                      const Team& team, float scale) {
  if constexpr (Config::kTeam > 1) {
    PartScores part;
    multiply_keys(part, query, keys, team);
    share_scores(s, part, board, team, scale);
  } else {
    multiply_keys(s, query, keys, team);
#pragma unroll
    for (int m = 0; m < Config::kMTiles; ++m) {
#pragma unroll
      for (int n = 0; n < Config::kGroups; ++n) {
#pragma unroll
        for (int c = 0; c < 4; ++c) s[m][n][c] *= scale;
      }
    }
  }
}

}  // namespace mla::xqa
