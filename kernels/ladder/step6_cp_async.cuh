// Step 6, cp.async: the next tile is on its way while this one is worked on.
//
// Before, a block loaded 73 KB, waited, and then computed: memory rested while the tensor cores
// worked, and the other way round. cp.async brings 16 bytes from global to shared memory without a
// register and without waiting. With two tiles of keys in shared memory, copies of tile i + 1 are
// issued before tile i is attended. The longer of the two times should remain, in place of their
// sum.
//
// One barrier a tile is enough for both: behind it tile i has landed for all threads, and all are
// done with tile i - 1, whose place tile i + 1 takes.
#pragma once

#include "ladder/step5_swizzle.cuh"

namespace mla::ladder::step6 {

using step5::Swizzled;

constexpr int kStages = 2;

// Issues the copies of a tile of keys.
struct Fetch {
  const Request& request;

  __device__ Fetch(const Request& request, int) : request(request) {}

  // The tile that begins at key `begin`.
  __device__ void issue(uint4* keys, int begin) const {
    for (int i = threadIdx.x; i < kKeyTile; i += kTileThreads) {
      const int key = i / kTokenPieces;
      const int piece = i - key * kTokenPieces;
      const bool valid = begin + key < request.kv_len;
      // the block table names no token from kv_len on: an address that is not read
      const bf16* token = valid ? request.token(begin + key) : request.call.cache;
      copy_async(keys + Swizzled::at(key, piece, kTokenPieces),
                 reinterpret_cast<const uint4*>(token) + piece, valid);
    }
  }
};

// Keys [begin, end) in tiles; `begin` is a multiple of a tile.
template <class Fetch, class Tile>
__device__ void walk(Tile& tile, const Memory& memory, int begin, int end) {
  Fetch fetch(tile.request, begin);
  if (begin < end) fetch.issue(memory.keys, begin);
  tile.copy_query();
  int stage = 0;
  for (; begin < end; begin += kTileKeys) {
    wait_for_copies();
    __syncthreads();
    const int next = begin + kTileKeys;
    if (next < end) fetch.issue(memory.keys + (1 - stage) * kKeyTile, next);
    tile.attend(memory.keys + stage * kKeyTile, begin);
    stage = 1 - stage;
  }
}

__global__ void __launch_bounds__(kTileThreads, 1) attend(const __grid_constant__ Call call) {
  const Request request(call, blockIdx.y);
  const int first_row = blockIdx.x * kTileRows;
  if (first_row >= request.rows) return;
  const int last_row = min(first_row + kTileRows, request.rows) - 1;
  const Memory memory(kStages);
  RowTile<Swizzled, 4> tile(request, memory, first_row);
  walk<Fetch>(tile, memory, 0, request.visible(last_row));
  tile.store_result();
}

inline cudaError_t run(const Call& call, cudaStream_t stream) {
  const unsigned batch = call.batch;
  const Shape shape{dim3(ceil_div(call.max_rows, kTileRows), batch), kTileThreads,
                    Memory::bytes(kStages)};
  return launch(shape, stream, attend, call);
}

}  // namespace mla::ladder::step6
