// The loops of dense_pair_sums and dense_pair_grad_ over a block of both sides' logits.

#include "../../pair_element.h"
#include "exponential.h"

namespace titan_opd {
namespace {

// log x for normal x > 0; NaN for NaN. Relative error below 2e-7.
//
// x = 2^e m with m in [sqrt(1/2), sqrt(2)); log m by the polynomial of Cephes' logf.
inline float log_positive(float x) {
  constexpr uint32_t kSqrtHalf = 0x3f3504f3u;
  uint32_t bits;
  __builtin_memcpy(&bits, &x, sizeof(bits));
  const int32_t exponent = static_cast<int32_t>(bits - kSqrtHalf) >> 23;
  bits -= static_cast<uint32_t>(exponent) << 23;
  float m;
  __builtin_memcpy(&m, &bits, sizeof(m));
  const float f = m - 1.0f;
  const float e = static_cast<float>(exponent);

  float tail = 7.0376836292e-2f;
  tail = tail * f - 1.1514610310e-1f;
  tail = tail * f + 1.1676998740e-1f;
  tail = tail * f - 1.2420140846e-1f;
  tail = tail * f + 1.4249322787e-1f;
  tail = tail * f - 1.6668057665e-1f;
  tail = tail * f + 2.0000714765e-1f;
  tail = tail * f - 2.4999993993e-1f;
  tail = tail * f + 3.3333331174e-1f;
  tail = tail * f * f * f - 0.5f * f * f - 2.12194440e-4f * e;  // log 2 in two parts
  const float result = f + tail + 0.693359375f * e;
  return x != x ? x : result;
}

struct LoopMath {
  static float exp(float x) { return exp_or_zero(x); }
  static float log(float x) { return log_positive(x); }
};

template <bool kMixture>
void pair_sums(const float* student, const float* teacher, int64_t num_columns, const PairRow& row, double* sums) {
  float mass = 0.0f, q_log_q = 0.0f, p_log_p = 0.0f, forward = 0.0f, reverse = 0.0f;
  float q_to_m = 0.0f, p_to_m = 0.0f, clamped = 0.0f, both_top = 0.0f;
#pragma omp simd reduction(+ : mass, q_log_q, p_log_p, forward, reverse, q_to_m, p_to_m, clamped, both_top)
  for (int64_t c = 0; c < num_columns; ++c) {
    const PairElement one = pair_element<LoopMath, kMixture>(student[c], teacher[c], row);
    mass += one.q;
    q_log_q += weighted(one.q, one.log_q);
    p_log_p += weighted(one.p, one.log_p);
    forward += weighted(one.q, one.log_q - one.log_p);
    reverse += weighted(one.p, one.log_p - one.log_q);
    if constexpr (kMixture) {
      q_to_m += weighted(one.q, one.log_q_over_m);
      p_to_m += weighted(one.p, one.log_p_over_m);
    }
    clamped += one.is_clamped ? 1.0f : 0.0f;
    both_top += (student[c] == row.student_max) & (teacher[c] == row.teacher_max) ? 1.0f : 0.0f;
  }
  const float block[kNumPairSums] = {mass, -q_log_q, -p_log_p, forward, reverse, q_to_m, p_to_m, clamped, both_top};
  for (int i = 0; i < kNumPairSums; ++i) {
    sums[i] += block[i];
  }
}

template <bool kMixture>
void pair_grad(const float* student, const float* teacher, int64_t num_columns, const PairRow& row,
               const PairWeights& weights, float* grad) {
#pragma omp simd
  for (int64_t c = 0; c < num_columns; ++c) {
    grad[c] = pair_gradient<LoopMath, kMixture>(student[c], teacher[c], row, weights);
  }
}

}  // namespace
}  // namespace titan_opd
