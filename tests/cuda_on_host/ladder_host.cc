// The ladder's kernels on a CPU, for tests/test_ladder.py.
#include "block.h"

template <class... Args>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Args...),
                               Args... args);

#include "ladder/ladder.cu"

static size_t most_shared;  // bytes that a block of the last call asked for at most

namespace mla::ladder {
uint4 shared_memory[host::kMaxShared / sizeof(uint4)];
}

template <class... Args>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Args...),
                               Args... args) {
  most_shared = std::max(most_shared, config->dynamicSmemBytes);
  const bool ran = host::run_grid(config->gridDim, config->blockDim,
                                  reinterpret_cast<unsigned char*>(mla::ladder::shared_memory),
                                  config->dynamicSmemBytes, [=] { kernel(args...); });
  return ran ? cudaSuccess : cudaErrorLaunchFailure;
}

extern "C" cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int bytes) {
  return static_cast<size_t>(bytes) <= host::kMaxShared ? cudaSuccess : cudaErrorInvalidValue;
}

extern "C" int64_t scratch_floats(int step, const mla::ladder::Call* call) {
  return mla::ladder::scratch_floats(step, *call);
}

extern "C" int run_on_host(int step, const mla::ladder::Call* call, bool reversed) {
  host::reversed = reversed;
  most_shared = 0;
  mla::ladder::matrix_reads = mla::ladder::matrix_turns = 0;
  return mla::ladder::run(step, *call, nullptr);
}

extern "C" int64_t shared_bytes() { return static_cast<int64_t>(most_shared); }

extern "C" double turns_per_read() {
  const long reads = mla::ladder::matrix_reads;
  return reads ? static_cast<double>(mla::ladder::matrix_turns) / reads : 0.0;
}
