// Counter-based noise: what a draw gets at an id is a hash of the row's key, the draw's number and the id, the same bits
// in C++, in CUDA and in titan_opd/ops/noise.py.
#pragma once

#include <cmath>

#include "elements.h"

namespace titan_opd {

// Output number `word` of the SplitMix64 generator (Steele, Lea and Flood, OOPSLA 2014) that starts at `state`.
TITAN_OPD_HOST_DEVICE uint64_t absorb(uint64_t state, uint64_t word) {
  uint64_t mixed = state + 0x9E3779B97F4A7C15u * (word + 1);
  mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9u;
  mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EBu;
  return mixed ^ (mixed >> 31);
}

// The upper 32 of a uniform's 52 bits: all that most ids of a race need. Two rounds of multiplication and shift (constants
// by C. Wellons, "Prospecting for Hash Functions", 2018), each with its half of the draw's key.
TITAN_OPD_HOST_DEVICE uint32_t race_word(uint64_t draw_key, uint32_t id) {
  uint32_t word = id ^ static_cast<uint32_t>(draw_key);
  word = (word ^ (word >> 16)) * 0x7FEB352Du;
  word = (word ^ (word >> 15)) + static_cast<uint32_t>(draw_key >> 32);
  word *= 0x846CA68Bu;
  return word ^ (word >> 16);
}

// z + g with g = -log(-log(1 - v)), a Gumbel variable, and v the uniform of 52 bits and a half, so that neither 0 nor 1
// occurs. As -log(1 - v) >= v, the score is at most z - log(v), of which race_word tells nearly all.
TITAN_OPD_HOST_DEVICE double race_score(float z, uint64_t draw_key, uint32_t id) {
  const uint64_t bits = static_cast<uint64_t>(race_word(draw_key, id)) << 20 | absorb(draw_key, id) >> 44;
  const double v = (static_cast<double>(bits) + 0.5) * 0x1p-52;
  return static_cast<double>(z) - log(-log1p(-v));
}

}  // namespace titan_opd
