// The digest of a tensor's bytes, of which titan_opd/ops/digests.py has the definition: 64 bits, a sum over blocks of
// words, so that blocks can be taken in any order.
#pragma once

#include "noise.h"

namespace titan_opd {

constexpr int64_t kDigestWords = 1024;  // 32-bit words of a block
constexpr int64_t kDigestBytes = 4 * kDigestWords;

// What a word is multiplied by, from its place in its block.
inline uint32_t digest_key(int64_t place) {
  return static_cast<uint32_t>(absorb(0x7174616E, place) >> 32) | 1u;
}

// What a block's sum is multiplied by, from the block's number.
inline uint64_t digest_factor(int64_t block) {
  return absorb(0x6F70645F, block) | 1u;
}

}  // namespace titan_opd
