// sparse_softmax_grad_ on the GPU: a block for each row. The ids' elements are formed first, in scratch memory, from
// logits that nobody has written over yet; then the whole row is written, and the ids' elements over it.
//
// Shape suffixes: R rows, V columns of this shard, K ids a row.

#include "device.cuh"
#include "kernels.h"

namespace titan_opd {
namespace {

constexpr int kThreads = 512;

template <typename Logit>
__global__ void __launch_bounds__(kThreads) sparse_softmax_grad_kernel(SparseSoftmaxGradTask<Logit> task) {
  const int64_t r = blockIdx.x;
  Logit* row = task.logits_RV.row(r);
  const float factor = task.inverse_temperature_R.at(r);
  const SoftmaxGradRow gradient(task, r);
  const float* g = task.g_RK.row(r);
  float* own = task.own_RK.row(r);
  const int64_t num_ids = task.ids_RK.num_columns;

  // Each id sums over its duplicates by looking at all ids, always in the same order: equal ids get equal numbers, and
  // every run the same ones. K * K reads, which a block shares; K is some tens.
  for (int64_t k = threadIdx.x; k < num_ids; k += kThreads) {
    const int64_t id = task.ids_RK.at(r, k);
    const int64_t column = task.shard.column(id);
    if (column >= 0) {
      float sum = 0.0f;
      for (int64_t i = 0; i < num_ids; ++i) {
        sum += task.ids_RK.at(r, i) == id ? g[i] : 0.0f;
      }
      own[k] = gradient.lse_scale * __expf(to_float(row[column]) * factor - gradient.lse) + factor * sum;
    }
  }
  __syncthreads();
  transform_columns(row, task.shard.num_columns, [&](float logit) {
    return gradient.outside_scale * __expf(logit * factor - gradient.outside_shift);
  });
  for (int64_t column = task.shard.num_columns + threadIdx.x; column < task.num_columns; column += kThreads) {
    from_float(0.0f, row[column]);
  }
  __syncthreads();
  for (int64_t k = threadIdx.x; k < num_ids; k += kThreads) {
    const int64_t column = task.shard.column(task.ids_RK.at(r, k));
    if (column >= 0) {
      from_float(own[k], row[column]);
    }
  }
}

}  // namespace

template <typename Logit>
cudaError_t launch_sparse_softmax_grad(const SparseSoftmaxGradTask<Logit>& task, cudaStream_t stream) {
  TITAN_OPD_LAUNCH(sparse_softmax_grad_kernel<Logit>, static_cast<unsigned>(task.num_rows), kThreads, 0, stream, task);
  return cudaGetLastError();
}

template cudaError_t launch_sparse_softmax_grad(const SparseSoftmaxGradTask<float>&, cudaStream_t);
template cudaError_t launch_sparse_softmax_grad(const SparseSoftmaxGradTask<Bfloat16>&, cudaStream_t);
template cudaError_t launch_sparse_softmax_grad(const SparseSoftmaxGradTask<Half>&, cudaStream_t);

}  // namespace titan_opd
