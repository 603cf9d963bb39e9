// Thread blocks on a CPU: enough of CUDA's words to compile kernels with a C++ compiler and run
// them, block after block, in one thread of the host.
//
// Each thread of a block is a fiber of its own. Barriers, shuffles and warp-wide instructions
// switch between fibers; whatever lies between two of them runs without interruption, in an order
// that the caller turns round, so that a missing barrier shows as another result.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime_api.h>
#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <functional>
#include <memory>
#include <vector>

#undef __device__
#undef __global__
#undef __shared__
#undef __launch_bounds__
#undef __grid_constant__
#define __device__
#define __global__
#define __shared__
#define __launch_bounds__(...)
#define __grid_constant__

inline uint3 threadIdx, blockIdx;
inline dim3 gridDim, blockDim;
using std::max;
using std::min;

namespace host {

constexpr int kWarp = 32;
constexpr size_t kStackBytes = 64 << 10;
constexpr size_t kMaxShared = 227 << 10;  // what a block may have on compute capability 9.0

struct Fiber {
  ucontext_t context;  // to start it; later switches jump, which costs no system call
  jmp_buf place;
  std::unique_ptr<char[]> stack{new char[kStackBytes]};
  bool started = false, done = false;
  std::vector<std::function<void()>> copies;  // asked for by copy_async, not waited for yet
};

// Who has come to a meeting point, and how often all have.
struct Meeting {
  int arrived = 0;
  long rounds = 0;
  void* given[kWarp] = {};
};

inline std::vector<Fiber> fibers;
inline std::vector<Meeting> warps;
inline Meeting whole_block;
inline int current, finished;
inline bool failed;
inline bool reversed;  // fibers take turns from the last to the first
inline ucontext_t scheduler;
inline jmp_buf scheduler_place;
inline std::function<void()> body;

inline void yield() {
  if (_setjmp(fibers[current].place) == 0) _longjmp(scheduler_place, 1);
}

// The launch fails: the block's other fibers are left where they are.
inline void stop(const char* why) {
  std::fprintf(stderr, "block (%u, %u, %u): %s\n", blockIdx.x, blockIdx.y, blockIdx.z, why);
  failed = true;
}

// Waits until `count` fibers have come; the last one to come calls `last`.
template <class Last>
void meet(Meeting& meeting, int count, Last last) {
  if (++meeting.arrived == count) {
    last();
    meeting.arrived = 0;
    ++meeting.rounds;
    return;
  }
  for (const long round = meeting.rounds; meeting.rounds == round;) yield();
}

// `together` gets what each of the warp's 32 lanes has given.
template <class Given, class Together>
void in_warp(Given& given, Together together) {
  Meeting& warp = warps[current / kWarp];
  warp.given[current % kWarp] = &given;
  meet(warp, kWarp, [&] { together(reinterpret_cast<Given**>(warp.given)); });
}

inline void enter() {
  body();
  if (!fibers[current].copies.empty()) stop("a thread ends with copies under way");
  fibers[current].done = true;
  ++finished;
  _longjmp(scheduler_place, 1);
}

// Runs the current fiber until it waits or ends.
inline void resume() {
  Fiber& fiber = fibers[current];
  if (_setjmp(scheduler_place) != 0) return;
  if (fiber.started) _longjmp(fiber.place, 1);
  fiber.started = true;
  swapcontext(&scheduler, &fiber.context);
}

inline void run_block(int threads) {
  fibers.resize(threads);
  warps.assign(threads / kWarp, {});
  whole_block = {};
  finished = 0;
  for (Fiber& fiber : fibers) {
    fiber.started = fiber.done = false;
    fiber.copies.clear();
    getcontext(&fiber.context);
    fiber.context.uc_stack = {fiber.stack.get(), 0, kStackBytes};
    fiber.context.uc_link = &scheduler;
    makecontext(&fiber.context, enter, 0);
  }
  while (finished < threads && !failed) {
    const int before = finished;
    long met = whole_block.rounds;
    for (const Meeting& warp : warps) met += warp.rounds;
    for (int i = 0; i < threads; ++i) {
      current = reversed ? threads - 1 - i : i;
      if (fibers[current].done) continue;
      threadIdx = {static_cast<unsigned>(current), 0, 0};
      resume();
    }
    long now = whole_block.rounds;
    for (const Meeting& warp : warps) now += warp.rounds;
    if (finished == before && now == met) stop("threads wait for some that never come");
  }
}

// Runs every block of a grid, true if none failed. Shared memory holds NaN at first; bytes past its
// end must stay.
inline bool run_grid(dim3 grid, dim3 block, unsigned char* shared, size_t shared_bytes,
                     std::function<void()> kernel) {
  body = std::move(kernel);
  failed = false;
  gridDim = grid;
  blockDim = block;
  for (unsigned z = 0; z < grid.z; ++z) {
    for (unsigned y = 0; y < grid.y; ++y) {
      for (unsigned x = 0; x < grid.x; ++x) {
        blockIdx = {x, y, z};
        std::memset(shared, 0xff, kMaxShared);
        run_block(block.x);
        const auto past = shared + shared_bytes, end = shared + kMaxShared;
        if (std::any_of(past, end, [](unsigned char byte) { return byte != 0xff; })) {
          stop("shared memory written past its end");
        }
        if (failed) return false;
      }
    }
  }
  return true;
}

}  // namespace host

inline void __syncthreads() {
  host::meet(host::whole_block, static_cast<int>(host::fibers.size()) - host::finished, [] {});
}

inline float __shfl_xor_sync(unsigned, float value, int lanes) {
  struct Given {
    float value, result;
    int lanes;
  } given{value, 0.0f, lanes};
  host::in_warp(given, [](Given** lane) {
    for (int i = 0; i < host::kWarp; ++i) lane[i]->result = lane[i ^ lane[i]->lanes]->value;
  });
  return given.result;
}

template <class T>
T __shfl_sync(unsigned, T value, int from) {
  struct Given {
    T value, result;
    int from;
  } given{value, value, from};
  host::in_warp(given, [](Given** lane) {
    for (int i = 0; i < host::kWarp; ++i) lane[i]->result = lane[lane[i]->from]->value;
  });
  return given.result;
}

inline float __uint_as_float(unsigned bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}
