// A row of logits replaced by scaled exponentials: the inner loop of sparse_softmax_grad_.

#include "exponential.h"

namespace titan_opd {
namespace {

// As exp_nonpositive, but 0 below -87, so that a logit of -inf gets no gradient.
inline float exp_or_zero(float x) {
  return x < -87.0f ? 0.0f : exp_nonpositive(x);
}

template <typename Logit>
void scaled_exp(Logit* row, int64_t num_columns, float factor, float shift, float scale) {
#pragma omp simd
  for (int64_t c = 0; c < num_columns; ++c) {
    from_float(scale * exp_or_zero(to_float(row[c]) * factor - shift), row[c]);
  }
}

}  // namespace
}  // namespace titan_opd
