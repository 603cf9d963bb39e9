// The planner's arithmetic on the host, for tests/test_cuda_planner.py: kernels/planner/plan.h
// with one thread in the place of a thread block.
#include <vector>

#include "planner/plan.h"

extern "C" void plan_on_host(mla::planner::Params* params) {
  using mla::planner::Scratch;
  std::vector<uint64_t> memory(Scratch::bytes(params->batch) / 8 + 1);
  const Scratch scratch(memory.data(), params->batch);
  mla::planner::Team team;
  mla::planner::make_plan(team, *params, scratch);
}
