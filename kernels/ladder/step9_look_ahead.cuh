// Step 9, addresses ahead: page ids are read a tile before they are needed, and once for a token.
//
// Counting bytes said that steps 6 to 8 should take 6000 clocks a tile; measured, it was more than
// twice that. What the count left out is the way to an address. Each thread copies 18 pieces of a
// tile, and for each divides by 72, divides by the page size, and waits for a page id from the
// block table, before it issues the copy; only then does the tile's arithmetic begin.
//
// Here a warp copies 8 whole tokens. Lane i works out where token i % 8 lies while the tile
// before is computed; when the time comes, the offset goes round by a shuffle and 32 lanes copy
// the 72 pieces of a token side by side.
#pragma once

#include "ladder/step8_warp_grid.cuh"

namespace mla::ladder::step9 {

using step5::Swizzled;

constexpr int kTokens = kTileKeys / kTileWarps;  // of a warp

struct FetchAhead {
  const Request& request;
  int first;       // of this warp's tokens, in the tile
  int64_t offset;  // of token lane % 8 of the tile to be copied next; -1: there is none

  __device__ FetchAhead(const Request& request, int begin)
      : request(request), first(threadIdx.x / kWarp * kTokens) {
    look_up(begin);
  }

  __device__ void look_up(int begin) {
    const int position = begin + first + lane_id() % kTokens;
    offset = position < request.kv_len ? request.token(position) - request.call.cache : -1;
  }

  __device__ void issue(uint4* keys, int begin) {
#pragma unroll
    for (int i = 0; i < kTokens; ++i) {
      const int64_t from = __shfl_sync(kAllLanes, offset, i);
      const bool valid = from >= 0;
      const bf16* token = request.call.cache + (valid ? from : 0);
      for (int piece = lane_id(); piece < kTokenPieces; piece += kWarp) {
        copy_async(keys + Swizzled::at(first + i, piece, kTokenPieces),
                   reinterpret_cast<const uint4*>(token) + piece, valid);
      }
    }
    look_up(begin + kTileKeys);
  }
};

inline cudaError_t run(const Call& call, cudaStream_t stream) {
  return step7::run<step8::kDown, FetchAhead>(call, stream);
}

}  // namespace mla::ladder::step9
