// CUDA's kernel language on the CPU, for tests on machines without a GPU: a .cu file compiled with g++ and this header
// runs unchanged. Blocks run one after another; each thread of a block is a fiber (fibers.h) that runs until a barrier,
// a shuffle or its end, in an order that a test chooses.
//
// Faithful: barriers (a barrier that not every live thread reaches is an error), warp shuffles and votes over full
// warps, static and dynamic shared memory (dynamic memory starts as NaN; static memory keeps what the block before left
// there), atomics, the limits of a launch. Not covered: races between blocks, partial-warp masks, barriers of different
// places in the code that meet, inline PTX, tensor cores, TMA, clusters, speed.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "fibers.h"

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __shared__ static  // blocks run one after another: one copy is enough
#define __restrict__ __restrict

struct alignas(16) uint4 {
  unsigned x, y, z, w;
};

using cudaStream_t = void*;
using cudaError_t = int;
constexpr cudaError_t cudaSuccess = 0;
inline cudaError_t cudaGetLastError() { return cudaSuccess; }
inline const char* cudaGetErrorString(cudaError_t) { return "no error"; }

#define threadIdx (::cuda_on_cpu::current_thread().index)
#define blockIdx (::cuda_on_cpu::current_block().index)
#define blockDim (::cuda_on_cpu::current_block().size)
#define gridDim (::cuda_on_cpu::current_block().grid)

inline void __syncthreads() { cuda_on_cpu::block_barrier(); }
// The first barrier ends the reading of the votes before, the second the voting: blocks run one after another.
inline int __syncthreads_or(int predicate) {
  static uint64_t votes = 0;
  const uint64_t before = votes;
  cuda_on_cpu::block_barrier();
  votes += predicate != 0;
  cuda_on_cpu::block_barrier();
  return votes != before;
}
inline void __syncwarp() { cuda_on_cpu::warp_barrier(); }

namespace cuda_on_cpu {

constexpr unsigned kFullMask = 0xffffffffu;

// Every lane of the warp gives a value and reads the value that lane `source` gave.
template <typename T>
T exchange(unsigned mask, T value, unsigned source) {
  static_assert(sizeof(T) <= sizeof(uint64_t), "a shuffle moves at most 64 bits");
  uint64_t word = 0;
  std::memcpy(&word, &value, sizeof(T));
  const uint64_t* words = warp_exchange(mask, word);
  T result;
  std::memcpy(&result, &words[source % kWarpSize], sizeof(T));
  return result;
}

}  // namespace cuda_on_cpu

template <typename T>
T __shfl_sync(unsigned mask, T value, int source) {
  return cuda_on_cpu::exchange(mask, value, source);
}
template <typename T>
T __shfl_xor_sync(unsigned mask, T value, int lane_mask) {
  return cuda_on_cpu::exchange(mask, value, cuda_on_cpu::lane() ^ lane_mask);
}
template <typename T>
T __shfl_down_sync(unsigned mask, T value, unsigned delta) {
  const unsigned source = cuda_on_cpu::lane() + delta;
  return cuda_on_cpu::exchange(mask, value, source < cuda_on_cpu::kWarpSize ? source : cuda_on_cpu::lane());
}
template <typename T>
T __shfl_up_sync(unsigned mask, T value, unsigned delta) {
  const unsigned lane = cuda_on_cpu::lane();
  return cuda_on_cpu::exchange(mask, value, lane >= delta ? lane - delta : lane);
}
inline unsigned __ballot_sync(unsigned mask, int predicate) {
  const uint64_t* votes = cuda_on_cpu::warp_exchange(mask, predicate != 0);
  unsigned ballot = 0;
  for (unsigned i = 0; i < cuda_on_cpu::kWarpSize; ++i) {
    ballot |= static_cast<unsigned>(votes[i]) << i;
  }
  return ballot;
}
inline int __any_sync(unsigned mask, int predicate) { return __ballot_sync(mask, predicate) != 0; }

template <typename T>
T __ldg(const T* address) { return *address; }
template <typename T>
T atomicAdd(T* address, T value) {
  const T old = *address;
  *address = old + value;
  return old;
}
template <typename T>
T atomicMax(T* address, T value) {
  const T old = *address;
  *address = std::max(old, value);
  return old;
}
inline unsigned atomicOr(unsigned* address, unsigned value) {
  const unsigned old = *address;
  *address = old | value;
  return old;
}
template <typename T>
T atomicCAS(T* address, T expected, T value) {
  const T old = *address;
  if (old == expected) {
    *address = value;
  }
  return old;
}

// Below, the intrinsics' exact values: their rounding on a GPU differs in the last bits.
inline float __expf(float x) { return std::exp(x); }
inline float __logf(float x) { return std::log(x); }
inline float __fdividef(float x, float y) { return x / y; }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __clz(int x) { return x == 0 ? 32 : __builtin_clz(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
  return static_cast<unsigned>((static_cast<uint64_t>(high) << 32 | low) >> (shift % 32));
}
inline uint64_t __umul64hi(uint64_t a, uint64_t b) {
  return static_cast<uint64_t>(static_cast<unsigned __int128>(a) * b >> 64);
}
inline unsigned __umulhi(unsigned a, unsigned b) { return static_cast<unsigned>(static_cast<uint64_t>(a) * b >> 32); }
