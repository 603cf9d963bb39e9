// What runs a plan's loops: one thread block on the device, one thread on the host.
// plan.h is written against this interface, so that a CPU test runs the same arithmetic.
#pragma once

#include <algorithm>
#include <cstdint>

#ifdef __CUDACC__
#define MLA_PLANNER_FN __device__
#else
#define MLA_PLANNER_FN
#endif

namespace mla::planner {

constexpr int32_t kMost = 0x7fffffff;

// Sum of two numbers that are not negative; it stops at 2^31 - 1.
MLA_PLANNER_FN inline int32_t add(int32_t a, int32_t b) { return a < kMost - b ? a + b : kMost; }

#ifdef __CUDACC__

constexpr int kThreads = 1024;
constexpr int kWarp = 32;
constexpr int kWarps = kThreads / kWarp;
constexpr unsigned kAllLanes = 0xffffffffu;

// Exclusive prefix sum over the lanes of a warp.
__device__ inline int32_t warp_scan(int32_t value, int32_t& total) {
  const int lane = threadIdx.x % kWarp;
  int32_t sum = value;
  for (int step = 1; step < kWarp; step *= 2) {
    const int32_t below = __shfl_up_sync(kAllLanes, sum, step);
    if (lane >= step) sum = add(sum, below);
  }
  total = __shfl_sync(kAllLanes, sum, kWarp - 1);
  const int32_t before = __shfl_up_sync(kAllLanes, sum, 1);
  return lane > 0 ? before : 0;
}

struct Team {
  int32_t* partial;  // shared, [kWarps + 1]

  // f(0), ..., f(n - 1), in any order
  template <class F>
  __device__ void each(int32_t n, F f) {
#pragma unroll 1  // the code runs once: instruction fetches are what it waits for
    for (int32_t i = threadIdx.x; i < n; i += kThreads) f(i);
    __syncthreads();
  }

  // Exclusive prefix sum in place; returns the sum of all.
  __device__ int32_t scan(int32_t* values, int32_t n) {
    const int lane = threadIdx.x % kWarp;
    const int warp = threadIdx.x / kWarp;
    int32_t carry = 0;
    for (int32_t base = 0; base < n; base += kThreads) {
      const int32_t i = base + static_cast<int32_t>(threadIdx.x);
      int32_t total;
      const int32_t before = warp_scan(i < n ? values[i] : 0, total);
      if (lane == 0) partial[warp] = total;
      __syncthreads();
      if (warp == 0) {
        int32_t all;
        const int32_t mine = partial[lane];
        partial[lane] = warp_scan(mine, all);
        if (lane == 0) partial[kWarps] = all;
      }
      __syncthreads();
      if (i < n) values[i] = add(add(carry, partial[warp]), before);
      carry = add(carry, partial[kWarps]);
      __syncthreads();
    }
    return carry;
  }

  // Ascending, by a bitonic network; room for the next power of two above n must be there.
  __device__ void sort(uint64_t* keys, int32_t n) {
    int32_t size = 1;
    while (size < n) size *= 2;
    each(size - n, [&](int32_t i) { keys[n + i] = ~0ull; });
#pragma unroll 1
    for (int32_t run = 2; run <= size; run *= 2) {
#pragma unroll 1
      for (int32_t step = run / 2; step > 0; step /= 2) {
        each(size / 2, [&](int32_t i) {
          const int32_t low = 2 * i - (i & (step - 1));
          const int32_t high = low + step;
          const bool ascending = (low & run) == 0;
          if ((keys[low] > keys[high]) == ascending) {
            const uint64_t swapped = keys[low];
            keys[low] = keys[high];
            keys[high] = swapped;
          }
        });
      }
    }
  }
};

#else

struct Team {
  template <class F>
  void each(int32_t n, F f) {
    for (int32_t i = 0; i < n; ++i) f(i);
  }
  int32_t scan(int32_t* values, int32_t n) {
    int32_t sum = 0;
    for (int32_t i = 0; i < n; ++i) {
      const int32_t value = values[i];
      values[i] = sum;
      sum = add(sum, value);
    }
    return sum;
  }
  void sort(uint64_t* keys, int32_t n) { std::sort(keys, keys + n); }
};

#endif

}  // namespace mla::planner
