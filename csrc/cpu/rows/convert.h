// Elements of any type as float32, and back, rounded to the nearest even: for loops over float32, and for copies.
#pragma once

namespace titan_opd {
namespace {

template <typename Element>
void load(const Element* elements, int64_t count, float* values) {
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) {
    values[i] = to_float(elements[i]);
  }
}

// Asks for memory a kilobyte ahead: masters that are cast into an engine come from main memory.
template <typename Element>
void store(const float* values, int64_t count, Element* elements) {
  constexpr int64_t kLine = 16, kStep = 4 * kLine, kAhead = 256;
  int64_t i = 0;
  for (; i + kStep <= count; i += kStep) {
    for (int64_t j = i; j < i + kStep; j += kLine) {
      __builtin_prefetch(values + j + kAhead);
    }
#pragma omp simd
    for (int64_t j = i; j < i + kStep; ++j) {
      from_float(values[j], elements[j]);
    }
  }
#pragma omp simd
  for (int64_t j = i; j < count; ++j) {
    from_float(values[j], elements[j]);
  }
}

}  // namespace
}  // namespace titan_opd
