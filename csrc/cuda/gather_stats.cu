// gather_stats on the GPU: a block for each row, each thread with running sums inside and outside the row's ids.
//
// Shape suffixes: R rows, V columns of this shard, K ids a row.

#include "device.cuh"
#include "kernels.h"

namespace titan_opd {
namespace {

constexpr int kThreads = 512;
constexpr int kWarps = kThreads / kWarpThreads;
// The columns whose membership in the support fits the shared memory that every GPU gives without asking: 32 KiB.
constexpr int64_t kSegmentColumns = 1 << 18;

// Adds N logits to the set that each belongs to; bit j of `bits` says that z[j] is inside the support.
template <int N>
__device__ __forceinline__ void add(ExpSum& inside, ExpSum& outside, const float (&z)[N], unsigned bits) {
  float max_inside = inside.max;
  float max_outside = outside.max;
  for (int j = 0; j < N; ++j) {
    if (bits >> j & 1u) {
      max_inside = fmaxf(max_inside, z[j]);
    } else {
      max_outside = fmaxf(max_outside, z[j]);
    }
  }
  const float shift_inside = finite_shift(max_inside);
  const float shift_outside = finite_shift(max_outside);
  if (max_inside != inside.max) {
    inside = {max_inside, inside.sum * __expf(inside.max - shift_inside)};
  }
  if (max_outside != outside.max) {
    outside = {max_outside, outside.sum * __expf(outside.max - shift_outside)};
  }
  for (int j = 0; j < N; ++j) {
    if (bits >> j & 1u) {
      inside.sum += __expf(z[j] - shift_inside);
    } else {
      outside.sum += __expf(z[j] - shift_outside);
    }
  }
}

template <typename Logit>
__global__ void __launch_bounds__(kThreads) gather_stats_kernel(GatherStatsTask<Logit> task) {
  TITAN_OPD_DYNAMIC_SHARED(unsigned, support);  // a bit for each column of the segment, and a word to read ahead
  __shared__ ExpSum sums[2][kWarps];

  const int64_t r = blockIdx.x;
  const Logit* row = task.logits_RV.row(r);
  const float factor = task.inverse_temperature_R.at(r);
  const int64_t num_ids = task.ids_RK.num_columns;
  for (int64_t k = threadIdx.x; k < num_ids; k += kThreads) {
    const int64_t column = task.shard.column(task.ids_RK.at(r, k));
    task.candidates_RK.row(r)[k] = column < 0 ? 0.0f : to_float(row[column]) * factor;
  }

  ExpSum inside{kMinusInfinity, 0.0f};
  ExpSum outside{kMinusInfinity, 0.0f};
  for (int64_t begin = 0; begin < task.shard.num_columns; begin += kSegmentColumns) {
    const int64_t rest = task.shard.num_columns - begin;
    const int64_t num_columns = rest < kSegmentColumns ? rest : kSegmentColumns;
    const int64_t num_words = (num_columns + 31) / 32 + 1;
    for (int64_t word = threadIdx.x; word < num_words; word += kThreads) {
      support[word] = 0;
    }
    __syncthreads();
    for (int64_t k = threadIdx.x; k < num_ids; k += kThreads) {
      const int64_t column = task.shard.column(task.ids_RK.at(r, k)) - begin;
      if (column >= 0 && column < num_columns) {
        atomicOr(&support[column / 32], 1u << (column % 32));
      }
    }
    __syncthreads();
    for_each_column(row + begin, num_columns, factor, [&](int64_t column, const auto& z) {
      const unsigned* word = support + column / 32;
      add(inside, outside, z, __funnelshift_r(word[0], word[1], column % 32));
    });
    __syncthreads();  // before the next segment's bits
  }

  write_row_stats(task, r, inside, outside, sums);
}

}  // namespace

template <typename Logit>
cudaError_t launch_gather_stats(const GatherStatsTask<Logit>& task, cudaStream_t stream) {
  const int64_t columns = task.shard.num_columns < kSegmentColumns ? task.shard.num_columns : kSegmentColumns;
  const size_t shared_bytes = ((columns + 31) / 32 + 1) * sizeof(unsigned);
  TITAN_OPD_LAUNCH(gather_stats_kernel<Logit>, static_cast<unsigned>(task.num_rows), kThreads, shared_bytes, stream,
                   task);
  return cudaGetLastError();
}

template cudaError_t launch_gather_stats(const GatherStatsTask<float>&, cudaStream_t);
template cudaError_t launch_gather_stats(const GatherStatsTask<Bfloat16>&, cudaStream_t);
template cudaError_t launch_gather_stats(const GatherStatsTask<Half>&, cudaStream_t);

}  // namespace titan_opd
