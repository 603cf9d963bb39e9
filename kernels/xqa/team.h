// The warps that work on one tile together.
#pragma once

#include "xqa/config.h"

namespace mla::xqa {

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

  // After a piece of `tiles`: teams that had one less meet as often as the others did.
  //
  // No result depends on it. compute-sanitizer 2025.3.1 does: where parts of a block have met at
  // barriers of their own a different number of times, racecheck now and then misses the next
  // __syncthreads and reports what lies on both sides of it. A kernel of 20 lines shows it (two
  // warps each write, meet, read, meet, in a loop; then __syncthreads, a write, __syncthreads, a
  // read): 256 hazards with 7, 6, 5 and 4 turns, none with 7 for all, whether the barrier's number
  // is in a register or not, by bar.sync and by barrier.sync (H200, 2026-11-20).
  __device__ void even_out(int tiles) const {
    if constexpr (Config::kTeam > 1 && Config::kTeams > 1) {
      const int rest = tiles % Config::kTeams;
      if (rest == 0 || idx < rest) return;
      sync();
      sync();
    }
  }
};

}  // namespace mla::xqa
