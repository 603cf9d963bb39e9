// Q K^T of a tile. Each warp of a team multiplies its tokens over its part of the columns; the
// parts meet in shared memory, as accumulators lie in registers (16 bytes a lane, no conflicts),
// and every warp of the team then reads the scores of the whole tile and does the same softmax. At
// 16 rows that is cheaper than a second round that hands weights out.
#pragma once

#include <type_traits>

#include "xqa/load.h"
#include "xqa/query.h"

namespace mla::xqa {

// Scores of a tile over a warp: rows 16 m + g (+ 8), tokens 8 group + 2t (+ 1).
using Scores = Accumulator[Config::kMTiles][Config::kGroups];

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

template <int kCount, int kAt = 0, class Body>
__device__ inline void static_for(Body body) {
  if constexpr (kAt < kCount) {
    body(std::integral_constant<int, kAt>{});
    static_for<kCount, kAt + 1>(body);
  }
}

// This warp's part, and the loads of the next tile in between: all at once they held up the first
// reads of the keys, and with them the tile (e4m3 B64 95 us, in between 87; H200, 2026-11-20).
// Tokens of this warp's token way, columns of its k way. `keys`: the tile in shared
// memory.
template <int kSize>
__device__ inline void multiply_keys(Accumulator (&s)[Config::kMTiles][kSize], const Query& query,
                                     uint32_t keys, const Team& team, Loader& loader) {
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
  static_for<Config::kSteps>([&](auto step_c) {
    constexpr int step = decltype(step_c)::value;
    if constexpr (step % Config::kLoadEvery == 0) {
      loader.issue<step / Config::kLoadEvery, Config::kSteps / Config::kLoadEvery>();
    }
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
  });
  loader.issued();
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

// Where the parts of a team's scores meet.
struct Board {
  float4* memory;  // [k_ways][m tiles][groups of 8 tokens][lanes]

  static constexpr int kWay = Config::kMTiles * Config::kGroups;

  __device__ void put(const PartScores& part, const Team& team) const {
    const int lane = threadIdx.x % kLanes;
    const int k_way = team.warp % Config::kKWays, token_way = team.warp / Config::kKWays;
#pragma unroll
    for (int m = 0; m < Config::kMTiles; ++m) {
#pragma unroll
      for (int n = 0; n < Config::kKeys; ++n) {
        const int at = k_way * kWay + m * Config::kGroups + token_way * Config::kKeys + n;
        memory[at * kLanes + lane] =
            make_float4(part[m][n][0], part[m][n][1], part[m][n][2], part[m][n][3]);
      }
    }
  }

  // `own`: what this warp has put. Of two parts it reads the other one: sums have the same bits.
  __device__ void get(Scores& s, const PartScores& own, const Team& team) const {
    const float4* from = memory + threadIdx.x % kLanes;
#pragma unroll
    for (int i = 0; i < kWay; ++i) {
      Accumulator& to = s[i / Config::kGroups][i % Config::kGroups];
      if constexpr (Config::kKWays == 2 && Config::kTokenWays == 1) {
        const Accumulator& mine = own[i / Config::kGroups][i % Config::kGroups];
        const float4 other = from[((1 - team.warp) * kWay + i) * kLanes];
        to[0] = mine[0] + other.x, to[1] = mine[1] + other.y;
        to[2] = mine[2] + other.z, to[3] = mine[3] + other.w;
      } else {
        float4 sum = from[i * kLanes];
#pragma unroll
        for (int way = 1; way < Config::kKWays; ++way) {
          const float4 more = from[(way * kWay + i) * kLanes];
          sum = make_float4(sum.x + more.x, sum.y + more.y, sum.z + more.z, sum.w + more.w);
        }
        to[0] = sum.x, to[1] = sum.y, to[2] = sum.z, to[3] = sum.w;
      }
    }
  }
};

// Scores of a tile, by one team.
__device__ inline void scores_of_tile(Scores& s, const Query& query, uint32_t keys,
                                      const Board& board, const Team& team, Loader& loader) {
  if constexpr (Config::kTeam > 1) {
    PartScores part;
    multiply_keys(part, query, keys, team, loader);
    board.put(part, team);
    team.sync();
    board.get(s, part, team);
  } else {
    multiply_keys(s, query, keys, team, loader);
  }
}

}  // namespace mla::xqa
