// sparse_softmax_grad_ on the CPU.

#include "../operators/sparse_softmax_grad.h"

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "isa.h"
#include "parallel.h"
#include "rows.h"

namespace titan_opd {
namespace {

template <typename Logit>
void process_rows(const SparseSoftmaxGradTask<Logit>& task, Isa isa, int64_t begin, int64_t end) {
  const RowKernels<Logit> kernels = row_kernels<Logit>(isa);
  const int64_t num_ids = task.ids_RK.num_columns;
  std::vector<float> sum_of_column(task.shard.num_columns);  // of g over duplicates; meaningful at the row's ids only

  for (int64_t r = begin; r < end; ++r) {
    Logit* row = task.logits_RV.row(r);
    const float factor = task.inverse_temperature_R.at(r);
    const SoftmaxGradRow gradient(task, r);
    float* own = task.own_RK.row(r);
    const float* g = task.g_RK.row(r);
    const auto for_each_id = [&](auto visit) {
      for (int64_t k = 0; k < num_ids; ++k) {
        const int64_t column = task.shard.column(task.ids_RK.at(r, k));
        if (column >= 0) {
          visit(k, column);
        }
      }
    };
    for_each_id([&](int64_t k, int64_t column) {
      own[k] = gradient.lse_scale * std::exp(to_float(row[column]) * factor - gradient.lse);
      sum_of_column[column] = 0.0f;
    });
    for_each_id([&](int64_t k, int64_t column) { sum_of_column[column] += g[k]; });
    kernels.scaled_exp(row, task.shard.num_columns, factor, gradient.outside_shift, gradient.outside_scale);
    for_each_id([&](int64_t k, int64_t column) { from_float(own[k] + factor * sum_of_column[column], row[column]); });
    std::fill(row + task.shard.num_columns, row + task.num_columns, Logit{});
  }
}

void sparse_softmax_grad_cpu(Tensor logits_RV, const Tensor& ids_RK, const Tensor& g_RK, const Tensor& lse_R,
                             const Tensor& tail_lse_R, const Tensor& g_lse_R, const Tensor& g_tail_R,
                             int64_t vocab_start, std::optional<int64_t> vocab_size,
                             std::optional<Tensor> inverse_temperature_R, std::optional<std::string> isa_name) {
  const Isa isa = select_isa(isa_name);
  sparse_softmax_grad_(logits_RV, ids_RK, g_RK, lse_R, tail_lse_R, g_lse_R, g_tail_R, vocab_start, vocab_size,
                       inverse_temperature_R, [&](const auto& task) {
                         for_each_row_range(task.num_rows, task.num_columns, [&](int64_t begin, int64_t end) {
                           process_rows(task, isa, begin, end);
                         });
                       });
}

}  // namespace
}  // namespace titan_opd

STABLE_TORCH_LIBRARY_IMPL(titan_opd, CPU, library) {
  library.impl("sparse_softmax_grad_", TORCH_BOX(&titan_opd::sparse_softmax_grad_cpu));
}
