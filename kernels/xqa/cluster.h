// Clusters: the CTAs of a row tile's pieces, where the launch made them one. They read each other's
// shared memory at the same places.
#pragma once

#include "xqa/config.h"

namespace mla::xqa {

constexpr int kMaxCluster = 8;  // CTAs that every card with clusters allows

// CTAs of this one's cluster; 1 where there are no clusters.
__device__ inline int cluster_size() {
#if __CUDA_ARCH__ >= 900
  int size;
  asm("mov.u32 %0, %%cluster_nctaid.x;" : "=r"(size));
  return size;
#else
  return 1;
#endif
}

// A barrier of all threads of the cluster that have not left.
__device__ inline void meet_cluster() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.aligned;\n\tbarrier.cluster.wait.aligned;" ::: "memory");
#endif
}

#if __CUDA_ARCH__ >= 900
__device__ inline uint32_t peer_address(const void* own, int rank) {
  uint32_t address;
  asm("mapa.shared::cluster.u32 %0, %1, %2;"
      : "=r"(address)
      : "r"(static_cast<uint32_t>(__cvta_generic_to_shared(own))), "r"(rank));
  return address;
}
#endif

// What CTA `rank` of the cluster has where this one has `own`.
__device__ inline float load_peer(const float* own, int rank) {
  float value = 0.0f;
#if __CUDA_ARCH__ >= 900
  asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(value) : "r"(peer_address(own, rank)));
#endif
  return value;
}

__device__ inline float4 load_peer(const float4* own, int rank) {
  float4 v{};
#if __CUDA_ARCH__ >= 900
  asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
               : "r"(peer_address(own, rank)));
#endif
  return v;
}

}  // namespace mla::xqa
