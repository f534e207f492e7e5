// The inner loops over one row of logits, each built once per instruction set. No torch header here: they know nothing
// of tensors. Included before a file's target pragma, so that the inline functions below are compiled for the baseline
// CPU in every file (rows/exponential.h says why).
#pragma once

#include <cmath>

#if defined(__SSE2__)
#include <immintrin.h>
#endif

#include "../noise.h"
#include "../order_keys.h"
#include "../tasks.h"
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

// The most columns of one call of split_block.
constexpr int64_t kMaxSplitColumns = 2048;

// One instruction set's loops for one element type; z is logit * factor.
template <typename Logit>
struct RowKernels {
  // The sum over the columns 0 .. num_columns of `row` whose bit in `left_out` is 0. Bit c of `left_out` is bit c % 64
  // of its word c / 64; null leaves nothing out.
  ExpSum (*exp_sum)(const Logit* row, int64_t num_columns, float factor, const uint64_t* left_out);
  // Replaces the columns 0 .. num_columns of `row` by scale exp(z - shift), for z - shift up to rounding not above 0;
  // by 0 where z - shift is below -87.
  void (*scaled_exp)(Logit* row, int64_t num_columns, float factor, float shift, float scale);
  // Splits the columns first .. first + num_columns of `row` (at most kMaxSplitColumns): appends the keys
  // (order_keys.h) of those with z > *floor, and of NaN, to the `*num_keys` in `keys`, with a null floor those of all,
  // and returns the sum over the others. `num_following` columns behind them are asked for from memory meanwhile.
  ExpSum (*split_block)(const Logit* row, int64_t first, int64_t num_columns, int64_t num_following, float factor,
                        const float* floor, uint64_t* keys, int64_t* num_keys);
  // The largest z of the columns 0 .. num_columns, -inf without one; false when a z is NaN or +inf.
  bool (*peak)(const Logit* row, int64_t num_columns, float factor, float* max);
  // Bit c of `masks`, laid out as `left_out` above: whether the race word (noise.h) of the id first_id + c is at most
  // `limit`. Writes whole words; bits past num_columns mean nothing.
  void (*low_noise)(uint64_t draw_key, uint32_t first_id, int64_t num_columns, uint32_t limit, uint64_t* masks);
};

// One instruction set's conversions of elements from and to float32, rounded to the nearest even.
template <typename Element>
struct ConversionKernels {
  void (*load)(const Element* elements, int64_t count, float* values);
  void (*store)(const float* values, int64_t count, Element* elements);
};

// One instruction set's loops over bytes (rows/bytes.h).
struct ByteKernels {
  uint64_t (*keyed_sum)(const void* words, int64_t num_words, const uint32_t* keys, void* destination, bool streams);
  void (*stream_bytes)(const void* source, int64_t num_bytes, void* destination);
  void (*finish_streams)();
};

// One instruction set's loops over a block of a student's and a teacher's logits.
struct PairKernels {
  using AddSums = void (*)(const float* student, const float* teacher, int64_t num_columns, const PairRow& row,
                           double* sums);
  using WriteGrad = void (*)(const float* student, const float* teacher, int64_t num_columns, const PairRow& row,
                             const PairWeights& weights, float* grad);
  AddSums sums;  // adds to each of the kNumPairSums sums; kTop1Agreement counts tokens
  AddSums mixture_sums;
  WriteGrad grad;  // `grad` may be `student`
  WriteGrad mixture_grad;
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

template <typename Element>
ConversionKernels<Element> portable_conversion_kernels();
template <typename Element>
ConversionKernels<Element> avx2_conversion_kernels();
template <typename Element>
ConversionKernels<Element> avx512_conversion_kernels();

ByteKernels portable_byte_kernels();
ByteKernels avx2_byte_kernels();
ByteKernels avx512_byte_kernels();

PairKernels portable_pair_kernels();
PairKernels avx2_pair_kernels();
PairKernels avx512_pair_kernels();

template <typename Element>
ConversionKernels<Element> conversion_kernels(Isa isa) {
  switch (isa) {
#if defined(__x86_64__)
    case Isa::kAvx512:
      return avx512_conversion_kernels<Element>();
    case Isa::kAvx2:
      return avx2_conversion_kernels<Element>();
#endif
    default:
      return portable_conversion_kernels<Element>();
  }
}

inline ByteKernels byte_kernels(Isa isa) {
  switch (isa) {
#if defined(__x86_64__)
    case Isa::kAvx512:
      return avx512_byte_kernels();
    case Isa::kAvx2:
      return avx2_byte_kernels();
#endif
    default:
      return portable_byte_kernels();
  }
}

inline PairKernels pair_kernels(Isa isa) {
  switch (isa) {
#if defined(__x86_64__)
    case Isa::kAvx512:
      return avx512_pair_kernels();
    case Isa::kAvx2:
      return avx2_pair_kernels();
#endif
    default:
      return portable_pair_kernels();
  }
}

}  // namespace titan_opd
