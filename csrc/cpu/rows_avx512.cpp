// The loops over rows for AVX-512: 16 columns at a time.
#if defined(__x86_64__)

#include "rows.h"

#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,fma,prefer-vector-width=512")
// g++ before 13 does not define __AVX2__ and its like for the pragma.
#define TITAN_OPD_AVX2
#define TITAN_OPD_AVX512

#include "rows/bytes.h"
#include "rows/convert.h"
#include "rows/dense_pair.h"
#include "rows/exp_sum.h"
#include "rows/race.h"
#include "rows/scaled_exp.h"
#include "rows/split_block.h"

namespace titan_opd {

template <typename Logit>
RowKernels<Logit> avx512_row_kernels() {
  return {&exp_sum<Logit>, &scaled_exp<Logit>, &split_block<Logit>, &peak<Logit>, &low_noise};
}

template RowKernels<float> avx512_row_kernels();
template RowKernels<Bfloat16> avx512_row_kernels();
template RowKernels<Half> avx512_row_kernels();

template <typename Element>
ConversionKernels<Element> avx512_conversion_kernels() {
  return {&load<Element>, &store<Element>};
}

template ConversionKernels<float> avx512_conversion_kernels();
template ConversionKernels<Bfloat16> avx512_conversion_kernels();
template ConversionKernels<Half> avx512_conversion_kernels();

ByteKernels avx512_byte_kernels() {
  return {&keyed_sum, &stream_bytes, &finish_streams};
}

PairKernels avx512_pair_kernels() {
  return {&pair_sums<false>, &pair_sums<true>, &pair_grad<false>, &pair_grad<true>};
}

}  // namespace titan_opd

#endif  // __x86_64__
