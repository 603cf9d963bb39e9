// Decode attention by warp-level mma.sync, for MLA and for GQA/MQA: rows (query tokens x heads) on
// M in tiles of 16, keys on N. It runs wherever mma.sync and cp.async do.
//
// A CTA takes one row tile and one piece of its keys (work.h). Per tile of keys, in each team of
// warps (config.h):
//   load.h     cp.async, kStages tiles deep; a barrier makes a landed tile visible to the team and
//              frees the stage of the tile before it, which is refilled during the products
//   scores.h   Q K^T, the query's fragments in registers or shared memory for the whole kernel
//   softmax.h  masks, maximum, weights; done by every warp of the team alike
//   values.h   P V, a warp its own columns
// Then finish.h: teams are merged, and pieces by a cluster of their CTAs, or by the last CTA that
// arrives.
#include <atomic>

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

// Prefetches all page ids of the request, before those that this CTA needs are computed.
__device__ void touch_table(const Params& p) {
  constexpr int kLine = 32;  // page ids
  const int at = threadIdx.x * kLine;
  if (at >= p.max_pages) return;
  const int32_t* table = p.keys.table + blockIdx.z * p.table_stride;
  asm volatile("prefetch.global.L2 [%0];" ::"l"(table + at));
}

#if __CUDA_ARCH__ == 890 || __CUDA_ARCH__ == 1200
static_assert(Config::kSharedBytes <= 99 * 1024, "what a block may have here");
#endif

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
  touch_table(p);
  Work work;
  if (!work.find(p)) return;
  if (work.pieces == 0) return put_nan(p, work);
  const Work& kept = keep(work, later);

  const Team team;
  const uint32_t own = shared_address(stages) + team.idx * Config::kStages * Config::kStageBytes;
  const Board board{reinterpret_cast<float4*>(boards + team.idx * Config::kScoreBytes / 16)};
  const int first = work.begin + team.idx;
  Loader loader(p, work, own, team.thread(), first, Config::kTeams);
  const float given_scale = (p.bmm1_scale ? *p.bmm1_scale : p.bmm1) * kLog2E;
  // no fmaxf, which would take NaN for kLeastScale
  const float scale = fabsf(given_scale) < kLeastScale ? kLeastScale : fabsf(given_scale);
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
    Scores scores;
    scores_of_tile(scores, query, stage, board, team, loader);
    visibility.apply(scores, tile);
    float factor[Config::kMTiles][2];
    if (softmax.weigh(scores, scale, factor)) output.scale(factor);
    output.add(scores, stage + Config::kValueOffset, team);
    stage += Config::kStageBytes;
    if (stage == own + Config::kStages * Config::kStageBytes) stage = own;
  }
  team.even_out(work.end - work.begin);
  loader.wait_for_all();
  __syncthreads();
  RowState* state = reinterpret_cast<RowState*>(states);
  const Bench bench{reinterpret_cast<float*>(stages), state,
                    reinterpret_cast<float*>(state + Config::kTeams * Config::kRows)};
  Finish{p, kept, scale}.result(output, softmax, team, bench);
}

cudaError_t allow_shared_memory() {
  return cudaFuncSetAttribute(attend, cudaFuncAttributeMaxDynamicSharedMemorySize,
                              Config::kSharedBytes);
}

// How many clusters of `size` CTAs the current device runs at once; 0 where it has none, and on
// devices beyond the first 64. Each of the others is queried once.
cudaError_t clusters_at_once(const cudaLaunchConfig_t& config, int size, int32_t* clusters) {
  constexpr int kDevices = 64;
  static std::atomic<int32_t> known[kDevices][kMaxCluster + 1];  // 1 more than the answer
  *clusters = 0;
  int device = 0, supported = 0;
  cudaError_t code = cudaGetDevice(&device);
  if (code != cudaSuccess || device >= kDevices) return code;
  std::atomic<int32_t>& answer = known[device][size];
  if (const int32_t found = answer.load(std::memory_order_relaxed)) {
    *clusters = found - 1;
    return cudaSuccess;
  }
  code = cudaDeviceGetAttribute(&supported, cudaDevAttrClusterLaunch, device);
  if (code == cudaSuccess && supported) {
    code = cudaOccupancyMaxActiveClusters(clusters, attend, &config);
  }
  if (code == cudaSuccess) answer.store(*clusters + 1, std::memory_order_relaxed);
  return code;
}

}  // namespace

cudaError_t launch(const Params& params, cudaStream_t stream) {
  cudaError_t code = allow_shared_memory();
  if (code != cudaSuccess) return code;
  const int rows = params.q_len * (params.heads / params.kv_heads);
  const int row_tiles = (rows + Config::kRows - 1) / Config::kRows;
  cudaLaunchAttribute attributes[2]{};
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(params.max_splits, row_tiles * params.kv_heads, params.batch);
  config.blockDim = dim3(Config::kThreads);
  config.dynamicSmemBytes = Config::kSharedBytes;
  config.stream = stream;
  config.attrs = attributes;
  // The pieces of a row tile as a cluster, which merges them sooner than the workspace does, where
  // all clusters run at once: else SMs that hold no whole cluster would stand idle.
  if (params.max_splits > 1 && params.max_splits <= kMaxCluster) {
    attributes[0].id = cudaLaunchAttributeClusterDimension;
    attributes[0].val.clusterDim = {config.gridDim.x, 1, 1};
    config.numAttrs = 1;
    int32_t at_once = 0;
    code = clusters_at_once(config, params.max_splits, &at_once);
    if (code != cudaSuccess) return code;
    if (static_cast<int64_t>(config.gridDim.y) * config.gridDim.z > at_once) config.numAttrs = 0;
  }
  if (params.programmatic_launch) {
    cudaLaunchAttribute& attribute = attributes[config.numAttrs++];
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
  }
  return cudaLaunchKernelEx(&config, attend, params);
}

cudaError_t occupancy(int32_t* ctas) {
  const cudaError_t set = allow_shared_memory();
  if (set != cudaSuccess) return set;
  return cudaOccupancyMaxActiveBlocksPerMultiprocessor(ctas, attend, Config::kThreads,
                                                       Config::kSharedBytes);
}

}  // namespace mla::xqa
