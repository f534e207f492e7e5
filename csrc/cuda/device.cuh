// What all kernels share: one spelling of a launch for nvcc and for the emulation, reductions, and the walk along a row.
#pragma once

#if defined(__CUDACC__)
#include <cuda_runtime.h>
#define TITAN_OPD_LAUNCH(kernel, blocks, threads, shared_bytes, stream, ...) \
  kernel<<<(blocks), (threads), (shared_bytes), (stream)>>>(__VA_ARGS__)
#define TITAN_OPD_DYNAMIC_SHARED(Type, name)                         \
  extern __shared__ __align__(16) unsigned char dynamic_shared_raw[]; \
  Type* name = reinterpret_cast<Type*>(dynamic_shared_raw)
#else
#include "../emu/cuda_on_cpu.h"
#define TITAN_OPD_LAUNCH(kernel, blocks, threads, shared_bytes, stream, ...) \
  (static_cast<void>(stream),                                                \
   ::cuda_on_cpu::run_grid((blocks), (threads), (shared_bytes), [=] { kernel(__VA_ARGS__); }))
#define TITAN_OPD_DYNAMIC_SHARED(Type, name) Type* name = static_cast<Type*>(::cuda_on_cpu::dynamic_shared_memory())
#endif

#include "../elements.h"

namespace titan_opd {

constexpr int kWarpThreads = 32;
constexpr unsigned kAllLanes = 0xffffffffu;

// max z and sum exp(z - max) over a set of columns; {-inf, 0} for the empty set. Once NaN or +inf was added the sum is
// NaN and stays it; `finished` then makes the maximum NaN too.
struct ExpSum {
  float max;
  float sum;
};

constexpr float kMinusInfinity = -INFINITY;

// What exponents are relative to: -inf - -inf would be NaN.
__device__ __forceinline__ float finite_shift(float max) {
  return max == kMinusInfinity ? 0.0f : max;
}

__device__ __forceinline__ ExpSum merge(ExpSum a, ExpSum b) {
  const float max = fmaxf(a.max, b.max);
  const float shift = finite_shift(max);
  return {max, a.sum * __expf(a.max - shift) + b.sum * __expf(b.max - shift)};
}

__device__ __forceinline__ ExpSum finished(ExpSum total) {
  return {total.sum != total.sum ? total.sum : total.max, total.sum};
}

// The sum over all lanes of the warp, in every lane.
__device__ __forceinline__ ExpSum warp_merge(ExpSum value) {
  for (int offset = kWarpThreads / 2; offset > 0; offset /= 2) {
    const ExpSum other{__shfl_xor_sync(kAllLanes, value.max, offset), __shfl_xor_sync(kAllLanes, value.sum, offset)};
    value = merge(value, other);
  }
  return value;
}

// Merges what the block's threads have summed inside and outside a row's set, and writes the whole and the tail.
// `sums` is shared memory that nothing else uses.
template <typename Task, int kWarps>
__device__ __forceinline__ void write_row_stats(const Task& task, int64_t r, ExpSum inside, ExpSum outside,
                                                ExpSum (&sums)[2][kWarps]) {
  inside = warp_merge(inside);
  outside = warp_merge(outside);
  const int lane = threadIdx.x % kWarpThreads;
  const int warp = threadIdx.x / kWarpThreads;
  if (lane == 0) {
    sums[0][warp] = inside;
    sums[1][warp] = outside;
  }
  __syncthreads();
  if (warp == 0) {
    const ExpSum empty{kMinusInfinity, 0.0f};
    inside = warp_merge(lane < kWarps ? sums[0][lane] : empty);
    outside = warp_merge(lane < kWarps ? sums[1][lane] : empty);
    if (lane == 0) {
      const ExpSum whole = finished(merge(inside, outside));
      const ExpSum tail = finished(outside);
      task.max_R[r] = whole.max;
      task.sum_exp_R[r] = whole.sum;
      task.tail_max_R[r] = tail.max;
      task.tail_sum_exp_R[r] = tail.sum;
    }
  }
}

// Calls `visit(column, z)` once for every column of a row, the block's threads side by side: z is an array of as many
// adjacent logits as fit 16 bytes, or of one where the row's ends are not aligned to 16 bytes. Reads each byte once.
template <typename Logit, typename Visit>
__device__ __forceinline__ void for_each_column(const Logit* row, int64_t num_columns, float factor, Visit visit) {
  constexpr int kVector = 16 / sizeof(Logit);
  const int64_t misaligned = reinterpret_cast<uintptr_t>(row) % 16 / sizeof(Logit);
  const int64_t before = (kVector - misaligned) % kVector;
  const int64_t head = before < num_columns ? before : num_columns;
  const int64_t num_vectors = (num_columns - head) / kVector;
  const uint4* vectors = reinterpret_cast<const uint4*>(row + head);

#pragma unroll 2
  for (int64_t i = threadIdx.x; i < num_vectors; i += blockDim.x) {
    const uint4 raw = __ldg(vectors + i);
    Logit elements[kVector];
    memcpy(elements, &raw, sizeof(raw));
    float z[kVector];
    for (int j = 0; j < kVector; ++j) {
      z[j] = to_float(elements[j]) * factor;
    }
    visit(head + i * kVector, z);
  }
  const int64_t tail = head + num_vectors * kVector;
  const int64_t num_single = head + (num_columns - tail);
  for (int64_t i = threadIdx.x; i < num_single; i += blockDim.x) {
    const int64_t column = i < head ? i : tail + (i - head);
    float z[1] = {to_float(row[column]) * factor};
    visit(column, z);
  }
}

// Replaces every element of a row by `f` of it, the block's threads side by side, 16 bytes at a time where the row's ends
// allow. Each element is read and written by one thread.
template <typename Element, typename Function>
__device__ __forceinline__ void transform_columns(Element* row, int64_t num_columns, Function f) {
  constexpr int kVector = 16 / sizeof(Element);
  const int64_t misaligned = reinterpret_cast<uintptr_t>(row) % 16 / sizeof(Element);
  const int64_t before = (kVector - misaligned) % kVector;
  const int64_t head = before < num_columns ? before : num_columns;
  const int64_t num_vectors = (num_columns - head) / kVector;
  uint4* vectors = reinterpret_cast<uint4*>(row + head);

#pragma unroll 2
  for (int64_t i = threadIdx.x; i < num_vectors; i += blockDim.x) {
    uint4 raw = vectors[i];
    Element elements[kVector];
    memcpy(elements, &raw, sizeof(raw));
    for (int j = 0; j < kVector; ++j) {
      from_float(f(to_float(elements[j])), elements[j]);
    }
    memcpy(&raw, elements, sizeof(raw));
    vectors[i] = raw;
  }
  const int64_t tail = head + num_vectors * kVector;
  const int64_t num_single = head + (num_columns - tail);
  for (int64_t i = threadIdx.x; i < num_single; i += blockDim.x) {
    const int64_t column = i < head ? i : tail + (i - head);
    from_float(f(to_float(row[column])), row[column]);
  }
}

// Like for_each_column, for a visitor with barriers: all threads of the block call `visit(column, z, count)` equally
// often; the first `count` of z exist, from none to all. The next logits are on their way from memory meanwhile.
template <typename Logit, typename Visit>
__device__ __forceinline__ void for_each_column_together(const Logit* row, int64_t num_columns, float factor,
                                                         Visit visit) {
  constexpr int kVector = 16 / sizeof(Logit);
  const int64_t misaligned = reinterpret_cast<uintptr_t>(row) % 16 / sizeof(Logit);
  const int64_t before = (kVector - misaligned) % kVector;
  const int64_t head = before < num_columns ? before : num_columns;
  const int64_t num_vectors = (num_columns - head) / kVector;
  const uint4* vectors = reinterpret_cast<const uint4*>(row + head);
  // The columns that fill no vector are fewer than two of them: one a thread, in a round of their own before the others.
  const int64_t tail = head + num_vectors * kVector;
  const int64_t num_single = head + (num_columns - tail);

  uint4 next{0, 0, 0, 0};
  if (threadIdx.x < num_vectors) {
    next = __ldg(vectors + threadIdx.x);
  }
  // One call of `visit` in the code, so that it is compiled into the loop.
  for (int64_t first = num_single > 0 ? -static_cast<int64_t>(blockDim.x) : 0; first < num_vectors;
       first += blockDim.x) {
    int64_t column;
    int count;
    float z[kVector] = {};
    if (first < 0) {
      const int64_t i = threadIdx.x;
      column = i < head ? i : tail + (i - head);
      count = i < num_single ? 1 : 0;
      z[0] = count == 1 ? to_float(row[column]) * factor : 0.0f;
    } else {
      const int64_t i = first + threadIdx.x;
      column = head + i * kVector;
      count = i < num_vectors ? kVector : 0;
      Logit elements[kVector];
      memcpy(elements, &next, sizeof(next));
      if (i + blockDim.x < num_vectors) {
        next = __ldg(vectors + i + blockDim.x);
      }
      for (int j = 0; j < kVector; ++j) {
        z[j] = to_float(elements[j]) * factor;
      }
    }
    visit(column, z, count);
  }
}

// Adjacent elements that one instruction moves.
template <typename Element, int N>
struct alignas(N * sizeof(Element)) Pack {
  Element elements[N];
};

template <typename Element, int N>
__device__ __forceinline__ bool is_aligned(const Element* row) {
  return reinterpret_cast<uintptr_t>(row) % sizeof(Pack<Element, N>) == 0;
}

}  // namespace titan_opd
