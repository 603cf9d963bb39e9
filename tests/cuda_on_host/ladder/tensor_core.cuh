// kernels/ladder/tensor_core.cuh in plain C++, for tests on a CPU. It also counts how many turns
// the banks of shared memory need for what ldmatrix reads.
#pragma once

#include "block.h"

namespace mla::ladder {

inline long matrix_reads, matrix_turns;  // eight rows of 16 bytes each; turns at 128 bytes each

// The eight rows of matrix j, 16 bytes each, are given by lanes 8 j .. 8 j + 7.
inline void read_matrices(const uint4* const* rows, uint16_t (&matrix)[4][8][8]) {
  for (int j = 0; j < 4; ++j) {
    int asked[8] = {};  // of each group of four banks
    for (int i = 0; i < 8; ++i) {
      std::memcpy(matrix[j][i], rows[8 * j + i], sizeof(uint4));
      ++asked[reinterpret_cast<uintptr_t>(rows[8 * j + i]) / sizeof(uint4) % 8];
    }
    ++matrix_reads;
    matrix_turns += *std::max_element(asked, asked + 8);
  }
}

template <bool kTransposed>
void load_any(uint32_t (&to)[4], const uint4* row) {
  struct Given {
    const uint4* row;
    uint32_t* to;
  } given{row, to};
  host::in_warp(given, [](Given** lane) {
    const uint4* rows[host::kWarp];
    for (int i = 0; i < host::kWarp; ++i) rows[i] = lane[i]->row;
    uint16_t matrix[4][8][8];
    read_matrices(rows, matrix);
    for (int i = 0; i < host::kWarp; ++i) {
      for (int j = 0; j < 4; ++j) {
        const int r = i / 4, c = i % 4 * 2;
        const uint32_t low = kTransposed ? matrix[j][c][r] : matrix[j][r][c];
        const uint32_t high = kTransposed ? matrix[j][c + 1][r] : matrix[j][r][c + 1];
        lane[i]->to[j] = low | high << 16;
      }
    }
  });
}

inline void load_matrices(uint32_t (&to)[4], const uint4* row) { load_any<false>(to, row); }
inline void load_transposed(uint32_t (&to)[4], const uint4* row) { load_any<true>(to, row); }

inline float half_of(uint32_t word, int high) {
  return __uint_as_float(high ? word & 0xffff0000u : word << 16);
}

inline void multiply_add(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  struct Given {
    float* c;
    const uint32_t* a;
    uint32_t b[2];
  } given{c, a, {b0, b1}};
  host::in_warp(given, [](Given** lane) {
    float a[16][16], b[16][8];
    for (int i = 0; i < host::kWarp; ++i) {
      for (int high = 0; high < 2; ++high) {
        const int near = i / 4, pair = i % 4 * 2 + high;
        for (int part = 0; part < 4; ++part) {
          a[near + part % 2 * 8][pair + part / 2 * 8] = half_of(lane[i]->a[part], high);
        }
        for (int part = 0; part < 2; ++part)
          b[pair + part * 8][near] = half_of(lane[i]->b[part], high);
      }
    }
    for (int i = 0; i < host::kWarp; ++i) {
      for (int part = 0; part < 4; ++part) {
        const int row = i / 4 + part / 2 * 8, column = i % 4 * 2 + part % 2;
        for (int k = 0; k < 16; ++k) lane[i]->c[part] += a[row][k] * b[k][column];
      }
    }
  });
}

// Copied at the wait and not before, so that what is read too early is not there yet.
inline void copy_async(uint4* to, const uint4* from, bool valid) {
  std::memset(to, 0xff, sizeof(uint4));
  host::fibers[host::current].copies.push_back([=] { *to = valid ? *from : uint4{}; });
}

inline void wait_for_copies() {
  auto& copies = host::fibers[host::current].copies;
  for (const auto& copy : copies) copy();
  copies.clear();
}

}  // namespace mla::ladder
