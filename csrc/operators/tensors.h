// From tensors to what kernels take, with the checks that keep a kernel from reading outside a tensor. The Python faces
// (titan_opd/ops) check the same arguments before, in words for people.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <algorithm>
#include <optional>
#include <vector>

#include "../tasks.h"

namespace titan_opd {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// Rows of a tensor [R, V] whose columns are adjacent.
template <typename Element>
Matrix<const Element> const_matrix(const Tensor& tensor) {
  return {static_cast<const Element*>(tensor.const_data_ptr()), tensor.stride(0)};
}

template <typename Element>
Matrix<Element> mutable_matrix(Tensor& tensor) {
  return {static_cast<Element*>(tensor.mutable_data_ptr()), tensor.stride(0)};
}

inline void check_logits(const char* op, const char* name, const Tensor& logits_RV) {
  STD_TORCH_CHECK(logits_RV.dim() == 2, op, ": ", name, " must be [R, V], got ", logits_RV.dim(), " dimensions");
  STD_TORCH_CHECK(logits_RV.size(1) <= 1 || logits_RV.stride(1) == 1, op, ": ", name, "' columns must be adjacent");
}

// A float32 tensor of this shape, adjacent in memory, on the logits' device.
inline void check_float(const char* op, const char* name, const Tensor& tensor, std::vector<int64_t> shape,
                        const Tensor& like) {
  STD_TORCH_CHECK(tensor.scalar_type() == ScalarType::Float, op, ": ", name, " must be float32");
  STD_TORCH_CHECK(tensor.device() == like.device(), op, ": ", name, " must be on the logits' device");
  bool fits = tensor.dim() == static_cast<int64_t>(shape.size()) && tensor.is_contiguous();
  for (size_t i = 0; fits && i < shape.size(); ++i) {
    fits = tensor.size(i) == shape[i];
  }
  STD_TORCH_CHECK(fits, op, ": ", name, " has the wrong shape or is not contiguous");
}

inline Ids checked_ids(const char* op, const Tensor& ids_RK, const Tensor& logits_RV) {
  STD_TORCH_CHECK(ids_RK.dim() == 2 && ids_RK.size(0) == logits_RV.size(0), op, ": ids must be [R, K] with logits' R");
  STD_TORCH_CHECK(ids_RK.device() == logits_RV.device(), op, ": ids must be on the logits' device");
  const bool is_int64 = ids_RK.scalar_type() == ScalarType::Long;
  STD_TORCH_CHECK(is_int64 || ids_RK.scalar_type() == ScalarType::Int, op, ": ids must be int32 or int64");
  return {ids_RK.const_data_ptr(), is_int64, ids_RK.stride(0), ids_RK.stride(1), ids_RK.size(1)};
}

inline Shard checked_shard(const char* op, const Tensor& logits_RV, int64_t vocab_start,
                           std::optional<int64_t> vocab_size) {
  STD_TORCH_CHECK(vocab_start >= 0, op, ": vocab_start must not be negative");
  const int64_t num_columns = logits_RV.size(1);
  if (!vocab_size.has_value()) {
    return {vocab_start, num_columns};
  }
  return {vocab_start, std::clamp<int64_t>(*vocab_size - vocab_start, 0, num_columns)};
}

// Kernels that keep columns in 32 bits.
inline void check_32_bit_columns(const char* op, const Shard& shard) {
  STD_TORCH_CHECK(shard.num_columns <= INT32_MAX, op, ": logits must have at most 2^31 - 1 columns, got ",
                  shard.num_columns);
}

inline RowFactors checked_factors(const char* op, const std::optional<Tensor>& inverse_temperature,
                                  const Tensor& logits_RV) {
  if (!inverse_temperature.has_value()) {
    return {nullptr};
  }
  check_float(op, "inverse_temperature", *inverse_temperature, {logits_RV.size(0)}, logits_RV);
  return {static_cast<const float*>(inverse_temperature->const_data_ptr())};
}

inline Tensor new_float(const Tensor& like, std::vector<int64_t> shape) {
  return torch::stable::new_empty(like, shape, ScalarType::Float);
}

inline float* float_data(Tensor& tensor) {
  return static_cast<float*>(tensor.mutable_data_ptr());
}

// Calls `run` with an element of the logits' type: run(float{}), run(Bfloat16{}), run(Half{}).
template <typename Run>
void dispatch_logits(const char* op, const Tensor& logits, Run run) {
  switch (logits.scalar_type()) {
    case ScalarType::Float:
      return run(float{});
    case ScalarType::BFloat16:
      return run(Bfloat16{});
    case ScalarType::Half:
      return run(Half{});
    default:
      STD_TORCH_CHECK(false, op, ": logits must be float32, bfloat16 or float16");
  }
}

}  // namespace titan_opd
