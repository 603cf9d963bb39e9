// How every step starts a kernel: grid, threads, bytes of shared memory.
#pragma once

#include "ladder/request.cuh"

namespace mla::ladder {

// The shared memory of a block; each step lays it out for itself.
extern __shared__ uint4 shared_memory[];

inline int ceil_div(int a, int b) { return (a + b - 1) / b; }

struct Shape {
  dim3 grid;
  int threads;
  size_t shared_bytes = 0;
};

template <class... Args>
cudaError_t launch(const Shape& shape, cudaStream_t stream, void (*kernel)(Args...), Args... args) {
  if (shape.grid.x == 0 || shape.grid.y == 0 || shape.grid.z == 0) return cudaSuccess;
  // more than 48 KB must be allowed first, which a card that has less refuses here
  const cudaError_t refused =
      cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel),
                           cudaFuncAttributeMaxDynamicSharedMemorySize, shape.shared_bytes);
  if (refused != cudaSuccess) return refused;
  cudaLaunchConfig_t config{};
  config.gridDim = shape.grid;
  config.blockDim = dim3(shape.threads);
  config.dynamicSmemBytes = shape.shared_bytes;
  config.stream = stream;
  return cudaLaunchKernelEx(&config, kernel, args...);
}

}  // namespace mla::ladder
