// tvm-ffi binding of the planner: torch tensors in, torch's current stream.
#include "abi/tensors.h"
#include "planner/launch.h"

namespace {

using mla::ffi::ints;
using mla::ffi::kAny;
using mla::ffi::TensorView;
using mla::planner::Params;

void plan(TensorView seq_lens, TensorView q_begin, TensorView tiles, TensorView worker_begin,
          TensorView counts, int64_t slot_capacity, int64_t group_capacity, int64_t total_q,
          int64_t heads, int64_t tile_rows, int64_t tile_kv, int64_t split_blocks,
          int64_t max_splits, int64_t half_blocks) {
  Params p{};
  p.batch = static_cast<int32_t>(seq_lens.size(0));
  p.workers = static_cast<int32_t>(worker_begin.size(0)) - 1;
  if (p.batch > mla::planner::kMaxBatch) {
    TVM_FFI_THROW(ValueError) << "planner: got " << p.batch << " requests; supported: up to "
                              << mla::planner::kMaxBatch;
  }
  p.seq_lens = ints(seq_lens, "seq_lens", {p.batch});
  p.q_begin = ints(q_begin, "q_begin", {p.batch + 1});
  p.tiles = reinterpret_cast<mla::WorkTile*>(ints(tiles, "tiles", {kAny, 8}));
  p.worker_begin = ints(worker_begin, "worker_begin", {p.workers + 1});
  p.counts = ints(counts, "counts", {4});
  p.tile_capacity = static_cast<int32_t>(tiles.size(0));
  p.slot_capacity = static_cast<int32_t>(slot_capacity);
  p.group_capacity = static_cast<int32_t>(group_capacity);
  p.total_q = static_cast<int32_t>(total_q);
  p.heads = static_cast<int32_t>(heads);
  p.tile_rows = static_cast<int32_t>(tile_rows);
  p.tile_kv = static_cast<int32_t>(tile_kv);
  p.split_blocks = static_cast<int32_t>(split_blocks);
  p.max_splits = static_cast<int32_t>(max_splits);
  p.half_blocks = static_cast<int32_t>(half_blocks);
  mla::ffi::check(mla::planner::launch(p, mla::ffi::current_stream(seq_lens)), "planner");
}

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(plan, plan);
