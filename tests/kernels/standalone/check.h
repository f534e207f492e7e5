// A small frame for checks of the CUDA kernels in emulation, without torch and Python: compiled with AddressSanitizer it
// sees every access outside an array, and a kernel with a planted fault is one object file more.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <functional>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "../../../csrc/cuda/kernels.h"

namespace standalone {

// A heap array of exactly `size` elements, with nothing beside it that belongs to anybody.
template <typename T>
class Array {
 public:
  explicit Array(int64_t size) : size_(size), data_(new T[size]()) {}
  T* data() { return data_.get(); }
  const T* data() const { return data_.get(); }
  T& operator[](int64_t i) { return data_[i]; }
  const T& operator[](int64_t i) const { return data_[i]; }
  int64_t size() const { return size_; }

 private:
  int64_t size_;
  std::unique_ptr<T[]> data_;
};

// A matrix of `columns` used out of `stride` elements a row; nothing follows the last row's last column.
template <typename T>
struct Rows {
  int64_t rows, columns, stride;
  Array<T> elements;

  Rows(int64_t rows, int64_t columns, int64_t padding = 0)
      : rows(rows), columns(columns), stride(columns + padding),
        elements(rows == 0 ? 0 : (rows - 1) * stride + columns) {}
  Rows copy() const {
    Rows other(rows, columns, stride - columns);
    std::copy(elements.data(), elements.data() + elements.size(), other.elements.data());
    return other;
  }
  T& at(int64_t r, int64_t c) { return elements[r * stride + c]; }
  const T& at(int64_t r, int64_t c) const { return elements[r * stride + c]; }
  titan_opd::Matrix<T> matrix() { return {elements.data(), stride}; }
  titan_opd::Matrix<const T> const_matrix() const { return {elements.data(), stride}; }
};

class Random {
 public:
  explicit Random(unsigned seed) : engine_(seed) {}
  float normal(float scale) { return scale * std::normal_distribution<float>()(engine_); }
  float uniform() { return std::uniform_real_distribution<float>()(engine_); }
  // From low to high, both included.
  int64_t integer(int64_t low, int64_t high) { return std::uniform_int_distribution<int64_t>(low, high)(engine_); }

  template <typename Element>
  void fill_normal(Rows<Element>& values, float scale) {
    for (int64_t i = 0; i < values.elements.size(); ++i) {
      titan_opd::from_float(normal(scale), values.elements[i]);
    }
  }

 private:
  std::mt19937 engine_;
};

// The relative error of rounding a float to this type once, and a little more.
inline double rounding(float) { return 2e-6; }
inline double rounding(titan_opd::Half) { return 6e-4; }
inline double rounding(titan_opd::Bfloat16) { return 4e-3; }

// Throws when the difference is above tolerance * (1 + |expected|), or when one of both is NaN.
inline void expect_close(const std::string& what, double actual, double expected, double tolerance) {
  const bool same = actual == expected || (std::isnan(actual) && std::isnan(expected));
  if (!same && !(std::fabs(actual - expected) <= tolerance * (1 + std::fabs(expected)))) {
    throw std::runtime_error(what + ": " + std::to_string(actual) + ", expected " + std::to_string(expected));
  }
}

inline void expect(bool holds, const std::string& what) {
  if (!holds) {
    throw std::runtime_error(what);
  }
}

inline void expect_success(cudaError_t error) {
  expect(error == cudaSuccess, "the launch failed");
}

// Throws unless `call` throws an error whose message contains `part`.
inline void expect_error(const std::string& part, const std::function<void()>& call) {
  try {
    call();
  } catch (const std::runtime_error& error) {
    expect(std::string(error.what()).find(part) != std::string::npos, std::string("another error: ") + error.what());
    return;
  }
  throw std::runtime_error("no error where one with '" + part + "' was expected");
}

struct Check {
  std::string name;
  std::function<void()> run;
};

inline std::vector<Check>& checks() {
  static std::vector<Check> all;
  return all;
}

struct Register {
  Register(const char* name, std::function<void()> run) { checks().push_back({name, std::move(run)}); }
};

// CHECK(name) { ... }: main.cpp runs it under each order of a block's threads; it fails by throwing.
#define CHECK(name)                                                     \
  static void check_##name();                                           \
  static const ::standalone::Register register_##name(#name, &check_##name); \
  static void check_##name()

}  // namespace standalone
