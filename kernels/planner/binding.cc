// tvm-ffi binding of the planner: torch tensors in, torch's current stream.
#include "abi/tensors.h"
#include "planner/launch.h"

namespace {

using mla::ffi::ints;
using mla::ffi::kAny;
using mla::ffi::TensorView;
using mla::planner::Params;
using mla::planner::Policy;

// knobs: overhead for greedy; split_blocks, max_splits and half_blocks for fixed size; others
// unused.
// least_rows, most_rows: of the requests that the plan is for.
void plan(TensorView seq_lens, TensorView q_begin, TensorView tiles, TensorView worker_begin,
          TensorView merge_items, TensorView counts, int64_t slot_capacity, int64_t heads,
          int64_t tile_rows, int64_t tile_kv, int64_t policy, int64_t overhead,
          int64_t split_blocks, int64_t max_splits, int64_t half_blocks, int64_t least_rows,
          int64_t most_rows) {
  Params p{};
  p.batch = static_cast<int32_t>(seq_lens.size(0));
  p.workers = static_cast<int32_t>(worker_begin.size(0)) - 1;
  if (p.batch > mla::planner::kMaxBatch || p.workers > mla::planner::kMaxWorkers) {
    TVM_FFI_THROW(ValueError) << "planner: got " << p.batch << " requests and " << p.workers
                              << " workers; supported: up to " << mla::planner::kMaxBatch << " and "
                              << mla::planner::kMaxWorkers;
  }
  p.seq_lens = ints(seq_lens, "seq_lens", {p.batch});
  p.q_begin = ints(q_begin, "q_begin", {p.batch + 1});
  p.tiles = reinterpret_cast<mla::WorkTile*>(ints(tiles, "tiles", {kAny, 8}));
  p.worker_begin = ints(worker_begin, "worker_begin", {p.workers + 1});
  p.merge_items = reinterpret_cast<mla::MergeItem*>(ints(merge_items, "merge_items", {kAny, 4}));
  p.counts = ints(counts, "counts", {4});
  p.tile_capacity = static_cast<int32_t>(tiles.size(0));
  p.group_capacity = static_cast<int32_t>(merge_items.size(0));
  p.slot_capacity = static_cast<int32_t>(slot_capacity);
  p.heads = static_cast<int32_t>(heads);
  p.tile_rows = static_cast<int32_t>(tile_rows);
  p.tile_kv = static_cast<int32_t>(tile_kv);
  p.policy = static_cast<Policy>(policy);
  p.overhead = static_cast<int32_t>(overhead);
  p.split_blocks = static_cast<int32_t>(split_blocks);
  p.max_splits = static_cast<int32_t>(max_splits);
  p.half_blocks = static_cast<int32_t>(half_blocks);
  p.least_rows = static_cast<int32_t>(least_rows);
  p.most_rows = static_cast<int32_t>(most_rows);
  mla::ffi::check(mla::planner::launch(p, mla::ffi::current_stream(seq_lens)), "planner");
}

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(plan, plan);
