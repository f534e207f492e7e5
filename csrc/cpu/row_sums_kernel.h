// The body of the row_sum_* kernels. Included once by each row_sums_*.cpp, after that file's target pragma, so that
// the compiler vectorises the same loops for another instruction set.
//
// Everything is in an unnamed namespace and nothing here instantiates a standard template: an inline function with
// external linkage, compiled for AVX-512 in one file, could be the copy that the linker keeps for all files, and would
// crash on a CPU without it.

#include <cstring>

namespace titan_opd {
namespace {

// 8 KiB of float32: a block is looked at twice (its maximum, its exponentials), the second time in the L1 cache.
constexpr int64_t kBlockColumns = 2048;
static_assert(kBlockColumns % 64 == 0, "a block is a whole number of words of the bitmap");

// e^x for x <= 0, NaN for NaN, within 2 ulp; below -87, where the sum's largest term 1 hides it, e^-87.
//
// x = n ln 2 + r with |r| <= ln 2 / 2, e^r by a polynomial (Cephes' expf), 2^n by its exponent bits.
inline float exp_nonpositive(float x) {
  constexpr float kLog2E = 1.44269504f;
  // Adding 1.5 * 2^23 rounds to the nearest integer and leaves it in the low bits: vectorises on every CPU, which
  // std::rint and the conversion to int do not.
  constexpr float kRounder = 12582912.0f;
  // ln 2 in two parts, the first short enough for n * kLn2High to be exact.
  constexpr float kLn2High = 0.693359375f;
  constexpr float kLn2Low = -2.12194440e-4f;

  x = x < -87.0f ? -87.0f : x;  // also turns -inf into a number; false for NaN, which goes on
  const float rounded = x * kLog2E + kRounder;
  const float n = rounded - kRounder;
  const float r = x - n * kLn2High - n * kLn2Low;

  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + (r + 1.0f);

  uint32_t bits;
  std::memcpy(&bits, &rounded, sizeof(bits));
  bits = (bits + 127u) << 23;  // the exponent field of 2^n; what kRounder put above it is shifted out
  float power;
  std::memcpy(&power, &bits, sizeof(power));
  return p * power;
}

inline ExpSum block_sum(const float* block, int64_t num_columns) {
  float max = -INFINITY;
#pragma omp simd reduction(max : max)
  for (int64_t c = 0; c < num_columns; ++c) {
    max = block[c] > max ? block[c] : max;  // passes over NaN, which the sum below catches
  }
  const float shift = max == -INFINITY ? 0.0f : max;  // -inf - -inf would be NaN
  float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
  for (int64_t c = 0; c < num_columns; ++c) {
    sum += exp_nonpositive(block[c] - shift);
  }
  if (sum != sum) {
    return {NAN, NAN};
  }
  if (max == -INFINITY) {
    return {};
  }
  return {max, sum};
}

// Copies a block as float32, its left-out columns as -inf. `left_out` starts at the block's own word.
template <typename Logit>
inline void load_block(const Logit* row, int64_t num_columns, const uint64_t* left_out, float* block) {
#pragma omp simd
  for (int64_t c = 0; c < num_columns; ++c) {
    block[c] = to_float(row[c]);
  }
  if (left_out == nullptr) {
    return;
  }
  for (int64_t word = 0; word * 64 < num_columns; ++word) {
    for (uint64_t bits = left_out[word]; bits != 0; bits &= bits - 1) {
      block[word * 64 + __builtin_ctzll(bits)] = -INFINITY;
    }
  }
}

template <typename Logit>
inline ExpSum row_sum(const Logit* row, int64_t num_columns, const uint64_t* left_out) {
  alignas(64) float block[kBlockColumns];
  ExpSum total;
  for (int64_t begin = 0; begin < num_columns; begin += kBlockColumns) {
    const int64_t rest = num_columns - begin;
    const int64_t block_columns = rest < kBlockColumns ? rest : kBlockColumns;
    load_block(row + begin, block_columns, left_out == nullptr ? nullptr : left_out + begin / 64, block);
    total = merge(total, block_sum(block, block_columns));
  }
  return total;
}

}  // namespace
}  // namespace titan_opd
