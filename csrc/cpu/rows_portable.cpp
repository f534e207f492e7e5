// The loops over rows as the compiler's baseline CPU runs them (SSE2 on x86-64).
#include "rows.h"

#include "rows/exp_sum.h"
#include "rows/scaled_exp.h"

namespace titan_opd {

template <typename Logit>
RowKernels<Logit> portable_row_kernels() {
  return {&exp_sum<Logit>, &scaled_exp<Logit>};
}

template RowKernels<float> portable_row_kernels();
template RowKernels<Bfloat16> portable_row_kernels();
template RowKernels<Half> portable_row_kernels();

}  // namespace titan_opd
