// What gumbel_sample does to every column: find the largest logit, and the few columns whose noise may let them win.
#pragma once

#include "exp_sum.h"
#include "masks.h"

namespace titan_opd {
namespace {

template <typename Logit>
bool peak(const Logit* row, int64_t num_columns, float factor, float* max) {
  float largest = -INFINITY;
  int num_wrong = 0;
#pragma omp simd reduction(max : largest) reduction(+ : num_wrong)
  for (int64_t c = 0; c < num_columns; ++c) {
    const float z = to_float(row[c]) * factor;
    largest = larger(z, largest);
    num_wrong += z < INFINITY ? 0 : 1;
  }
  *max = largest;
  return num_wrong == 0;
}

inline void low_noise(uint64_t draw_key, uint32_t first_id, int64_t num_columns, uint32_t limit, uint64_t* masks) {
  alignas(64) uint32_t words[kWordColumns];
  for (int64_t begin = 0; begin < num_columns; begin += kWordColumns) {
    const uint32_t id = first_id + static_cast<uint32_t>(begin);
#pragma omp simd
    for (int c = 0; c < static_cast<int>(kWordColumns); ++c) {
      words[c] = race_word(draw_key, id + static_cast<uint32_t>(c));
    }
    masks[begin / kWordColumns] = at_most_mask(words, limit);
  }
}

}  // namespace
}  // namespace titan_opd
