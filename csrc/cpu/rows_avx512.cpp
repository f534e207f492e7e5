// The loops over rows for AVX-512: 16 columns at a time.
#if defined(__x86_64__)

#include "rows.h"

#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,fma,prefer-vector-width=512")

#include "rows/exp_sum.h"
#include "rows/scaled_exp.h"

namespace titan_opd {

template <typename Logit>
RowKernels<Logit> avx512_row_kernels() {
  return {&exp_sum<Logit>, &scaled_exp<Logit>};
}

template RowKernels<float> avx512_row_kernels();
template RowKernels<Bfloat16> avx512_row_kernels();
template RowKernels<Half> avx512_row_kernels();

}  // namespace titan_opd

#endif  // __x86_64__
