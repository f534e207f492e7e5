// Sum of exponentials over one row with some columns left out: the inner loop of gather_stats, built once per
// instruction set. No torch header here: the kernels know nothing of tensors. Included before a kernel's target pragma,
// so that the inline functions below are compiled for the baseline CPU in every file (row_sum_kernel.h says why).
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

namespace titan_opd {

// max z and sum exp(z - max) over a set of columns. The empty set, and one of -inf alone, is {-inf, 0}; a set with NaN
// or +inf in it is {NaN, NaN}.
struct ExpSum {
  float max = -INFINITY;
  double sum = 0.0;  // of float32 terms; wide, so that merging many blocks loses nothing
};

// The sum over the union of two disjoint sets.
inline ExpSum merge(const ExpSum& a, const ExpSum& b) {
  if (a.sum == 0.0) {
    return b;
  }
  if (b.sum == 0.0) {
    return a;
  }
  if (std::isnan(a.sum) || std::isnan(b.sum)) {
    return {NAN, NAN};
  }
  const ExpSum& high = a.max > b.max ? a : b;
  const ExpSum& low = a.max > b.max ? b : a;
  return {high.max, high.sum + low.sum * std::exp(static_cast<double>(low.max) - high.max)};
}

// The upper half of a float32.
struct Bfloat16 {
  uint16_t bits;
};

inline float to_float(float value) {
  return value;
}

inline float to_float(Bfloat16 value) {
  const uint32_t bits = static_cast<uint32_t>(value.bits) << 16;
  float result;
  std::memcpy(&result, &bits, sizeof(result));
  return result;
}

// The sum over the columns 0 .. num_columns of `row` whose bit in `left_out` is 0. Bit c of `left_out` is bit c % 64
// of its word c / 64; null leaves nothing out.
template <typename Logit>
using RowSum = ExpSum (*)(const Logit* row, int64_t num_columns, const uint64_t* left_out);

ExpSum row_sum_portable(const float* row, int64_t num_columns, const uint64_t* left_out);
ExpSum row_sum_portable(const Bfloat16* row, int64_t num_columns, const uint64_t* left_out);
#if defined(__x86_64__)
ExpSum row_sum_avx2(const float* row, int64_t num_columns, const uint64_t* left_out);
ExpSum row_sum_avx2(const Bfloat16* row, int64_t num_columns, const uint64_t* left_out);
ExpSum row_sum_avx512(const float* row, int64_t num_columns, const uint64_t* left_out);
ExpSum row_sum_avx512(const Bfloat16* row, int64_t num_columns, const uint64_t* left_out);
#endif

}  // namespace titan_opd
