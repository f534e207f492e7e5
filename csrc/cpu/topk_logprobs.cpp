// topk_logprobs on the CPU. A row goes through in blocks that stay in the L1 cache. What may be among the k largest is
// collected, everything else is added to the tail at once; when many have come together they are cut back to the k
// largest, the others join the tail, and the k-th largest is the floor that the following columns must pass. Few do: of
// n columns in random order k / n.

#include "../operators/topk_logprobs.h"

#include <algorithm>
#include <functional>
#include <string>
#include <vector>

#include "isa.h"
#include "parallel.h"
#include "rows.h"

namespace titan_opd {
namespace {

// The k largest columns seen so far and those that wait for the next cut.
template <typename Logit>
class Collection {
 public:
  Collection(int k, Isa isa)
      : k_(k),
        max_keys_(std::max<int64_t>(4 * k, kFirstColumns)),
        kernels_(row_kernels<Logit>(isa)),
        value_kernels_(row_kernels<float>(isa)),
        keys_(max_keys_ + kMaxSplitColumns) {}

  void scan(const Logit* row, int64_t num_columns, float factor) {
    num_keys_ = 0;
    has_floor_ = false;
    tail_ = {};
    for (int64_t begin = 0; begin < num_columns;) {
      // Short steps first: without a floor every column is collected.
      const int64_t step = std::min(std::clamp(begin, kFirstColumns, kMaxSplitColumns), num_columns - begin);
      const int64_t following = std::min(kMaxSplitColumns, num_columns - begin - step);
      tail_ = merge(tail_, kernels_.split_block(row, begin, step, following, factor, has_floor_ ? &floor_ : nullptr,
                                                keys_.data(), &num_keys_));
      begin += step;
      if (num_keys_ >= max_keys_) {
        cut();
      }
    }
    cut();
    std::sort(keys_.begin(), keys_.begin() + num_keys_, std::greater<uint64_t>());
  }

  // At most k, the largest first.
  int64_t num_keys() const { return num_keys_; }
  uint64_t key(int64_t i) const { return keys_[i]; }
  ExpSum tail() const { return tail_; }
  ExpSum largest() { return sum_of(0, num_keys_); }

 private:
  static constexpr int64_t kFirstColumns = 256;

  void cut() {
    if (num_keys_ <= k_) {
      return;
    }
    const auto last = keys_.begin() + k_ - 1;
    std::nth_element(keys_.begin(), last, keys_.begin() + num_keys_, std::greater<uint64_t>());
    tail_ = merge(tail_, sum_of(k_, num_keys_));
    num_keys_ = k_;
    // A later column that equals the floor has a higher id and stays outside. Above NaN there is nothing; a floor of
    // +inf lets NaN pass, of which the next cut keeps none.
    const float value = key_logit(*last);
    floor_ = std::isnan(value) ? INFINITY : value;
    has_floor_ = true;
  }

  ExpSum sum_of(int64_t begin, int64_t end) {
    values_.resize(end - begin);
    std::transform(keys_.begin() + begin, keys_.begin() + end, values_.begin(), key_logit);
    return value_kernels_.exp_sum(values_.data(), values_.size(), 1.0f, nullptr);
  }

  int64_t k_;
  int64_t max_keys_;
  RowKernels<Logit> kernels_;
  RowKernels<float> value_kernels_;
  std::vector<uint64_t> keys_;
  std::vector<float> values_;
  int64_t num_keys_ = 0;
  bool has_floor_ = false;
  float floor_ = 0.0f;
  ExpSum tail_;
};

template <typename Logit>
void process_rows(const TopkLogprobsTask<Logit>& task, Isa isa, int64_t begin, int64_t end) {
  Collection<Logit> collection(task.k, isa);
  for (int64_t r = begin; r < end; ++r) {
    collection.scan(task.logits_RV.row(r), task.shard.num_columns, task.inverse_temperature_R.at(r));
    for (int64_t i = 0; i < task.k; ++i) {
      const bool exists = i < collection.num_keys();
      task.ids_RK.row(r)[i] = exists ? task.shard.vocab_start + key_column(collection.key(i)) : -1;
      task.values_RK.row(r)[i] = exists ? key_logit(collection.key(i)) : -INFINITY;
    }
    const ExpSum tail = collection.tail();
    const ExpSum whole = merge(tail, collection.largest());
    task.max_R[r] = whole.max;
    task.sum_exp_R[r] = static_cast<float>(whole.sum);
    task.tail_max_R[r] = tail.max;
    task.tail_sum_exp_R[r] = static_cast<float>(tail.sum);
  }
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> topk_logprobs_cpu(
    const Tensor& logits_RV, int64_t k, int64_t vocab_start, std::optional<int64_t> vocab_size,
    std::optional<Tensor> inverse_temperature_R, std::optional<std::string> isa_name) {
  const Isa isa = select_isa(isa_name);
  return topk_logprobs(logits_RV, k, vocab_start, vocab_size, inverse_temperature_R, [&](const auto& task) {
    for_each_row_range(task.num_rows, task.shard.num_columns,
                       [&](int64_t begin, int64_t end) { process_rows(task, isa, begin, end); });
  });
}

}  // namespace
}  // namespace titan_opd

STABLE_TORCH_LIBRARY_IMPL(titan_opd, CPU, library) {
  library.impl("topk_logprobs", TORCH_BOX(&titan_opd::topk_logprobs_cpu));
}
