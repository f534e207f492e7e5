// The loops over rows for AVX2 with fused multiply-add: 8 columns at a time.
#if defined(__x86_64__)

#include "rows.h"

#pragma GCC target("avx2,fma")

#include "rows/exp_sum.h"
#include "rows/scaled_exp.h"

namespace titan_opd {

template <typename Logit>
RowKernels<Logit> avx2_row_kernels() {
  return {&exp_sum<Logit>, &scaled_exp<Logit>};
}

template RowKernels<float> avx2_row_kernels();
template RowKernels<Bfloat16> avx2_row_kernels();
template RowKernels<Half> avx2_row_kernels();

}  // namespace titan_opd

#endif  // __x86_64__
