// Comparisons of 64 adjacent numbers with one, as the bits of a word: what compilers do not vectorise by themselves.
#pragma once

#include "exponential.h"

namespace titan_opd {
namespace {

// Bit c: z[c] > floor, or z[c] is NaN.
inline uint64_t above_mask(const float* z, float floor) {
  uint64_t mask = 0;
#if defined(TITAN_OPD_AVX512)
  for (int c = 0; c < 64; c += 16) {
    const uint64_t bits = _mm512_cmp_ps_mask(_mm512_loadu_ps(z + c), _mm512_set1_ps(floor), _CMP_NLE_UQ);
    mask |= bits << c;
  }
#elif defined(TITAN_OPD_AVX2)
  for (int c = 0; c < 64; c += 8) {
    const __m256 above = _mm256_cmp_ps(_mm256_loadu_ps(z + c), _mm256_set1_ps(floor), _CMP_NLE_UQ);
    mask |= static_cast<uint64_t>(_mm256_movemask_ps(above)) << c;
  }
#elif defined(__SSE2__)
  for (int c = 0; c < 64; c += 4) {
    const __m128 above = _mm_cmpnle_ps(_mm_loadu_ps(z + c), _mm_set1_ps(floor));
    mask |= static_cast<uint64_t>(_mm_movemask_ps(above)) << c;
  }
#else
  for (int c = 0; c < 64; ++c) {
    mask |= static_cast<uint64_t>(!(z[c] <= floor)) << c;
  }
#endif
  return mask;
}

// Bit c: words[c] <= limit. SSE2 and AVX2 compare signed integers only: flipping the sign bits keeps the order.
inline uint64_t at_most_mask(const uint32_t* words, uint32_t limit) {
  uint64_t mask = 0;
#if defined(TITAN_OPD_AVX512)
  for (int c = 0; c < 64; c += 16) {
    const uint64_t bits = _mm512_cmple_epu32_mask(_mm512_loadu_si512(words + c), _mm512_set1_epi32(limit));
    mask |= bits << c;
  }
#elif defined(TITAN_OPD_AVX2)
  const __m256i sign = _mm256_set1_epi32(INT32_MIN);
  const __m256i flipped_limit = _mm256_xor_si256(_mm256_set1_epi32(limit), sign);
  for (int c = 0; c < 64; c += 8) {
    const __m256i flipped =
        _mm256_xor_si256(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(words + c)), sign);
    const __m256i above = _mm256_cmpgt_epi32(flipped, flipped_limit);
    mask |= static_cast<uint64_t>(_mm256_movemask_ps(_mm256_castsi256_ps(above))) << c;
  }
  mask = ~mask;
#elif defined(__SSE2__)
  const __m128i sign = _mm_set1_epi32(INT32_MIN);
  const __m128i flipped_limit = _mm_xor_si128(_mm_set1_epi32(limit), sign);
  for (int c = 0; c < 64; c += 4) {
    const __m128i flipped = _mm_xor_si128(_mm_loadu_si128(reinterpret_cast<const __m128i*>(words + c)), sign);
    const __m128i above = _mm_cmpgt_epi32(flipped, flipped_limit);
    mask |= static_cast<uint64_t>(_mm_movemask_ps(_mm_castsi128_ps(above))) << c;
  }
  mask = ~mask;
#else
  for (int c = 0; c < 64; ++c) {
    mask |= static_cast<uint64_t>(words[c] <= limit) << c;
  }
#endif
  return mask;
}

}  // namespace
}  // namespace titan_opd
