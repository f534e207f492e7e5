// The sum of exponentials over one row with some columns left out: the inner loop of gather_stats.
#pragma once

#include "exponential.h"

namespace titan_opd {
namespace {

// Columns in a word of the bitmap; a block is padded to whole words, so that its loops need no remainder.
constexpr int64_t kWordColumns = 64;
static_assert(kBlockColumns % kWordColumns == 0, "a block holds whole words");

inline float larger(float a, float b) {
  return a > b ? a : b;  // b when a is NaN
}

// The largest value, passing over NaN. Four running maxima, because one would wait for its own latency at each step.
inline float block_max(const float* block, int64_t num_columns) {
  const int64_t quarter = num_columns / 4;
  float max0 = -INFINITY, max1 = -INFINITY, max2 = -INFINITY, max3 = -INFINITY;
#pragma omp simd reduction(max : max0, max1, max2, max3)
  for (int64_t c = 0; c < quarter; ++c) {
    max0 = larger(block[c], max0);
    max1 = larger(block[c + quarter], max1);
    max2 = larger(block[c + 2 * quarter], max2);
    max3 = larger(block[c + 3 * quarter], max3);
  }
  return larger(larger(max0, max1), larger(max2, max3));
}

// `num_columns` is a multiple of kWordColumns.
inline ExpSum block_sum(const float* block, int64_t num_columns) {
  const float max = block_max(block, num_columns);
  const float shift = max == -INFINITY ? 0.0f : max;  // -inf - -inf would be NaN
  float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
  for (int64_t c = 0; c < num_columns; ++c) {
    sum += exp_nonpositive(block[c] - shift);
  }
  if (sum != sum) {  // a NaN, or a +inf: +inf - +inf
    return {NAN, NAN};
  }
  if (max == -INFINITY) {
    return {};
  }
  return {max, sum};
}

// Copies a block as float32, with -inf for the columns left out and for those that fill up the last word. `left_out`
// starts at the block's own word. Returns the number of columns with the filling.
template <typename Logit>
inline int64_t load_block(const Logit* row, int64_t num_columns, float factor, const uint64_t* left_out,
                          float* block) {
#pragma omp simd
  for (int64_t c = 0; c < num_columns; ++c) {
    block[c] = to_float(row[c]) * factor;
  }
  int64_t filled = num_columns;
  for (; filled % kWordColumns != 0; ++filled) {
    block[filled] = -INFINITY;
  }
  if (left_out != nullptr) {
    for (int64_t begin = 0; begin < num_columns; begin += kWordColumns) {
      for (uint64_t bits = left_out[begin / kWordColumns]; bits != 0; bits &= bits - 1) {
        block[begin + __builtin_ctzll(bits)] = -INFINITY;
      }
    }
  }
  return filled;
}

template <typename Logit>
ExpSum exp_sum(const Logit* row, int64_t num_columns, float factor, const uint64_t* left_out) {
  alignas(64) float block[kBlockColumns];
  const auto block_columns = [&](int64_t begin) {
    const int64_t rest = num_columns - begin;
    return rest < kBlockColumns ? rest : kBlockColumns;
  };
  ExpSum total;
  for (int64_t begin = 0; begin < num_columns; begin += kBlockColumns) {
    const uint64_t* block_left_out = left_out == nullptr ? nullptr : left_out + begin / kWordColumns;
    const int64_t filled = load_block(row + begin, block_columns(begin), factor, block_left_out, block);
    const int64_t next = begin + kBlockColumns;
    if (next < num_columns) {  // before this block's exponentials are computed
      prefetch(row + next, block_columns(next));
    }
    total = merge(total, block_sum(block, filled));
  }
  return total;
}

}  // namespace
}  // namespace titan_opd
