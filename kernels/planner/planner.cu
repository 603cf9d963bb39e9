// One thread block makes the plan; see plan.h. No copy to the host, nothing allocated, so that it
// can be captured in a graph and run again when the lengths have changed.
#include <cuda_runtime_api.h>

#include "planner/launch.h"
#include "planner/plan.h"

namespace mla::planner {
namespace {

// Shared memory that a block may have on the smallest of our cards (sm_120: 99 KB a block) is
// less than the largest batch needs; there the launch fails with a message. On sm_90 and sm_100:
constexpr int64_t kSharedBytes = 227 * 1024;
static_assert(Scratch::bytes(kMaxBatch) + 4 * (kWarps + 1) <= kSharedBytes);

__global__ void __launch_bounds__(kThreads) plan_kernel(const __grid_constant__ Params p) {
  extern __shared__ uint64_t memory[];
  __shared__ int32_t partial[kWarps + 1];
  const Scratch scratch(memory, p.batch);
  Team team{partial};
  make_plan(team, p, scratch);
}

}  // namespace

cudaError_t launch(const Params& params, cudaStream_t stream) {
  const int bytes = static_cast<int>(Scratch::bytes(params.batch));
  const cudaError_t set =
      cudaFuncSetAttribute(plan_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (set != cudaSuccess) return set;
  plan_kernel<<<1, kThreads, bytes, stream>>>(params);
  return cudaGetLastError();
}

}  // namespace mla::planner
