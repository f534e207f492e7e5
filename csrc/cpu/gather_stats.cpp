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
#include "row_sum.h"

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

  // The column of a global id; -1 for padding and for what another shard owns.
  int64_t column(int64_t id) const {
    // vocab_start >= 0, so the first comparison also keeps the subtraction from overflowing.
    return id < vocab_start || id - vocab_start >= num_columns ? -1 : id - vocab_start;
  }
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

// The columns of the row's ids, each once.
class Support {
 public:
  Support(int64_t num_columns, int64_t max_size) : bitmap_((num_columns + 63) / 64) {
    columns_.reserve(max_size);
    logits_.reserve(max_size);
  }

  void add(int64_t column, float logit) {
    uint64_t& word = bitmap_[column / 64];
    const uint64_t bit = uint64_t{1} << (column % 64);
    if ((word & bit) == 0) {
      word |= bit;
      columns_.push_back(column);
      logits_.push_back(logit);
    }
  }

  // Costs the size of the support, not of the vocabulary.
  void clear() {
    for (const int64_t column : columns_) {
      bitmap_[column / 64] = 0;
    }
    columns_.clear();
    logits_.clear();
  }

  const uint64_t* bitmap() const { return bitmap_.data(); }
  const std::vector<float>& logits() const { return logits_; }

 private:
  std::vector<uint64_t> bitmap_;  // a bit per column of the shard
  std::vector<int64_t> columns_;
  std::vector<float> logits_;
};

template <typename Logit, typename Id>
struct Task {
  Matrix<Logit> logits_RV;
  Matrix<Id> ids_RK;
  int64_t num_rows;
  int64_t num_ids;
  Shard shard;
  Isa isa;
  Outputs out;
};

template <typename Logit, typename Id>
void process_rows(const Task<Logit, Id>& task, int64_t begin, int64_t end) {
  const RowSum<Logit> row_sum = select_row_sum<Logit>(task.isa);
  const RowSum<float> support_sum = select_row_sum<float>(task.isa);
  Support support(task.shard.num_columns, task.num_ids);

  for (int64_t r = begin; r < end; ++r) {
    const Logit* row = task.logits_RV.row(r);
    const Id* ids = task.ids_RK.row(r);
    float* candidates = task.out.candidates_RK + r * task.num_ids;
    for (int64_t k = 0; k < task.num_ids; ++k) {
      const int64_t column = task.shard.column(ids[k * task.ids_RK.column_stride]);
      if (column < 0) {
        candidates[k] = 0.0f;
        continue;
      }
      candidates[k] = to_float(row[column]);
      support.add(column, candidates[k]);
    }

    const ExpSum tail = row_sum(row, task.shard.num_columns, support.bitmap());
    const ExpSum whole = merge(tail, support_sum(support.logits().data(), support.logits().size(), nullptr));
    task.out.max_R[r] = whole.max;
    task.out.sum_exp_R[r] = static_cast<float>(whole.sum);
    task.out.tail_max_R[r] = tail.max;
    task.out.tail_sum_exp_R[r] = static_cast<float>(tail.sum);
    support.clear();
  }
}

template <typename Logit, typename Id>
void process(const Task<Logit, Id>& task) {
  const int64_t rows_per_thread = std::max<int64_t>(1, kLogitsPerThread / std::max<int64_t>(1, task.shard.num_columns));
  // torch's own thread pool: it keeps to torch.set_num_threads, and no second pool competes with it.
  torch::stable::parallel_for(0, task.num_rows, rows_per_thread,
                              [&](int64_t begin, int64_t end) { process_rows(task, begin, end); });
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
  const int64_t num_ids = ids_RK.size(1);
  const auto new_float = [&](std::vector<int64_t> shape) {
    return torch::stable::new_empty(logits_RV, shape, ScalarType::Float);
  };
  Tensor max_R = new_float({num_rows});
  Tensor sum_exp_R = new_float({num_rows});
  Tensor tail_max_R = new_float({num_rows});
  Tensor tail_sum_exp_R = new_float({num_rows});
  Tensor candidates_RK = new_float({num_rows, num_ids});
  const auto data = [](Tensor& tensor) { return static_cast<float*>(tensor.mutable_data_ptr()); };
  const Outputs out{data(max_R), data(sum_exp_R), data(tail_max_R), data(tail_sum_exp_R), data(candidates_RK)};

  const auto process_as = [&](auto logit, auto id) {
    using Logit = decltype(logit);
    using Id = decltype(id);
    process(Task<Logit, Id>{Matrix<Logit>(logits_RV), Matrix<Id>(ids_RK), num_rows, num_ids, shard, isa, out});
  };
  const auto process_with_ids = [&](auto logit) {
    if (ids_RK.scalar_type() == ScalarType::Int) {
      process_as(logit, int32_t{});
    } else if (ids_RK.scalar_type() == ScalarType::Long) {
      process_as(logit, int64_t{});
    } else {
      STD_TORCH_CHECK(false, "gather_stats: ids must be int32 or int64");
    }
  };
  if (logits_RV.scalar_type() == ScalarType::Float) {
    process_with_ids(float{});
  } else if (logits_RV.scalar_type() == ScalarType::BFloat16) {
    process_with_ids(Bfloat16{});
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
