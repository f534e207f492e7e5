// multi_copy on the GPU: the copies' descriptions travel as a kernel's argument, and blocks take tiles of elements of
// all of them, so that hundreds of small tensors cost one launch for each table of them.

#include "device.cuh"
#include "kernels.h"

namespace titan_opd {
namespace {

constexpr int kThreads = 256;
constexpr int64_t kTileElements = 8192;  // 8 packs of a thread, at 4 elements each
constexpr int kTableSize = 60;           // what a kernel's 4 KiB of arguments hold

struct CopyTable {
  CopyTask tasks[kTableSize];
  int64_t first_block[kTableSize];
  int32_t num_tasks;
};
static_assert(sizeof(CopyTable) <= 4096, "more than a kernel's arguments");

template <typename A, typename B>
constexpr bool is_same = false;
template <typename A>
constexpr bool is_same<A, A> = true;

template <int N, typename Source, typename Destination>
__device__ __forceinline__ void copy_packs(const CopyTask& task, int64_t begin, int64_t end) {
  const auto* source = static_cast<const Source*>(task.source);
  auto* destination = static_cast<Destination*>(task.destination);
#pragma unroll 4
  for (int64_t i = begin + int64_t{N} * threadIdx.x; i < end; i += int64_t{N} * kThreads) {
    const int64_t row = task.num_rows == 1 ? 0 : i / task.num_columns;
    const int64_t column = i - row * task.num_columns;
    const auto from = *reinterpret_cast<const Pack<Source, N>*>(source + row * task.source_stride + column);
    Pack<Destination, N> to;
    for (int j = 0; j < N; ++j) {
      if constexpr (is_same<Source, Destination>) {
        to.elements[j] = from.elements[j];  // every bit of a NaN
      } else {
        from_float(to_float(from.elements[j]), to.elements[j]);
      }
    }
    *reinterpret_cast<Pack<Destination, N>*>(destination + row * task.destination_stride + column) = to;
  }
}

template <typename Source, typename Destination>
__device__ __forceinline__ void copy_tile(const CopyTask& task, int64_t begin, int64_t end) {
  constexpr int kVector = 16 / (sizeof(Source) > sizeof(Destination) ? sizeof(Source) : sizeof(Destination));
  const bool rows_in_packs =
      task.num_rows == 1 ||
      (task.num_columns % kVector == 0 && task.source_stride % kVector == 0 && task.destination_stride % kVector == 0);
  const bool in_packs = rows_in_packs && is_aligned<Source, kVector>(static_cast<const Source*>(task.source)) &&
                        is_aligned<Destination, kVector>(static_cast<const Destination*>(task.destination));
  const int64_t packed_end = in_packs ? begin + (end - begin) / kVector * kVector : begin;
  copy_packs<kVector, Source, Destination>(task, begin, packed_end);
  copy_packs<1, Source, Destination>(task, packed_end, end);
}

__global__ void __launch_bounds__(kThreads) multi_copy_kernel(CopyTable table) {
  const int64_t block = blockIdx.x;
  int t = table.num_tasks - 1;
  while (table.first_block[t] > block) {
    --t;
  }
  const CopyTask& task = table.tasks[t];
  const int64_t begin = (block - table.first_block[t]) * kTileElements;
  const int64_t rest = task.num_elements() - begin;
  const int64_t end = begin + (rest < kTileElements ? rest : kTileElements);
  dispatch_element(task.source_type, [&](auto source) {
    dispatch_element(task.destination_type, [&](auto destination) {
      copy_tile<decltype(source), decltype(destination)>(task, begin, end);
    });
  });
}

}  // namespace

cudaError_t launch_multi_copy(const CopyTask* tasks, int64_t num_tasks, cudaStream_t stream) {
  for (int64_t first = 0; first < num_tasks; first += kTableSize) {
    const int64_t rest = num_tasks - first;
    CopyTable table{};
    table.num_tasks = static_cast<int32_t>(rest < kTableSize ? rest : kTableSize);
    int64_t num_blocks = 0;
    for (int32_t t = 0; t < table.num_tasks; ++t) {
      table.tasks[t] = tasks[first + t];
      table.first_block[t] = num_blocks;
      num_blocks += (table.tasks[t].num_elements() + kTileElements - 1) / kTileElements;
    }
    TITAN_OPD_LAUNCH(multi_copy_kernel, static_cast<unsigned>(num_blocks), kThreads, 0, stream, table);
    const cudaError_t error = cudaGetLastError();
    if (error != cudaSuccess) {
      return error;
    }
  }
  return cudaSuccess;
}

}  // namespace titan_opd
