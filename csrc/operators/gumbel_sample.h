// gumbel_sample on tensors, for any device: draws from each row's softmax by a race. An id's score is its logit plus Gumbel
// noise that is a function of (row key, draw, global id) alone, and the largest score wins: so the shards of a vocabulary
// find the whole's winner by comparing theirs.
#pragma once

#include <tuple>

#include "tensors.h"

namespace titan_opd {

// Checks, makes the outputs and calls `run` with the task in the logits' type.
template <typename Run>
std::tuple<Tensor, Tensor, Tensor> gumbel_sample(const Tensor& logits_RV, const Tensor& keys_R, int64_t num_samples,
                                                 int64_t vocab_start, std::optional<int64_t> vocab_size,
                                                 const std::optional<Tensor>& inverse_temperature_R, Run run) {
  constexpr const char* op = "gumbel_sample";
  check_logits(op, "logits", logits_RV);
  const int64_t num_rows = logits_RV.size(0);
  STD_TORCH_CHECK(keys_R.dim() == 1 && keys_R.size(0) == num_rows && keys_R.scalar_type() == ScalarType::Long &&
                      keys_R.is_contiguous() && keys_R.device() == logits_RV.device(),
                  op, ": keys must be int64 [R] with logits' R, contiguous, on the logits' device");
  STD_TORCH_CHECK(num_samples >= 1 && num_samples <= INT32_MAX, op, ": num_samples must be at least 1, got ",
                  num_samples);
  const Shard shard = checked_shard(op, logits_RV, vocab_start, vocab_size);
  check_32_bit_columns(op, shard);
  STD_TORCH_CHECK(shard.vocab_start + shard.num_columns <= INT32_MAX, op, ": ids must be below 2^31");
  const RowFactors factors = checked_factors(op, inverse_temperature_R, logits_RV);

  Tensor ids_Rm = torch::stable::new_empty(logits_RV, {num_rows, num_samples}, ScalarType::Long);
  Tensor scores_Rm = torch::stable::new_empty(logits_RV, {num_rows, num_samples}, ScalarType::Double);
  Tensor values_Rm = new_float(logits_RV, {num_rows, num_samples});
  if (num_rows > 0) {
    dispatch_logits(op, logits_RV, [&](auto element) {
      using Logit = decltype(element);
      run(GumbelSampleTask<Logit>{const_matrix<Logit>(logits_RV),
                                  static_cast<const int64_t*>(keys_R.const_data_ptr()), num_rows,
                                  static_cast<int>(num_samples), shard, factors, mutable_matrix<int64_t>(ids_Rm),
                                  mutable_matrix<double>(scores_Rm), mutable_matrix<float>(values_Rm)});
    });
  }
  return {ids_Rm, scores_Rm, values_Rm};
}

}  // namespace titan_opd
