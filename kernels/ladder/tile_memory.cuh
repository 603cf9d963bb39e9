// Steps 4 to 9: the sizes of a row tile and of a tile of keys, and where both lie in shared memory.
#pragma once

#include "ladder/launch.cuh"
#include "ladder/request.cuh"

namespace mla::ladder {

constexpr int kTileRows = 64;
constexpr int kTileKeys = 64;
constexpr int kTileWarps = 8;
constexpr int kTileThreads = kTileWarps * kWarp;
constexpr int kTokenPieces = kHeadDim / 8;    // of 16 bytes
constexpr int kWeightPieces = kTileKeys / 8;  // of a row of weights
constexpr int kKeyTile = kTileKeys * kTokenPieces;

// Shared memory of a block, in pieces of 16 bytes: the query rows, key tiles, weights, and then
// for each of at most 4 warps across a maximum and a sum of every row.
struct Memory {
  uint4* query = shared_memory;
  uint4* keys = query + kTileRows * kTokenPieces;
  uint4* weights;
  float* maxima;
  float* sums;

  __device__ explicit Memory(int key_tiles) {
    weights = keys + key_tiles * kKeyTile;
    maxima = reinterpret_cast<float*>(weights + kTileRows * kWeightPieces);
    sums = maxima + 4 * kTileRows;
  }

  static size_t bytes(int key_tiles) {
    const size_t pieces = kTileRows * (kTokenPieces + kWeightPieces) + key_tiles * kKeyTile;
    return pieces * sizeof(uint4) + 2 * 4 * kTileRows * sizeof(float);
  }
};

}  // namespace mla::ladder
