// tvm-ffi binding of the merge: torch tensors in, torch's current stream.
#include "abi/tensors.h"
#include "merge/merge.h"

namespace {

using mla::ffi::floats;
using mla::ffi::ints;
using mla::ffi::kAny;
using mla::ffi::optional_floats;
using mla::ffi::TensorView;
using mla::merge::kLatent;
using mla::merge::OutType;

OutType out_type(const TensorView& out) {
  if (mla::ffi::is_dtype(out, kDLBfloat, 16)) return OutType::kBf16;
  if (mla::ffi::is_dtype(out, kDLFloat, 16)) return OutType::kFp16;
  if (mla::ffi::is_dtype(out, kDLFloat, 32)) return OutType::kFp32;
  mla::ffi::refuse("out", "bf16, fp16 and fp32");
}

// sinks, scale and lse may have no element: then there is no sink, out_scale is the number, and no
// lse is wanted.
void merge(TensorView partial_out, TensorView partial_lse, TensorView merge_items,
           TensorView q_begin, TensorView out, TensorView lse, TensorView sinks, TensorView scale,
           int64_t heads, double out_scale, double lse_scale, bool programmatic_launch) {
  mla::merge::Params p{};
  p.out_type = out_type(out);
  p.partial_out = floats(partial_out, "partial_out", {kAny, kAny, kLatent});
  p.tile_rows = static_cast<int32_t>(partial_out.size(1));
  p.partial_lse = floats(partial_lse, "partial_lse", {partial_out.size(0), p.tile_rows});
  p.merge_items = reinterpret_cast<mla::MergeItem*>(ints(merge_items, "merge_items", {kAny, 4}));
  p.groups = static_cast<int32_t>(merge_items.size(0));
  p.q_begin = ints(q_begin, "q_begin", {kAny});
  const int64_t rows = out.size(0);
  const DLDataType type = out.dtype();
  p.out = mla::ffi::data(out, "out", DLDataTypeCode(type.code), type.bits, {rows, kLatent});
  p.lse = optional_floats(lse, "lse", {rows});
  p.sinks = optional_floats(sinks, "sinks", {heads});
  p.scale = optional_floats(scale, "scale", {1});
  p.heads = static_cast<int32_t>(heads);
  p.out_scale = static_cast<float>(out_scale);
  p.lse_scale = static_cast<float>(lse_scale);
  p.programmatic_launch = programmatic_launch;
  mla::ffi::check(mla::merge::launch(p, mla::ffi::current_stream(out)), "merge");
}

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(merge, merge);
