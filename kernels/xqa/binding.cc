// tvm-ffi binding of the XQA-style decode: torch tensors in, torch's current stream.
#include <algorithm>

#include "abi/tensors.h"
#include "xqa/config.h"

namespace {

using mla::ffi::address;
using mla::ffi::floats;
using mla::ffi::ints;
using mla::ffi::kAny;
using mla::ffi::optional_floats;
using mla::ffi::refuse;
using mla::ffi::TensorView;
using mla::xqa::Config;
using mla::xqa::Pages;
using mla::xqa::Params;
using mla::xqa::Type;

constexpr int64_t kUnit = 16;          // bytes of one cp.async, and of vector loads and stores
constexpr int64_t kMaxBlocks = 65535;  // of a grid's y and z
// of a request, and bytes from a page's first token to its last: the kernel adds them as int32
constexpr int64_t kMaxTokens = 1 << 30, kMaxPageBytes = INT32_MAX;

bool is_type(const TensorView& tensor, Type type) {
  switch (type) {
    case Type::kBf16:
      return mla::ffi::is_dtype(tensor, kDLBfloat, 16);
    case Type::kFp16:
      return mla::ffi::is_dtype(tensor, kDLFloat, 16);
    case Type::kE4m3:
      return mla::ffi::is_dtype(tensor, kDLFloat8_e4m3fn, 8);
    case Type::kFp32:
      return mla::ffi::is_dtype(tensor, kDLFloat, 32);
  }
  return false;
}

Type type_of(const TensorView& tensor, const char* name) {
  for (const Type type : {Type::kBf16, Type::kFp16, Type::kE4m3, Type::kFp32}) {
    if (is_type(tensor, type)) return type;
  }
  refuse(name, tensor, "bf16, fp16, e4m3, fp32");
}

int64_t element_bytes(const TensorView& tensor) { return tensor.dtype().bits / 8; }

// A CUDA tensor of this type whose rows are contiguous and begin at multiples of 16 bytes.
void check_rows(const TensorView& tensor, const char* name, Type type, int64_t columns) {
  if (tensor.device().device_type != kDLCUDA || !is_type(tensor, type)) {
    refuse(name, tensor, "a CUDA tensor of the type that this kernel was compiled for");
  }
  const int last = tensor.ndim() - 1;
  bool fits = tensor.size(last) >= columns && tensor.stride(last) == 1;
  for (int i = 0; i < last; ++i) {
    fits = fits && (tensor.size(i) == 1 || tensor.stride(i) * element_bytes(tensor) % kUnit == 0);
  }
  if (!fits || reinterpret_cast<uintptr_t>(address(tensor)) % kUnit != 0) {
    refuse(name, tensor, "rows of this kernel's width, contiguous, at multiples of 16 bytes");
  }
}

void set_query(Params& p, const TensorView& query) {
  const int dims = query.ndim();
  if (dims != 3 && dims != 4) {
    refuse("query", query, "[tokens, heads, dim], [batch, q_len, heads, dim]");
  }
  check_rows(query, "query", Config::kQuery, Config::kQkDim);
  const bool several = dims == 4 && query.size(0) > 1 && query.size(1) > 1;
  const bool apart = several && query.stride(0) != query.size(1) * query.stride(1);
  if (query.size(dims - 1) != Config::kQkDim || apart) {
    refuse("query", query, "rows of this kernel's width, tokens equally far from each other");
  }
  p.query = address(query);
  p.heads = static_cast<int32_t>(query.size(dims - 2));
  p.query_head = query.stride(dims - 2) * element_bytes(query);
  p.query_token = query.stride(dims - 3) * element_bytes(query);
  if (dims == 4 && query.size(1) == 1) p.query_token = query.stride(0) * element_bytes(query);
}

struct Sizes {
  int64_t kv_heads;
  int64_t page_size;
};

Sizes set_pages(Pages& pages, const TensorView& cache, const char* name, int64_t columns,
                bool nhd) {
  const int dims = cache.ndim();
  if (dims != 3 && dims != 4) {
    refuse(name, cache, "[pages, page_size, dim], or 4 dimensions with heads");
  }
  check_rows(cache, name, Config::kCache, columns);
  const int token = dims == 4 && !nhd ? 2 : 1, head = dims == 4 ? 3 - token : -1;
  pages.data = address(cache);
  pages.page_stride = cache.stride(0) * element_bytes(cache);
  pages.token_stride = cache.stride(token) * element_bytes(cache);
  pages.head_stride = head < 0 ? 0 : cache.stride(head) * element_bytes(cache);
  return {head < 0 ? 1 : cache.size(head), cache.size(token)};
}

void set_caches(Params& p, const TensorView& keys, const TensorView& values, bool nhd) {
  const Sizes sizes = set_pages(p.keys, keys, "k_cache", Config::kQkDim, nhd);
  const Sizes same = set_pages(p.values, values, "v_cache", Config::kVDim, nhd);
  if (same.kv_heads != sizes.kv_heads || same.page_size != sizes.page_size) {
    refuse("v_cache", values, "the heads and the page size of k_cache");
  }
  while (1 << p.page_shift < sizes.page_size) ++p.page_shift;
  constexpr int kLeast = Config::kSmallPages ? 0 : 4, kMost = Config::kSmallPages ? 3 : 7;
  if (p.page_shift < kLeast || p.page_shift > kMost || 1 << p.page_shift != sizes.page_size) {
    refuse(
        "k_cache", keys,
        Config::kSmallPages ? "pages of 1, 2, 4 or 8 tokens" : "pages of 16, 32, 64 or 128 tokens");
  }
  if ((sizes.page_size - 1) * std::max(p.keys.token_stride, p.values.token_stride) >
      kMaxPageBytes) {
    const bool of_keys = p.keys.token_stride >= p.values.token_stride;
    refuse(of_keys ? "k_cache" : "v_cache", of_keys ? keys : values,
           "pages whose tokens lie within 2 GiB");
  }
  p.kv_heads = static_cast<int32_t>(sizes.kv_heads);
  if (p.kv_heads < 1 || p.heads % p.kv_heads != 0) {
    refuse("query", std::to_string(p.heads) + " heads", "a multiple of the cache's");
  }
}

void set_table(Params& p, const TensorView& tables) {
  const int dims = tables.ndim();
  const bool both = dims == 3 && tables.size(1) == 2 && !Config::kSharedKv;
  if (!mla::ffi::is_dtype(tables, kDLInt, 32) || tables.device().device_type != kDLCUDA ||
      (dims != 2 && !both) || (tables.size(dims - 1) > 1 && tables.stride(dims - 1) != 1)) {
    refuse("block_tables", tables,
           "int32 [batch, max_pages]; [batch, 2, max_pages] without shared_kv");
  }
  const int32_t* table = reinterpret_cast<const int32_t*>(address(tables));
  p.keys.table = table;
  p.values.table = both ? table + tables.stride(1) : table;
  p.table_stride = tables.stride(0);
  if (tables.size(dims - 1) << p.page_shift > kMaxTokens) {
    refuse("block_tables", tables, "rows of up to 2^30 tokens");
  }
  p.max_pages = static_cast<int32_t>(tables.size(dims - 1));
  p.batch = static_cast<int32_t>(tables.size(0));
}

// `rows`: of the query.
void set_results(Params& p, const TensorView& out, const TensorView& lse, int64_t rows) {
  const bool fits = out.device().device_type == kDLCUDA && out.IsContiguous() &&
                    out.size(out.ndim() - 1) == Config::kVDim &&
                    out.numel() / Config::kVDim == rows;
  if (!fits || reinterpret_cast<uintptr_t>(address(out)) % kUnit != 0) {
    refuse("out", out, "a row of v_dim for each of the query, contiguous, at 16 bytes");
  }
  p.out = address(out);
  p.out_type = type_of(out, "out");
  if (lse.numel() == 0) return;
  if (!is_type(lse, Type::kFp32) || !lse.IsContiguous() || lse.numel() != rows) {
    refuse("lse", lse, "fp32, contiguous, one for each row of the query");
  }
  p.lse = reinterpret_cast<float*>(address(lse));
}

void set_mask(Params& p, const TensorView& mask, int64_t rows) {
  if (mask.numel() == 0) return;
  const bool fits = mask.device().device_type == kDLCUDA && mask.IsContiguous() &&
                    mask.numel() / mask.size(mask.ndim() - 1) == rows / p.heads;
  if (!fits || !mla::ffi::is_dtype(mask, kDLUInt, 16)) {
    refuse("mask", mask, "uint16, contiguous, [tokens, words] or [batch, q_len, words]");
  }
  p.mask = reinterpret_cast<const uint16_t*>(address(mask));
  p.mask_words = static_cast<int32_t>(mask.size(mask.ndim() - 1));
}

void set_pieces(Params& p, const TensorView& partial_out, const TensorView& partial_lse,
                const TensorView& counters) {
  if (p.q_len < 1 || p.max_splits < 1 || p.split_tokens < 1 ||
      p.max_splits > mla::xqa::kMaxSplits) {
    const std::string got = std::to_string(p.q_len) + ", " + std::to_string(p.max_splits) + ", " +
                            std::to_string(p.split_tokens);
    refuse("q_len, max_splits, split_tokens", got, "1 or more, and up to 128 splits");
  }
  const int64_t rows = static_cast<int64_t>(p.q_len) * (p.heads / p.kv_heads);
  const int64_t in_y = (rows + Config::kRows - 1) / Config::kRows * p.kv_heads;
  if (in_y > kMaxBlocks || p.batch > kMaxBlocks) {
    const std::string got = std::to_string(p.batch) + " requests of " + std::to_string(in_y);
    refuse("query", got + " row tiles", "up to 65535 of either");
  }
  if (p.max_splits == 1) return;
  const int64_t groups = in_y * p.batch;
  p.counters = ints(counters, "counters", {kAny});
  p.partial_out = floats(partial_out, "partial_out", {kAny, Config::kRows, Config::kVDim});
  p.partial_lse = floats(partial_lse, "partial_lse", {kAny, Config::kRows});
  if (counters.size(0) < groups || partial_out.size(0) < groups * p.max_splits ||
      partial_lse.size(0) < groups * p.max_splits) {
    refuse("partial_out", partial_out, "room for every piece and every row tile");
  }
}

// lse, partials, counters, q_begin, mask, sinks and the scales' tensors may have no element: then
// they are not there. The scales' tensors win over the numbers.
void xqa(TensorView query, TensorView k_cache, TensorView v_cache, TensorView out, TensorView lse,
         TensorView partial_out, TensorView partial_lse, TensorView counters,
         TensorView block_tables, TensorView seq_lens, TensorView q_begin, TensorView mask,
         TensorView sinks, TensorView bmm1_tensor, TensorView bmm2_tensor, double bmm1_scale,
         double bmm2_scale, double lse_scale, int64_t q_len, int64_t window_left,
         int64_t max_splits, int64_t split_tokens, bool nhd, bool programmatic_launch) {
  Params p{};
  set_query(p, query);
  set_caches(p, k_cache, v_cache, nhd);
  set_table(p, block_tables);
  const int64_t rows = query.numel() / Config::kQkDim;
  set_results(p, out, lse, rows);
  set_mask(p, mask, rows);
  p.seq_lens = ints(seq_lens, "seq_lens", {p.batch});
  p.total_q = static_cast<int32_t>(rows / p.heads);
  p.q_begin = q_begin.numel() ? ints(q_begin, "q_begin", {p.batch + 1}) : nullptr;
  p.sinks = optional_floats(sinks, "sinks", {p.heads});
  p.bmm1_scale = optional_floats(bmm1_tensor, "bmm1_scale", {1});
  p.bmm2_scale = optional_floats(bmm2_tensor, "bmm2_scale", {1});
  p.bmm1 = static_cast<float>(bmm1_scale);
  p.bmm2 = static_cast<float>(bmm2_scale);
  p.lse_scale = static_cast<float>(lse_scale);
  p.q_len = static_cast<int32_t>(q_len);
  p.window_left = static_cast<int32_t>(window_left);
  p.max_splits = static_cast<int32_t>(max_splits);
  p.split_tokens = static_cast<int32_t>(split_tokens);
  p.programmatic_launch = programmatic_launch;
  if (p.q_begin == nullptr && rows != q_len * p.batch * p.heads) {
    refuse("query", query, "q_len tokens of each request");
  }
  set_pieces(p, partial_out, partial_lse, counters);
  mla::ffi::check(mla::xqa::launch(p, mla::ffi::current_stream(query)), "xqa");
}

int64_t occupancy() {
  int32_t ctas = 0;
  mla::ffi::check(mla::xqa::occupancy(&ctas), "xqa");
  return ctas;
}

int64_t tile_rows() { return Config::kRows; }
int64_t tile_kv() { return Config::kTile; }

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(xqa, xqa);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(occupancy, occupancy);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(tile_rows, tile_rows);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(tile_kv, tile_kv);
