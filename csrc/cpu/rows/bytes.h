// Loops over the bytes of tensors: what their digests are made of, and stores that leave the caches alone.
#pragma once

#include <cstring>

namespace titan_opd {
namespace {

constexpr int64_t kAhead = 1024;  // bytes asked for before they are needed; the CPU's own guess ends with each page

#if defined(TITAN_OPD_AVX2)
inline bool can_stream(const void* destination) {
  return reinterpret_cast<uintptr_t>(destination) % 32 == 0;
}

// The sum over as many of the words as are whole steps of 16, and how many those are. Compilers multiply all 64 bits of
// each lane, three products for one, so it is written out.
template <bool kStreams>
uint64_t keyed_sum_of_steps(const char* from, int64_t num_words, const uint32_t* keys, char* to, int64_t* num_summed) {
  __m256i even[2] = {_mm256_setzero_si256(), _mm256_setzero_si256()}, odd[2] = {even[0], even[0]};
  int64_t i = 0;
  for (; i + 16 <= num_words; i += 16) {
    __builtin_prefetch(from + 4 * i + kAhead);
    for (int half = 0; half < 2; ++half) {
      const __m256i word = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + 4 * i) + half);
      const __m256i key = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(keys + i) + half);
      if constexpr (kStreams) {
        _mm256_stream_si256(reinterpret_cast<__m256i*>(to + 4 * i) + half, word);
      }
      even[half] = _mm256_add_epi64(even[half], _mm256_mul_epu32(word, key));
      odd[half] =
          _mm256_add_epi64(odd[half], _mm256_mul_epu32(_mm256_srli_epi64(word, 32), _mm256_srli_epi64(key, 32)));
    }
  }
  *num_summed = i;
  uint64_t lanes[4];
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(lanes),
                      _mm256_add_epi64(_mm256_add_epi64(even[0], even[1]), _mm256_add_epi64(odd[0], odd[1])));
  return lanes[0] + lanes[1] + lanes[2] + lanes[3];
}
#endif

// sum words[i] * keys[i] modulo 2^64. The words may lie anywhere, and are copied to `destination` if it is not null, with
// `streams` past the caches.
uint64_t keyed_sum(const void* words, int64_t num_words, const uint32_t* keys, void* destination, bool streams) {
  const char* from = static_cast<const char*>(words);
  char* to = static_cast<char*>(destination);
  uint64_t sum = 0;
  int64_t i = 0;
#if defined(TITAN_OPD_AVX2)
  if (to != nullptr && streams && can_stream(to)) {
    sum = keyed_sum_of_steps<true>(from, num_words, keys, to, &i);
  } else {
    if (to != nullptr) {
      std::memcpy(to, from, 4 * num_words);
    }
    to = nullptr;
    sum = keyed_sum_of_steps<false>(from, num_words, keys, nullptr, &i);
  }
#endif
  if (to != nullptr) {
    std::memcpy(to + 4 * i, from + 4 * i, 4 * (num_words - i));
  }
  for (; i < num_words; ++i) {
    uint32_t word;
    std::memcpy(&word, from + 4 * i, sizeof(word));
    sum += static_cast<uint64_t>(word) * keys[i];
  }
  return sum;
}

// memcpy past the caches: the destination is not read first, and what lies in the caches stays there.
void stream_bytes(const void* source, int64_t num_bytes, void* destination) {
  const char* from = static_cast<const char*>(source);
  char* to = static_cast<char*>(destination);
  int64_t i = 0;
#if defined(TITAN_OPD_AVX2)
  for (; can_stream(to) && i + 32 <= num_bytes; i += 32) {
    const __m256i values = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + i));
    _mm256_stream_si256(reinterpret_cast<__m256i*>(to + i), values);
  }
#endif
  std::memcpy(to + i, from + i, num_bytes - i);
}

// Before another thread reads what was streamed.
void finish_streams() {
#if defined(TITAN_OPD_AVX2)
  _mm_sfence();
#endif
}

}  // namespace
}  // namespace titan_opd
