// What one token contributes to divergences of two distributions over a vocabulary, for the CPU's and the GPU's
// kernels: the student p = softmax(z), and the teacher q = exp(max(log softmax(u), min_logprob)), whose clamped
// log-probabilities need not sum to one.
//
// Everything is in an unnamed namespace because the CPU's loops include it once per instruction set (cpu/rows says why).
// `Math` has the exponential and the logarithm of the place: exp(x) for x <= 0, exactly 0 for -inf; log(x) for 0 < x <= 1.
#pragma once

#include "tasks.h"

namespace titan_opd {
namespace {

struct PairElement {
  float p, q;
  float log_p, log_q;
  float log_p_over_m, log_q_over_m;  // 0 without the mixture
  bool is_clamped;
};

// p and q are formed as one exponential and its product with exp(-|log q - log p|): where both sides agree they then
// differ by what the logits differ, and not by the rounding of two exponentials.
template <typename Math, bool kMixture>
TITAN_OPD_HOST_DEVICE PairElement pair_element(float z, float u, const PairRow& row) {
  PairElement one;
  one.log_p = z - row.student_max - row.student_log_sum;
  const float log_q = u - row.teacher_max - row.teacher_log_sum;
  one.is_clamped = log_q < row.min_logprob;
  one.log_q = one.is_clamped ? row.min_logprob : log_q;  // NaN passes
  const float difference = one.log_q - one.log_p;
  const bool is_q_larger = difference > 0.0f;
  const float high = Math::exp(is_q_larger ? one.log_q : one.log_p);
  const float ratio = Math::exp(is_q_larger ? -difference : difference);
  const float low = high * ratio;
  one.p = is_q_larger ? low : high;
  one.q = is_q_larger ? high : low;
  one.log_p_over_m = 0.0f;
  one.log_q_over_m = 0.0f;
  if constexpr (kMixture) {
    const float share = is_q_larger ? row.beta : 1.0f - row.beta;
    const float log_m_over_high = Math::log(share + (1.0f - share) * ratio);
    one.log_p_over_m = (is_q_larger ? -difference : 0.0f) - log_m_over_high;
    one.log_q_over_m = (is_q_larger ? 0.0f : difference) - log_m_over_high;
  }
  return one;
}

// probability * value with 0 * inf = 0: a token without mass adds nothing. NaN passes.
TITAN_OPD_HOST_DEVICE float weighted(float probability, float value) {
  return probability == 0.0f ? 0.0f : probability * value;
}

// The token's element of the gradient that PairWeights describes.
template <typename Math, bool kMixture>
TITAN_OPD_HOST_DEVICE float pair_gradient(float z, float u, const PairRow& row, const PairWeights& weights) {
  const PairElement one = pair_element<Math, kMixture>(z, u, row);
  const float slope = weights.reverse * (one.log_p - one.log_q) + weights.mixture * one.log_p_over_m - weights.offset;
  return weights.coefficient * (weighted(one.p, slope) - weights.forward * one.q);
}

}  // namespace
}  // namespace titan_opd
