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
};

}  // namespace mla::xqa
