// Launch of the planner on a stream.
#pragma once

#include <cuda_runtime_api.h>

#include "planner/planner.h"

namespace mla::planner {

cudaError_t launch(const Params& params, cudaStream_t stream);

}  // namespace mla::planner
