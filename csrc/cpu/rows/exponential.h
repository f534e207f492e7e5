// e^x for the loops over rows, and what all of these loops share.
//
// The files of this folder are the bodies of rows_*.cpp: each of those includes them after its target pragma, so that
// the compiler vectorises the same loops for another instruction set. Everything is in an unnamed namespace and nothing
// here instantiates a standard template: an inline function with external linkage, compiled for AVX-512 in one file,
// could be the copy that the linker keeps for all files, and would crash on a CPU without it.
#pragma once

#if defined(__clang__)
#error "clang ignores the target pragmas and would build every kernel for the baseline CPU: use g++ (CXX=g++)"
#endif

namespace titan_opd {
namespace {

// 8 KiB of float32: a block is read several times (its maximum, its exponentials), all but the first from the L1 cache.
constexpr int64_t kBlockColumns = 2048;

// e^x for x <= 0 and NaN for NaN. Relative error below 1e-7 (1 + |x|): small where a term counts in a sum whose
// largest term is 1. Below -87, where no term counts, e^-87.
//
// e^x = 2^n 2^r with n the integer nearest to y = x / ln 2 and |r| <= 1/2; 2^r by the polynomial of Cephes' exp2f, 2^n
// by its exponent bits.
inline float exp_nonpositive(float x) {
  constexpr float kLog2E = 1.44269504f;
  // Adding 1.5 * 2^23 rounds to the nearest integer and leaves it in the low bits. This vectorises on every CPU, which
  // std::rint and a conversion to int do not.
  constexpr float kRounder = 12582912.0f;

  x = -87.0f > x ? -87.0f : x;  // also makes a number of -inf; lets NaN pass
  const float y = x * kLog2E;
  const float rounded = y + kRounder;
  const float r = y - (rounded - kRounder);

  float power_r = 1.535336188319500e-4f;
  power_r = power_r * r + 1.339887440266574e-3f;
  power_r = power_r * r + 9.618437357674640e-3f;
  power_r = power_r * r + 5.550332471162809e-2f;
  power_r = power_r * r + 2.402264791363012e-1f;
  power_r = power_r * r + 6.931472028550421e-1f;
  power_r = power_r * r + 1.0f;

  uint32_t bits;
  __builtin_memcpy(&bits, &rounded, sizeof(bits));
  bits = (bits + 127u) << 23;  // n in the exponent field; what kRounder put above it is shifted out
  float power_n;
  __builtin_memcpy(&power_n, &bits, sizeof(power_n));
  return power_r * power_n;
}

// As exp_nonpositive, but 0 below -87: for elements of a gradient, where a logit of -inf gets none.
inline float exp_or_zero(float x) {
  return x < -87.0f ? 0.0f : exp_nonpositive(x);
}

// Asks for memory ahead of the arithmetic on what came before it. For logits that come from main memory this saves 10
// to 20 % of the time; from a cache it costs 4 %.
template <typename Logit>
inline void prefetch(const Logit* row, int64_t num_columns) {
  constexpr int64_t kColumnsPerLine = 64 / sizeof(Logit);
  for (int64_t c = 0; c < num_columns; c += kColumnsPerLine) {
    __builtin_prefetch(row + c);
  }
}

}  // namespace
}  // namespace titan_opd
