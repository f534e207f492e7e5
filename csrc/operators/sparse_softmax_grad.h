// sparse_softmax_grad_ on tensors, for any device: logits become the gradient of a function of their log-sum-exp, of
// that of the columns outside the row's ids (the tail), and of the logits at the ids. With partials g, and times the
// row's inverse temperature:
//
//   dz_j = g_lse exp(z_j - lse) + [j outside ids] g_tail exp(z_j - tail_lse) + sum_k g_k [j = id_k]
//
// Outside the ids the exponentials are one, exp(z - tail_lse) (g_tail + g_lse exp(tail_lse - lse)): z - tail_lse <= 0
// and tail_lse - lse <= 0, so nothing overflows and nothing cancels, however small the tail. The ids' own elements are
// formed from logits read before and written over it; correcting it for them would subtract numbers of the size of
// exp(z_k - tail_lse), which are huge when the tail is tiny.
#pragma once

#include "tensors.h"

namespace titan_opd {

// Checks, makes scratch memory and calls `run` with the task in the logits' type.
template <typename Run>
void sparse_softmax_grad_(Tensor& logits_RV, const Tensor& ids_RK, const Tensor& g_RK, const Tensor& lse_R,
                          const Tensor& tail_lse_R, const Tensor& g_lse_R, const Tensor& g_tail_R, int64_t vocab_start,
                          std::optional<int64_t> vocab_size, const std::optional<Tensor>& inverse_temperature_R,
                          Run run) {
  constexpr const char* op = "sparse_softmax_grad_";
  check_logits(op, "logits", logits_RV);
  const int64_t num_rows = logits_RV.size(0);
  STD_TORCH_CHECK(num_rows <= 1 || logits_RV.stride(0) >= logits_RV.size(1), op, ": logits' rows must not overlap");
  const Ids ids = checked_ids(op, ids_RK, logits_RV);
  const Shard shard = checked_shard(op, logits_RV, vocab_start, vocab_size);
  const RowFactors factors = checked_factors(op, inverse_temperature_R, logits_RV);
  check_float(op, "g", g_RK, {num_rows, ids.num_columns}, logits_RV);
  check_float(op, "lse", lse_R, {num_rows}, logits_RV);
  check_float(op, "tail_lse", tail_lse_R, {num_rows}, logits_RV);
  check_float(op, "g_lse", g_lse_R, {num_rows}, logits_RV);
  check_float(op, "g_tail", g_tail_R, {num_rows}, logits_RV);
  if (num_rows == 0) {
    return;
  }
  Tensor own_RK = new_float(logits_RV, {num_rows, ids.num_columns});
  const auto numbers = [](const Tensor& tensor) { return static_cast<const float*>(tensor.const_data_ptr()); };
  dispatch_logits(op, logits_RV, [&](auto element) {
    using Logit = decltype(element);
    run(SparseSoftmaxGradTask<Logit>{mutable_matrix<Logit>(logits_RV), logits_RV.size(1), ids, num_rows, shard, factors,
                                     const_matrix<float>(g_RK), numbers(lse_R), numbers(tail_lse_R), numbers(g_lse_R),
                                     numbers(g_tail_R), mutable_matrix<float>(own_RK)});
  });
}

}  // namespace titan_opd
