// The kernels for AVX2 with fused multiply-add: 8 columns at a time.
#if defined(__x86_64__)

#include "row_sum.h"

#pragma GCC target("avx2,fma")

#include "row_sum_kernel.h"

namespace titan_opd {

ExpSum row_sum_avx2(const float* row, int64_t num_columns, const uint64_t* left_out) {
  return row_sum(row, num_columns, left_out);
}

ExpSum row_sum_avx2(const Bfloat16* row, int64_t num_columns, const uint64_t* left_out) {
  return row_sum(row, num_columns, left_out);
}

}  // namespace titan_opd

#endif  // __x86_64__
