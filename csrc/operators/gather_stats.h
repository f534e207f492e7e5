// gather_stats on tensors, for any device: one read of each row of logits gives its maximum and sum of exponentials,
// the same over its tail (the columns that are not among the row's ids), and the logits at the ids.
//
// The tail is summed for itself. As a difference of the whole and the support it would be rounding noise where the
// support holds nearly all the mass.
#pragma once

#include <tuple>

#include "tensors.h"

namespace titan_opd {

// Checks, makes the outputs and calls `run` with the task in the logits' type.
template <typename Run>
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> gather_stats(const Tensor& logits_RV, const Tensor& ids_RK,
                                                                int64_t vocab_start, std::optional<int64_t> vocab_size,
                                                                const std::optional<Tensor>& inverse_temperature_R,
                                                                Run run) {
  constexpr const char* op = "gather_stats";
  check_logits(op, "logits", logits_RV);
  const Ids ids = checked_ids(op, ids_RK, logits_RV);
  const Shard shard = checked_shard(op, logits_RV, vocab_start, vocab_size);
  const RowFactors factors = checked_factors(op, inverse_temperature_R, logits_RV);
  const int64_t num_rows = logits_RV.size(0);

  Tensor max_R = new_float(logits_RV, {num_rows});
  Tensor sum_exp_R = new_float(logits_RV, {num_rows});
  Tensor tail_max_R = new_float(logits_RV, {num_rows});
  Tensor tail_sum_exp_R = new_float(logits_RV, {num_rows});
  Tensor candidates_RK = new_float(logits_RV, {num_rows, ids.num_columns});
  if (num_rows > 0) {
    dispatch_logits(op, logits_RV, [&](auto element) {
      using Logit = decltype(element);
      run(GatherStatsTask<Logit>{const_matrix<Logit>(logits_RV), ids, num_rows, shard, factors, float_data(max_R),
                                 float_data(sum_exp_R), float_data(tail_max_R), float_data(tail_sum_exp_R),
                                 mutable_matrix<float>(candidates_RK)});
    });
  }
  return {max_R, sum_exp_R, tail_max_R, tail_sum_exp_R, candidates_RK};
}

}  // namespace titan_opd
