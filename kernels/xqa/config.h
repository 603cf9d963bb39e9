// One instance of the kernel, from -D options: types, widths, tiles, and roles of warps.
//
// A team of warps works on one tile of tokens at a time. Its warps cut Q K^T by columns of K
// (k_ways) and by tokens (team / k_ways), and P V by columns of V (team). Teams take turns at the
// tiles of a piece, each with its own softmax state, and are merged at the end.
//   MLA:  one team of 4, as 16 x 512 accumulators need the registers of several warps. Where an SM
//         has 227 KB, two teams of 4 or (e4m3, whose exchange of scores weighs more) four of 2 in
//         one CTA: half the pieces then keep the card busy, and pieces cost (whole_sm)
//   GQA:  four teams of one warp, which then never wait for each other
#pragma once

#include "xqa/xqa.h"

#ifndef MLA_QK_DIM
#define MLA_QK_DIM 576
#endif
#ifndef MLA_V_DIM
#define MLA_V_DIM (MLA_QK_DIM == 576 ? 512 : MLA_QK_DIM)
#endif
#ifndef MLA_SHARED_KV
#define MLA_SHARED_KV (MLA_QK_DIM == 576)
#endif
#ifndef MLA_Q_TYPE
#define MLA_Q_TYPE 0
#endif
#ifndef MLA_KV_TYPE
#define MLA_KV_TYPE 0
#endif
#ifndef MLA_MMA8
#define MLA_MMA8 0
#endif
#ifndef MLA_ROW_TILES
#define MLA_ROW_TILES 1
#endif
#ifndef MLA_WHOLE_SM  // MLA: 1: one CTA of 8 warps takes an SM that has 227 KB (sm_90, sm_100)
#define MLA_WHOLE_SM 0
#endif
#ifndef MLA_TEAM
#define MLA_TEAM (MLA_V_DIM > 128 ? (MLA_WHOLE_SM ? 2 : 4) : 1)
#endif
#ifndef MLA_TEAMS
#define MLA_TEAMS (MLA_TEAM == 1 ? 4 : (MLA_WHOLE_SM ? 8 / MLA_TEAM : 1))
#endif
#ifndef MLA_K_WAYS
#define MLA_K_WAYS (MLA_MMA8 && MLA_TEAM > 1 ? 2 : MLA_TEAM)
#endif
#ifndef MLA_TILE_KV  // longer tiles have fewer barriers; shared memory and registers bound them
#define MLA_LONG_TILE (MLA_TEAM > 2 && MLA_SHARED_KV && MLA_ROW_TILES == 1)
#define MLA_TILE_KV (MLA_KV_TYPE != 2 ? 16 : (MLA_LONG_TILE ? 64 : 32))
#endif
#ifndef MLA_STAGES
#define MLA_STAGES 0  // as many as fit
#endif
#ifndef MLA_QUERY_REGISTERS  // 0: the query's fragments in shared memory
#define MLA_QUERY_REGISTERS (MLA_ROW_TILES == 1 && (MLA_TEAM != 2 || MLA_KV_TYPE != 2))
#endif
#ifndef MLA_SMALL_PAGES  // 1: pages of 1 to 8 tokens, whose ids are fetched row by row
#define MLA_SMALL_PAGES 0
#endif
#ifndef MLA_MIN_CTAS
#define MLA_MIN_CTAS (MLA_WHOLE_SM ? 1 : 2)
#endif
#ifndef MLA_SHARED_KB
#define MLA_SHARED_KB (MLA_WHOLE_SM ? 227 : 99)  // 99: what a block may have on sm_89 and sm_120
#endif

namespace mla::xqa {

// mma.sync.m16n8k16 in bf16 or fp16, m16n8k32 in e4m3
enum class Mma { kBf16, kFp16, kE4m3 };

constexpr int kLanes = 32;
constexpr int kMatrix = 512;  // bytes that one 16 x 8 fp32 accumulator takes over a warp

struct Config {
  static constexpr Type kQuery = static_cast<Type>(MLA_Q_TYPE);
  static constexpr Type kCache = static_cast<Type>(MLA_KV_TYPE);
  static constexpr bool kBytes = kCache == Type::kE4m3;  // one byte an element
  static constexpr Mma kMma = kBytes ? (MLA_MMA8 ? Mma::kE4m3 : Mma::kFp16)
                                     : (kCache == Type::kBf16 ? Mma::kBf16 : Mma::kFp16);
  static constexpr int kQkDim = MLA_QK_DIM;
  static constexpr int kVDim = MLA_V_DIM;
  static constexpr bool kSharedKv = MLA_SHARED_KV;
  static constexpr bool kSmallPages = MLA_SMALL_PAGES;
  static constexpr int kMTiles = MLA_ROW_TILES;
  static constexpr int kRows = 16 * kMTiles;
  static constexpr int kTile = MLA_TILE_KV;
  static constexpr int kTeam = MLA_TEAM;
  static constexpr int kTeams = MLA_TEAMS;
  static constexpr int kKWays = MLA_K_WAYS;
  static constexpr int kTokenWays = kTeam / kKWays;
  static constexpr int kThreads = kLanes * kTeam * kTeams;
  static constexpr int kMinCtas = MLA_MIN_CTAS;

  static constexpr int kElement = kBytes ? 1 : 2;
  // 16 bytes more than the row: an odd number of 16-byte units, so that the eight rows of a
  // matrix lie in different banks
  static constexpr int kKeyPitch = kQkDim * kElement + 16;
  static constexpr int kValuePitch = kSharedKv ? kKeyPitch : kVDim * kElement + 16;
  static constexpr int kValueOffset = kSharedKv ? 0 : kTile * kKeyPitch;
  static constexpr int kStageBytes = kTile * (kKeyPitch + (kSharedKv ? 0 : kValuePitch));

  // Q K^T of one warp: k-steps of `kChunks` 16-byte chunks of a key, kKeys groups of 8 tokens;
  // before each kLoadEvery-th step a part of the next tile's loads
  static constexpr int kChunks = kMma == Mma::kFp16 && kBytes ? 1 : 2;
  static constexpr int kSteps = kQkDim * kElement / 16 / kChunks / kKWays;
  static constexpr int kLoadEvery = kSteps % 2 == 0 ? 2 : (kSteps % 3 == 0 ? 3 : 1);
  static constexpr int kKeys = kTile / 8 / kTokenWays;
  static constexpr int kGroups = kTile / 8;            // groups of 8 tokens in a tile
  static constexpr int kColumns = kVDim / kTeam / 16;  // 16-column blocks of a warp's output

  static constexpr bool kQueryInRegisters = MLA_QUERY_REGISTERS;
  static constexpr int kQueryBytes = kQueryInRegisters ? 0 : kMTiles * kSteps * kKWays * kMatrix;
  static constexpr int kScoreBytes = kTeam == 1 ? 0 : kKWays * kMTiles * kGroups * kMatrix;
  static constexpr int kRowBytes = (kTeams * 16 + 4) * kRows;  // state of each row, see finish.h
  static constexpr int kWorkBytes = 64;
  static constexpr int kFixedBytes = kWorkBytes + kQueryBytes + kTeams * kScoreBytes + kRowBytes;
  static constexpr int kFit = (MLA_SHARED_KB * 1024 - kFixedBytes) / (kTeams * kStageBytes);
  static constexpr int kStages = MLA_STAGES ? MLA_STAGES : (kFit > 6 ? 6 : kFit);
  static constexpr int kSharedBytes = kFixedBytes + kTeams * kStages * kStageBytes;

  static_assert(kStages >= 2 && kSharedBytes <= MLA_SHARED_KB * 1024);

  static_assert(kTeam % kKWays == 0 && kTile % (8 * kTokenWays) == 0);
  static_assert((kQkDim * kElement / 16) % (kChunks * kKWays) == 0);
  static_assert((kKeys * kChunks) % 4 == 0, "keys are loaded four 8 x 16-byte matrices at a time");
  static_assert(kTile % (kBytes ? 32 : 16) == 0, "so are values");
  static_assert(kQuery == kCache || kBytes, "16-bit queries and caches have one type");
  static_assert(kMma != Mma::kE4m3 || kQuery == Type::kE4m3);
  static_assert(kQueryInRegisters || kQuery == kCache);
};

// Softmax weights are computed 2^kWeightShift too large, where their type keeps more of small
// weights then; sums carry the same factor.
constexpr float kWeightShift =
    Config::kMma == Mma::kE4m3 ? 8.0f : (Config::kMma == Mma::kFp16 ? 12.0f : 0.0f);

}  // namespace mla::xqa
