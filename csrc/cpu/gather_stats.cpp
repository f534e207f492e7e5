// gather_stats on the CPU. The whole is the tail plus the support, so the vocabulary is read once.

#include "../operators/gather_stats.h"

#include <string>
#include <vector>

#include "isa.h"
#include "parallel.h"
#include "rows.h"
#include "support.h"

namespace titan_opd {
namespace {

template <typename Logit>
void process_rows(const GatherStatsTask<Logit>& task, Isa isa, int64_t begin, int64_t end) {
  const RowKernels<Logit> kernels = row_kernels<Logit>(isa);
  const RowKernels<float> support_kernels = row_kernels<float>(isa);
  Support support(task.shard.num_columns, task.ids_RK.num_columns);

  for (int64_t r = begin; r < end; ++r) {
    const Logit* row = task.logits_RV.row(r);
    const float factor = task.inverse_temperature_R.at(r);
    float* candidates = task.candidates_RK.row(r);
    for (int64_t k = 0; k < task.ids_RK.num_columns; ++k) {
      const int64_t column = task.shard.column(task.ids_RK.at(r, k));
      if (column < 0) {
        candidates[k] = 0.0f;
        continue;
      }
      candidates[k] = to_float(row[column]) * factor;
      support.add(column, candidates[k]);
    }

    const ExpSum tail = kernels.exp_sum(row, task.shard.num_columns, factor, support.bitmap());
    const ExpSum inside = support_kernels.exp_sum(support.values().data(), support.values().size(), 1.0f, nullptr);
    const ExpSum whole = merge(tail, inside);
    task.max_R[r] = whole.max;
    task.sum_exp_R[r] = static_cast<float>(whole.sum);
    task.tail_max_R[r] = tail.max;
    task.tail_sum_exp_R[r] = static_cast<float>(tail.sum);
    support.clear();
  }
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> gather_stats_cpu(
    const Tensor& logits_RV, const Tensor& ids_RK, int64_t vocab_start, std::optional<int64_t> vocab_size,
    std::optional<Tensor> inverse_temperature_R, std::optional<std::string> isa_name) {
  const Isa isa = select_isa(isa_name);
  return gather_stats(logits_RV, ids_RK, vocab_start, vocab_size, inverse_temperature_R, [&](const auto& task) {
    for_each_row_range(task.num_rows, task.shard.num_columns,
                       [&](int64_t begin, int64_t end) { process_rows(task, isa, begin, end); });
  });
}

}  // namespace
}  // namespace titan_opd

STABLE_TORCH_LIBRARY_IMPL(titan_opd, CPU, library) {
  library.impl("gather_stats", TORCH_BOX(&titan_opd::gather_stats_cpu));
}
