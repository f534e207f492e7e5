// The kernels for AVX-512: 16 columns at a time.
#if defined(__x86_64__)

#include "row_sum.h"

// prefer-vector-width: without it GCC stays with 256 bits.
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,fma,prefer-vector-width=512")

#include "row_sum_kernel.h"

namespace titan_opd {

ExpSum row_sum_avx512(const float* row, int64_t num_columns, const uint64_t* left_out) {
  return row_sum(row, num_columns, left_out);
}

ExpSum row_sum_avx512(const Bfloat16* row, int64_t num_columns, const uint64_t* left_out) {
  return row_sum(row, num_columns, left_out);
}

}  // namespace titan_opd

#endif  // __x86_64__
