// The kernels as the compiler's baseline CPU runs them (SSE2 on x86-64).

#include "row_sum.h"

#include "row_sum_kernel.h"

namespace titan_opd {

ExpSum row_sum_portable(const float* row, int64_t num_columns, const uint64_t* left_out) {
  return row_sum(row, num_columns, left_out);
}

ExpSum row_sum_portable(const Bfloat16* row, int64_t num_columns, const uint64_t* left_out) {
  return row_sum(row, num_columns, left_out);
}

}  // namespace titan_opd
