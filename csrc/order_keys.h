// An integer that orders logits: larger for the larger logit, and among equal logits for the lower column. NaN is larger
// than every number, as in torch.topk, and -0 equals 0. No two columns have the same key, so "the k largest" has one
// answer, whatever the order in which they are found.
#pragma once

#include "elements.h"

namespace titan_opd {

// Keys of logits are above it.
constexpr uint64_t kNoKey = 0;

// The upper half orders as the float does, the lower half is the column counted backwards.
TITAN_OPD_HOST_DEVICE uint64_t order_key(float z, uint32_t column) {
  const uint32_t bits = bits_from_float(z + 0.0f);  // -0 becomes 0
  const uint32_t number = (bits >> 31) != 0 ? ~bits : bits | 0x80000000u;
  return static_cast<uint64_t>(z != z ? 0xffffffffu : number) << 32 | static_cast<uint32_t>(~column);
}

TITAN_OPD_HOST_DEVICE float key_logit(uint64_t key) {
  const uint32_t number = static_cast<uint32_t>(key >> 32);
  return float_from_bits((number >> 31) != 0 ? number & 0x7fffffffu : ~number);
}

TITAN_OPD_HOST_DEVICE uint32_t key_column(uint64_t key) {
  return ~static_cast<uint32_t>(key);
}

}  // namespace titan_opd
