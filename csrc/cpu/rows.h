// The inner loops over one row of logits, each built once per instruction set. No torch header here: they know nothing
// of tensors. Included before a file's target pragma, so that the inline functions below are compiled for the baseline
// CPU in every file (rows/exponential.h says why).
#pragma once

#include <cmath>

#include "../elements.h"
#include "isa.h"

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

// One instruction set's loops for one element type; z is logit * factor.
template <typename Logit>
struct RowKernels {
  // The sum over the columns 0 .. num_columns of `row` whose bit in `left_out` is 0. Bit c of `left_out` is bit c % 64
  // of its word c / 64; null leaves nothing out.
  ExpSum (*exp_sum)(const Logit* row, int64_t num_columns, float factor, const uint64_t* left_out);
  // Replaces the columns 0 .. num_columns of `row` by scale exp(z - shift), for z - shift up to rounding not above 0;
  // by 0 where z - shift is below -87.
  void (*scaled_exp)(Logit* row, int64_t num_columns, float factor, float shift, float scale);
};

// The tables of rows_<instruction set>.cpp.
template <typename Logit>
RowKernels<Logit> portable_row_kernels();
template <typename Logit>
RowKernels<Logit> avx2_row_kernels();
template <typename Logit>
RowKernels<Logit> avx512_row_kernels();

template <typename Logit>
RowKernels<Logit> row_kernels(Isa isa) {
  switch (isa) {
#if defined(__x86_64__)
    case Isa::kAvx512:
      return avx512_row_kernels<Logit>();
    case Isa::kAvx2:
      return avx2_row_kernels<Logit>();
#endif
    default:
      return portable_row_kernels<Logit>();
  }
}

}  // namespace titan_opd
