// topk_logprobs on tensors, for any device: one read of each row of logits gives its k largest with their ids, its maximum
// and sum of exponentials, and the same over its tail, the columns outside the k.
#pragma once

#include <tuple>

#include "tensors.h"

namespace titan_opd {

// Checks, makes the outputs and calls `run` with the task in the logits' type.
template <typename Run>
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> topk_logprobs(
    const Tensor& logits_RV, int64_t k, int64_t vocab_start, std::optional<int64_t> vocab_size,
    const std::optional<Tensor>& inverse_temperature_R, Run run) {
  constexpr const char* op = "topk_logprobs";
  check_logits(op, "logits", logits_RV);
  STD_TORCH_CHECK(k >= 1 && k <= kMaxTopk, op, ": k must be 1 to ", kMaxTopk, ", got ", k);
  const Shard shard = checked_shard(op, logits_RV, vocab_start, vocab_size);
  check_32_bit_columns(op, shard);
  const RowFactors factors = checked_factors(op, inverse_temperature_R, logits_RV);
  const int64_t num_rows = logits_RV.size(0);

  Tensor ids_RK = torch::stable::new_empty(logits_RV, {num_rows, k}, ScalarType::Long);
  Tensor values_RK = new_float(logits_RV, {num_rows, k});
  Tensor max_R = new_float(logits_RV, {num_rows});
  Tensor sum_exp_R = new_float(logits_RV, {num_rows});
  Tensor tail_max_R = new_float(logits_RV, {num_rows});
  Tensor tail_sum_exp_R = new_float(logits_RV, {num_rows});
  if (num_rows > 0) {
    dispatch_logits(op, logits_RV, [&](auto element) {
      using Logit = decltype(element);
      run(TopkLogprobsTask<Logit>{const_matrix<Logit>(logits_RV), num_rows, shard, factors, static_cast<int>(k),
                                  mutable_matrix<int64_t>(ids_RK), mutable_matrix<float>(values_RK), float_data(max_R),
                                  float_data(sum_exp_R), float_data(tail_max_R), float_data(tail_sum_exp_R)});
    });
  }
  return {ids_RK, values_RK, max_R, sum_exp_R, tail_max_R, tail_sum_exp_R};
}

}  // namespace titan_opd
