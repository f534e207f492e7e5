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

template <typename Element>
void store(const float* values, int64_t count, Element* elements) {
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) {
    from_float(values[i], elements[i]);
  }
}

}  // namespace
}  // namespace titan_opd
