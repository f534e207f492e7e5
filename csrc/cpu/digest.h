// The digest of bytes, block by block, by one instruction set.
#pragma once

#include <array>
#include <cstring>

#include "../digest.h"
#include "rows.h"

namespace titan_opd {

// What block number `block` adds to its tensor's digest. At most kDigestBytes; the last word is filled up with zeros. The
// bytes are copied to `destination` if it is not null, with `streams` past the caches.
inline uint64_t digest_of_block(const ByteKernels& kernels, const void* bytes, int64_t num_bytes, int64_t block,
                                void* destination = nullptr, bool streams = false) {
  static const std::array<uint32_t, kDigestWords> keys = [] {
    std::array<uint32_t, kDigestWords> drawn;
    for (int64_t i = 0; i < kDigestWords; ++i) {
      drawn[i] = digest_key(i);
    }
    return drawn;
  }();
  const int64_t num_words = num_bytes / 4;
  uint64_t sum = kernels.keyed_sum(bytes, num_words, keys.data(), destination, streams);
  if (const int64_t rest = num_bytes % 4; rest != 0) {
    uint32_t word = 0;
    std::memcpy(&word, static_cast<const char*>(bytes) + 4 * num_words, rest);
    if (destination != nullptr) {
      std::memcpy(static_cast<char*>(destination) + 4 * num_words, &word, rest);
    }
    sum += static_cast<uint64_t>(word) * keys[num_words];
  }
  return sum * digest_factor(block);
}

// Adds to a digest that other threads add to.
inline void add_to_digest(int64_t* digest, uint64_t value) {
  __atomic_fetch_add(digest, static_cast<int64_t>(value), __ATOMIC_RELAXED);
}

}  // namespace titan_opd
