// gather_stats: one read of each row of logits gives its maximum and sum of exponentials, the same over its tail (the
// columns that are not among the row's ids), and the logits at the ids.
//
// The tail is summed for itself. As a difference of the whole and the support it would be rounding noise where the
// support holds nearly all the mass. The whole is then the tail plus the support: the vocabulary is read once.
//
// Shape suffixes: R rows, K ids a row, V columns of this shard.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <algorithm>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "isa.h"
#include "row_sums.h"

namespace titan_opd {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// Fewer logits than this are not worth a second thread (torch's own grain).
constexpr int64_t kLogitsPerThread = 32768;

template <typename Element>
struct Matrix {
  const Element* data;
  int64_t row_stride;
  int64_t column_stride;

  explicit Matrix(const Tensor& tensor)
      : data(static_cast<const Element*>(tensor.const_data_ptr())),
        row_stride(tensor.stride(0)),
        column_stride(tensor.stride(1)) {}

  const Element* row(int64_t r) const { return data + r * row_stride; }
};

struct Outputs {
  float* max_R;
  float* sum_exp_R;
  float* tail_max_R;
  float* tail_sum_exp_R;
  float* candidates_RK;
};

// The shard's columns that count, and the global id of the first.
struct Shard {
  int64_t vocab_start;
  int64_t num_columns;
};

template <typename Logit>
RowSum<Logit> select_row_sum(Isa isa) {
  switch (isa) {
#if defined(__x86_64__)
    case Isa::kAvx512:
      return row_sum_avx512;
    case Isa::kAvx2:
      return row_sum_avx2;
#endif
    default:
      return row_sum_portable;
  }
}

template <typename Logit, typename Id>
void rows(const Matrix<Logit>& logits_RV, const Matrix<Id>& ids_RK, int64_t begin, int64_t end, int64_t num_ids,
          const Shard& shard, RowSum<Logit> row_sum, RowSum<float> support_sum, const Outputs& out) {
  std::vector<uint64_t> in_support((shard.num_columns + 63) / 64);  // a bit per column, all 0 between rows
  std::vector<float> support(num_ids);                              // the row's owned logits, each id once

  for (int64_t r = begin; r < end; ++r) {
    const Logit* row = logits_RV.row(r);
    const Id* ids = ids_RK.row(r);
    float* candidates = out.candidates_RK + r * num_ids;

    int64_t support_size = 0;
    for (int64_t k = 0; k < num_ids; ++k) {
      const int64_t id = ids[k * ids_RK.column_stride];
      const int64_t column = id - shard.vocab_start;
      if (id < 0 || column < 0 || column >= shard.num_columns) {
        candidates[k] = 0.0f;  // padding, or another shard's
        continue;
      }
      candidates[k] = to_float(row[column]);
      uint64_t& word = in_support[column / 64];
      const uint64_t bit = uint64_t{1} << (column % 64);
      if ((word & bit) == 0) {  // a duplicate id is in the set once
        word |= bit;
        support[support_size++] = candidates[k];
      }
    }

    const ExpSum tail = row_sum(row, shard.num_columns, in_support.data());
    const ExpSum whole = merge(tail, support_sum(support.data(), support_size, nullptr));
    out.max_R[r] = whole.max;
    out.sum_exp_R[r] = static_cast<float>(whole.sum);
    out.tail_max_R[r] = tail.max;
    out.tail_sum_exp_R[r] = static_cast<float>(tail.sum);

    for (int64_t k = 0; k < num_ids; ++k) {
      const int64_t column = ids[k * ids_RK.column_stride] - shard.vocab_start;
      if (column >= 0 && column < shard.num_columns) {
        in_support[column / 64] = 0;
      }
    }
  }
}

template <typename Logit, typename Id>
void all_rows(const Tensor& logits_RV, const Tensor& ids_RK, const Shard& shard, Isa isa, const Outputs& out) {
  const Matrix<Logit> logits(logits_RV);
  const Matrix<Id> ids(ids_RK);
  const int64_t num_ids = ids_RK.size(1);
  const int64_t rows_per_thread = std::max<int64_t>(1, kLogitsPerThread / std::max<int64_t>(1, shard.num_columns));
  // torch's own thread pool: it keeps to torch.set_num_threads and starts no second one.
  torch::stable::parallel_for(0, logits_RV.size(0), rows_per_thread, [&](int64_t begin, int64_t end) {
    rows(logits, ids, begin, end, num_ids, shard, select_row_sum<Logit>(isa), select_row_sum<float>(isa), out);
  });
}

// What would read outside the tensors. The Python face has checked the arguments and words its errors for people.
void check_layout(const Tensor& logits_RV, const Tensor& ids_RK, int64_t vocab_start) {
  STD_TORCH_CHECK(logits_RV.dim() == 2 && ids_RK.dim() == 2, "gather_stats: logits and ids must have 2 dimensions");
  STD_TORCH_CHECK(logits_RV.size(0) == ids_RK.size(0), "gather_stats: logits and ids must have as many rows");
  STD_TORCH_CHECK(logits_RV.is_cpu() && ids_RK.is_cpu(), "gather_stats: logits and ids must be on the CPU");
  STD_TORCH_CHECK(logits_RV.size(1) <= 1 || logits_RV.stride(1) == 1, "gather_stats: logits' columns must be adjacent");
  STD_TORCH_CHECK(vocab_start >= 0, "gather_stats: vocab_start must not be negative");
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> gather_stats(const Tensor& logits_RV, const Tensor& ids_RK,
                                                                int64_t vocab_start, std::optional<int64_t> vocab_size,
                                                                std::optional<std::string> isa_name) {
  check_layout(logits_RV, ids_RK, vocab_start);
  const Isa isa = select_isa(isa_name);
  Shard shard{vocab_start, logits_RV.size(1)};
  if (vocab_size.has_value()) {
    shard.num_columns = std::clamp<int64_t>(*vocab_size - vocab_start, 0, shard.num_columns);
  }

  const int64_t num_rows = logits_RV.size(0);
  const auto new_float = [&](std::vector<int64_t> shape) {
    return torch::stable::new_empty(logits_RV, shape, ScalarType::Float);
  };
  Tensor max_R = new_float({num_rows});
  Tensor sum_exp_R = new_float({num_rows});
  Tensor tail_max_R = new_float({num_rows});
  Tensor tail_sum_exp_R = new_float({num_rows});
  Tensor candidates_RK = new_float({num_rows, ids_RK.size(1)});
  const auto data = [](Tensor& tensor) { return static_cast<float*>(tensor.mutable_data_ptr()); };
  const Outputs out{data(max_R), data(sum_exp_R), data(tail_max_R), data(tail_sum_exp_R), data(candidates_RK)};

  const auto with_ids = [&](auto logit) {
    using Logit = decltype(logit);
    if (ids_RK.scalar_type() == ScalarType::Int) {
      all_rows<Logit, int32_t>(logits_RV, ids_RK, shard, isa, out);
    } else if (ids_RK.scalar_type() == ScalarType::Long) {
      all_rows<Logit, int64_t>(logits_RV, ids_RK, shard, isa, out);
    } else {
      STD_TORCH_CHECK(false, "gather_stats: ids must be int32 or int64");
    }
  };
  if (logits_RV.scalar_type() == ScalarType::Float) {
    with_ids(float{});
  } else if (logits_RV.scalar_type() == ScalarType::BFloat16) {
    with_ids(Bfloat16{});
  } else {
    STD_TORCH_CHECK(false, "gather_stats: logits must be float32 or bfloat16");
  }
  return {max_R, sum_exp_R, tail_max_R, tail_sum_exp_R, candidates_RK};
}

}  // namespace
}  // namespace titan_opd

STABLE_TORCH_LIBRARY_IMPL(titan_opd, CPU, library) {
  library.impl("gather_stats", TORCH_BOX(&titan_opd::gather_stats));
}
