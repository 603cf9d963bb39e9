// tvm-ffi binding of the ladder: one call for all steps, torch's current stream.
#include "abi/tensors.h"
#include "ladder/call.h"

namespace {

using mla::ffi::floats;
using mla::ffi::ints;
using mla::ffi::is_dtype;
using mla::ffi::TensorView;
using mla::ladder::bf16;
using mla::ladder::Call;
using mla::ladder::kHeadDim;
using mla::ladder::kLatent;

// The data of a CUDA tensor of which all but the first dimension follow each other without a gap.
void* rows(const TensorView& tensor, const char* name, DLDataTypeCode code, int bits, int ndim) {
  bool fits = tensor.device().device_type == kDLCUDA && is_dtype(tensor, code, bits) &&
              tensor.ndim() == ndim;
  int64_t dense = 1;
  for (int axis = ndim - 1; fits && axis > 0; --axis) {
    fits = tensor.size(axis) == 1 || tensor.stride(axis) == dense;
    dense *= tensor.size(axis);
  }
  if (!fits) {
    mla::ffi::refuse(name, tensor, "a CUDA tensor of the ladder's type, without gaps in a page");
  }
  return mla::ffi::address(tensor);
}

bf16* bf16s(const TensorView& tensor, const char* name, int64_t columns) {
  return static_cast<bf16*>(mla::ffi::data(tensor, name, kDLBfloat, 16, {mla::ffi::kAny, columns}));
}

// Elements of fp32 scratch for `decode`.
int64_t scratch(int64_t step, int64_t total_rows, int64_t max_kv, int64_t num_splits) {
  Call call{};
  call.total_rows = static_cast<int32_t>(total_rows);
  call.max_kv = static_cast<int32_t>(max_kv);
  call.num_splits = static_cast<int32_t>(num_splits);
  return mla::ladder::scratch_floats(static_cast<int>(step), call);
}

// query [rows, 576], cache [pages, page_size, 576], block_table [batch, max_pages], seq_lens
// [batch], q_begin [batch + 1], out [rows, 512], lse [rows], scratch 1-D. max_q_len and max_kv are
// bounds of the requests' query tokens and keys.
void decode(int64_t step, TensorView query, TensorView cache, TensorView block_table,
            TensorView seq_lens, TensorView q_begin, TensorView out, TensorView lse,
            TensorView scratch_memory, int64_t heads, int64_t max_q_len, int64_t max_kv,
            int64_t num_splits, double scale_log2, double out_scale) {
  Call call{};
  call.query = bf16s(query, "query", kHeadDim);
  call.cache = static_cast<bf16*>(rows(cache, "cache", kDLBfloat, 16, 3));
  call.block_table = static_cast<int32_t*>(rows(block_table, "block_table", kDLInt, 32, 2));
  call.batch = static_cast<int32_t>(block_table.size(0));
  call.seq_lens = ints(seq_lens, "seq_lens", {call.batch});
  call.q_begin = ints(q_begin, "q_begin", {call.batch + 1});
  call.out = bf16s(out, "out", kLatent);
  call.total_rows = static_cast<int32_t>(out.size(0));
  call.lse = floats(lse, "lse", {call.total_rows});
  call.scratch = floats(scratch_memory, "scratch", {mla::ffi::kAny});
  call.page_stride = cache.stride(0);
  call.table_stride = block_table.stride(0);
  call.page_size = static_cast<int32_t>(cache.size(1));
  call.heads = static_cast<int32_t>(heads);
  call.max_rows = static_cast<int32_t>(max_q_len * heads);
  call.max_kv = static_cast<int32_t>(max_kv);
  call.num_splits = static_cast<int32_t>(num_splits);
  call.scale_log2 = static_cast<float>(scale_log2);
  call.out_scale = static_cast<float>(out_scale);
  const int number = static_cast<int>(step);
  if (cache.size(2) != kHeadDim || query.size(0) != call.total_rows) {
    TVM_FFI_THROW(ValueError) << "cache, query, out: got shapes that do not fit each other";
  }
  if (scratch_memory.numel() < mla::ladder::scratch_floats(number, call)) {
    TVM_FFI_THROW(ValueError) << "scratch: got " << scratch_memory.numel() << " elements; needed "
                              << mla::ladder::scratch_floats(number, call);
  }
  mla::ffi::check(mla::ladder::run(number, call, mla::ffi::current_stream(query)), "ladder");
}

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(decode, decode);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(scratch, scratch);
