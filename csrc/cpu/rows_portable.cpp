// The loops over rows as the compiler's baseline CPU runs them (SSE2 on x86-64).
#include "rows.h"

#include "rows/bytes.h"
#include "rows/convert.h"
#include "rows/dense_pair.h"
#include "rows/exp_sum.h"
#include "rows/race.h"
#include "rows/scaled_exp.h"
#include "rows/split_block.h"

namespace titan_opd {

template <typename Logit>
RowKernels<Logit> portable_row_kernels() {
  return {&exp_sum<Logit>, &scaled_exp<Logit>, &split_block<Logit>, &peak<Logit>, &low_noise};
}

template RowKernels<float> portable_row_kernels();
template RowKernels<Bfloat16> portable_row_kernels();
template RowKernels<Half> portable_row_kernels();

template <typename Element>
ConversionKernels<Element> portable_conversion_kernels() {
  return {&load<Element>, &store<Element>};
}

template ConversionKernels<float> portable_conversion_kernels();
template ConversionKernels<Bfloat16> portable_conversion_kernels();
template ConversionKernels<Half> portable_conversion_kernels();

ByteKernels portable_byte_kernels() {
  return {&keyed_sum, &stream_bytes, &finish_streams};
}

PairKernels portable_pair_kernels() {
  return {&pair_sums<false>, &pair_sums<true>, &pair_grad<false>, &pair_grad<true>};
}

}  // namespace titan_opd
