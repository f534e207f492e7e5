// A row of logits replaced by scaled exponentials: the inner loop of sparse_softmax_grad_.

#include "exponential.h"

namespace titan_opd {
namespace {

template <typename Logit>
void scaled_exp(Logit* row, int64_t num_columns, float factor, float shift, float scale) {
#pragma omp simd
  for (int64_t c = 0; c < num_columns; ++c) {
    from_float(scale * exp_or_zero(to_float(row[c]) * factor - shift), row[c]);
  }
}

}  // namespace
}  // namespace titan_opd
