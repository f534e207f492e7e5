// One step of the search for a row's largest logits: the inner loop of topk_logprobs.
#pragma once

#include "exp_sum.h"
#include "masks.h"

namespace titan_opd {
namespace {

static_assert(kMaxSplitColumns == kBlockColumns, "a step is a block");

template <typename Logit>
ExpSum split_block(const Logit* row, int64_t first, int64_t num_columns, int64_t num_following, float factor,
                   const float* floor, uint64_t* keys, int64_t* num_keys) {
  alignas(64) float block[kBlockColumns];
  const int64_t filled = load_block(row + first, num_columns, factor, nullptr, block);
  prefetch(row + first + num_columns, num_following);

  int64_t end = *num_keys;
  for (int64_t begin = 0; begin < num_columns; begin += kWordColumns) {
    uint64_t bits = floor == nullptr ? ~uint64_t{0} : above_mask(block + begin, *floor);
    const int64_t rest = num_columns - begin;
    if (rest < kWordColumns) {
      bits &= (uint64_t{1} << rest) - 1;
    }
    for (; bits != 0; bits &= bits - 1) {
      const int64_t c = begin + __builtin_ctzll(bits);
      keys[end++] = order_key(block[c], static_cast<uint32_t>(first + c));
      block[c] = -INFINITY;
    }
  }
  *num_keys = end;
  return block_sum(block, filled);
}

}  // namespace
}  // namespace titan_opd
