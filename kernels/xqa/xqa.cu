// Decode attention by warp-level mma.sync, for MLA and for GQA/MQA: rows (query tokens x heads) on
// M in tiles of 16, keys on N. It runs wherever mma.sync and cp.async do.
//
// A CTA takes one row tile and one piece of its keys (work.h). Per tile of keys, in each team of
// warps (config.h):
//   load.h     cp.async, kStages tiles deep; a barrier makes a landed tile everybody's and frees
//   the
//              stage of the tile before it, which is refilled at once
//   scores.h   Q K^T, the query's fragments in registers for the whole kernel
//   softmax.h  masks, maximum, weights; done by every warp of the team alike
//   values.h   P V, a warp its own columns
// Then finish.h: teams are merged, and the last piece that arrives merges the pieces.
#include "xqa/finish.h"

namespace mla::xqa {
namespace {

constexpr float kLeastScale = 1e-30f;  // in place of 0, which would make NaN of -inf

// The work in shared memory, for what needs it seldom or late: registers are for the loop. To be
// read after a barrier.
__device__ const Work& keep(const Work& work, uint4* memory) {
  static_assert(sizeof(Work) <= Config::kWorkBytes);
  Work* kept = reinterpret_cast<Work*>(memory);
  if (threadIdx.x == 0) *kept = work;
  return *kept;
}

__global__ void __launch_bounds__(Config::kThreads, Config::kMinCtas)
    attend(const __grid_constant__ Params p) {
  extern __shared__ uint4 memory[];
  uint4* boards = memory + Config::kQueryBytes / 16;
  uint4* states = boards + Config::kTeams * Config::kScoreBytes / 16;
  uint4* later = states + Config::kRowBytes / 16;
  uint4* stages = later + Config::kWorkBytes / 16;
#if __CUDA_ARCH__ >= 900
  cudaGridDependencySynchronize();
#endif
  Work work;
  if (!work.find(p)) return;
  const Work& kept = keep(work, later);

  const Team team;
  const uint32_t own = shared_address(stages) + team.idx * Config::kStages * Config::kStageBytes;
  const Board board{reinterpret_cast<float4*>(boards + team.idx * Config::kScoreBytes / 16)};
  const int first = work.begin + team.idx;
  Loader loader(p, work, own, team.thread(), first, Config::kTeams);
  const float given_scale = (p.bmm1_scale ? *p.bmm1_scale : p.bmm1) * kLog2E;
  const float scale = fmaxf(fabsf(given_scale), kLeastScale);
  Query query(p, work, memory, team, given_scale < 0.0f);
  loader.start();
  query.prepare();
  __syncthreads();
  const Visibility visibility(p, work, kept);
  Softmax softmax;
  Output output;
  uint32_t stage = own;
  for (int tile = first, end = work.end; tile < end; tile += Config::kTeams) {
    loader.wait();
    team.sync();
    loader.issue();
    Scores scores;
    scores_of_tile(scores, query, stage, board, team);
    visibility.apply(scores, tile);
    float factor[Config::kMTiles][2];
    if (softmax.weigh(scores, scale, factor)) output.scale(factor);
    output.add(scores, stage + Config::kValueOffset, team);
    stage += Config::kStageBytes;
    if (stage == own + Config::kStages * Config::kStageBytes) stage = own;
  }
  loader.wait_for_all();
  __syncthreads();
  const Bench bench{reinterpret_cast<float*>(stages), reinterpret_cast<RowState*>(states)};
  Finish{p, kept, scale}.result(output, softmax, team, bench);
}

cudaError_t allow_shared_memory() {
  return cudaFuncSetAttribute(attend, cudaFuncAttributeMaxDynamicSharedMemorySize,
                              Config::kSharedBytes);
}

}  // namespace

cudaError_t launch(const Params& params, cudaStream_t stream) {
  const cudaError_t set = allow_shared_memory();
  if (set != cudaSuccess) return set;
  const int rows = params.q_len * (params.heads / params.kv_heads);
  const int row_tiles = (rows + Config::kRows - 1) / Config::kRows;
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = params.programmatic_launch;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(params.max_splits, row_tiles * params.kv_heads, params.batch);
  config.blockDim = dim3(Config::kThreads);
  config.dynamicSmemBytes = Config::kSharedBytes;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = params.programmatic_launch ? 1 : 0;
  return cudaLaunchKernelEx(&config, attend, params);
}

cudaError_t occupancy(int32_t* ctas) {
  const cudaError_t set = allow_shared_memory();
  if (set != cudaSuccess) return set;
  return cudaOccupancyMaxActiveBlocksPerMultiprocessor(ctas, attend, Config::kThreads,
                                                       Config::kSharedBytes);
}

}  // namespace mla::xqa
