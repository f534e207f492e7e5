// topk_logprobs on the GPU: a block for each row. Columns above the floor, the k-th largest of those cut so far, wait in
// shared memory; each thread adds all others to its own sum of the tail. When the shared memory is full, it is sorted, all
// but the k largest join the tail, and the floor rises. Few columns pass it: of n in random order k / n, so that the
// block waits once for each load, sorts a handful of times a row, and reads the row once.
//
// Shape suffixes: R rows, V columns of this shard, K ids a row.

#include "../order_keys.h"
#include "device.cuh"
#include "kernels.h"

namespace titan_opd {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarpThreads;
// Keys that wait: a power of two, because it is sorted, and some times k, because what is above k is room for new ones.
constexpr int kMaxCapacity = 4 * kMaxTopk;
constexpr int kMinCapacity = 512;

// Adds the logits z[j] of which bit j is set.
template <int N>
__device__ __forceinline__ void add(ExpSum& total, const float (&z)[N], unsigned bits) {
  float max = total.max;
  for (int j = 0; j < N; ++j) {
    max = bits >> j & 1u ? fmaxf(max, z[j]) : max;
  }
  const float shift = finite_shift(max);
  if (max != total.max) {
    total = {max, total.sum * __expf(total.max - shift)};
  }
  for (int j = 0; j < N; ++j) {
    total.sum += bits >> j & 1u ? __expf(z[j] - shift) : 0.0f;
  }
}

// Sorts `size` keys, a power of two, the largest first: Batcher's bitonic sort. All threads of the block come here after
// a barrier and leave after one; only up to 32 keys, which are the first warp's alone, it is that warp's.
__device__ __forceinline__ void sort_descending(uint64_t* keys, int size) {
  for (int run = 2; run <= size; run *= 2) {
    for (int stride = run / 2; stride > 0; stride /= 2) {
      for (int pair = threadIdx.x; pair < size / 2; pair += kThreads) {
        const int low = 2 * pair - (pair & (stride - 1));
        const uint64_t a = keys[low];
        const uint64_t b = keys[low + stride];
        if ((a < b) == ((low & run) == 0)) {
          keys[low] = b;
          keys[low + stride] = a;
        }
      }
      // Up to this stride, a warp's 32 pairs are 64 adjacent keys that no other warp touches.
      const int next_stride = stride > 1 ? stride / 2 : run;
      if (stride > kWarpThreads || next_stride > kWarpThreads) {
        __syncthreads();
      } else {
        __syncwarp();
      }
    }
  }
}

template <typename Logit>
__global__ void __launch_bounds__(kThreads, 1) topk_logprobs_kernel(TopkLogprobsTask<Logit> task, int capacity) {
  __shared__ uint64_t keys[kMaxCapacity];
  __shared__ int num_keys;  // also those that found no room
  __shared__ ExpSum sums[2][kWarps];

  const int64_t r = blockIdx.x;
  if (threadIdx.x == 0) {
    num_keys = 0;
  }
  __syncthreads();

  ExpSum outside{kMinusInfinity, 0.0f};
  uint64_t floor_key = kNoKey;
  float floor = kMinusInfinity;  // of floor_key: a comparison that spares most columns their key
  const auto passes = [&](float z, int64_t column) {
    return !(z < floor) && order_key(z, static_cast<uint32_t>(column)) > floor_key;
  };
  for_each_column_together(
      task.logits_RV.row(r), task.shard.num_columns, task.inverse_temperature_R.at(r),
      [&](int64_t column, const auto& z, int count) {
        constexpr int N = sizeof(z) / sizeof(z[0]);
        unsigned waiting = 0;
        for (int j = 0; j < N; ++j) {
          waiting |= j < count && passes(z[j], column + j) ? 1u << j : 0u;
        }
        add(outside, z, ~waiting & ((1u << count) - 1u));
        for (;;) {
          for (int j = 0; j < N; ++j) {
            if (waiting >> j & 1u) {
              const int slot = atomicAdd(&num_keys, 1);
              if (slot < capacity) {
                keys[slot] = order_key(z[j], static_cast<uint32_t>(column + j));
                waiting &= ~(1u << j);
              }
            }
          }
          if (!__syncthreads_or(waiting != 0)) {
            break;
          }
          sort_descending(keys, capacity);
          for (int i = task.k + static_cast<int>(threadIdx.x); i < capacity; i += kThreads) {
            const float evicted[1] = {key_logit(keys[i])};
            add(outside, evicted, 1u);
          }
          floor_key = keys[task.k - 1];
          floor = key_logit(floor_key);
          if (threadIdx.x == 0) {
            num_keys = task.k;
          }
          __syncthreads();  // before new keys replace the evicted ones
          unsigned beaten = 0;
          for (int j = 0; j < N; ++j) {
            beaten |= (waiting >> j & 1u) && !passes(z[j], column + j) ? 1u << j : 0u;
          }
          add(outside, z, beaten);
          waiting &= ~beaten;
        }
      });

  const int filled = num_keys;  // no more than fit: all found room
  int size = 1;
  while (size < filled) {
    size *= 2;
  }
  for (int i = filled + static_cast<int>(threadIdx.x); i < size; i += kThreads) {
    keys[i] = kNoKey;
  }
  __syncthreads();
  sort_descending(keys, size);
  ExpSum inside{kMinusInfinity, 0.0f};
  for (int i = threadIdx.x; i < task.k || i < filled; i += kThreads) {
    const float z[1] = {i < filled ? key_logit(keys[i]) : kMinusInfinity};
    add(i < task.k ? inside : outside, z, i < filled ? 1u : 0u);
    if (i < task.k) {
      task.ids_RK.row(r)[i] = i < filled ? task.shard.vocab_start + key_column(keys[i]) : -1;
      task.values_RK.row(r)[i] = z[0];
    }
  }

  write_row_stats(task, r, inside, outside, sums);
}

}  // namespace

template <typename Logit>
cudaError_t launch_topk_logprobs(const TopkLogprobsTask<Logit>& task, cudaStream_t stream) {
  int capacity = kMinCapacity;
  while (capacity < 4 * task.k && capacity < kMaxCapacity) {
    capacity *= 2;
  }
  TITAN_OPD_LAUNCH(topk_logprobs_kernel<Logit>, static_cast<unsigned>(task.num_rows), kThreads, 0, stream, task,
                   capacity);
  return cudaGetLastError();
}

template cudaError_t launch_topk_logprobs(const TopkLogprobsTask<float>&, cudaStream_t);
template cudaError_t launch_topk_logprobs(const TopkLogprobsTask<Bfloat16>&, cudaStream_t);
template cudaError_t launch_topk_logprobs(const TopkLogprobsTask<Half>&, cudaStream_t);

}  // namespace titan_opd
