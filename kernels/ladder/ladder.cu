// The ladder: one decode call in ten steps, from the formula to split-kv on tensor cores.
#include "ladder/step0_formula.cuh"
#include "ladder/step1_coalesced.cuh"
#include "ladder/step2_online.cuh"
#include "ladder/step3_shared.cuh"
#include "ladder/step4_tensor_cores.cuh"
#include "ladder/step5_swizzle.cuh"
#include "ladder/step6_cp_async.cuh"
#include "ladder/step7_split.cuh"
#include "ladder/step8_warp_grid.cuh"
#include "ladder/step9_look_ahead.cuh"

namespace mla::ladder {

int64_t scratch_floats(int step, const Call& call) {
  if (step <= 1) return step0::scratch_floats(call);
  return step >= 7 ? step7::scratch_floats(call) : 0;
}

cudaError_t run(int step, const Call& call, cudaStream_t stream) {
  switch (step) {
    case 0:
      return step0::run(call, stream);
    case 1:
      return step1::run(call, stream);
    case 2:
      return step2::run(call, stream);
    case 3:
      return step3::run(call, stream);
    case 4:
      return step4::run<step4::Plain>(call, stream);
    case 5:
      return step5::run(call, stream);
    case 6:
      return step6::run(call, stream);
    case 7:
      return step7::run<4>(call, stream);
    case 8:
      return step8::run(call, stream);
    case 9:
      return step9::run(call, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace mla::ladder
