// topk_logprobs against a sort: odd shapes, equal logits, more ids than columns, rows that keep the floor rising.
//
// Shape suffixes: R rows, V columns of this shard, K ids a row.

#include <numeric>

#include "check.h"

using namespace standalone;
using namespace titan_opd;

namespace {

// kRisingBelowFirst: each column is the second largest so far, which a floor that is one too high would not let pass.
enum Order { kRandom, kRising, kRisingBelowFirst, kFewValues };

// max z and sum exp(z - max).
struct Sum {
  double max = -INFINITY;
  double sum = 0;

  explicit Sum(const std::vector<double>& terms) {
    for (const double z : terms) {
      max = std::fmax(max, z);
    }
    for (const double z : terms) {
      sum += std::exp(z - max);
    }
  }
};

template <typename Logit>
void compare(int64_t num_rows, int64_t num_columns, int k, int64_t padding, int64_t counted, Order order,
             unsigned seed) {
  constexpr int64_t kVocabStart = 500;
  Random random(seed);
  Rows<Logit> logits_RV(num_rows, num_columns, padding);
  random.fill_normal(logits_RV, 4.0f);
  for (int64_t i = 0; order != kRandom && i < logits_RV.elements.size(); ++i) {
    const float z = order == kFewValues ? static_cast<float>(random.integer(-2, 2)) : static_cast<float>(i) / 512;
    from_float(order == kRisingBelowFirst && i == 0 ? 1000.0f : z, logits_RV.elements[i]);
  }
  Array<float> factors_R(num_rows);
  for (int64_t r = 0; r < num_rows; ++r) {
    factors_R[r] = 0.5f + random.uniform();
  }
  Array<float> max_R(num_rows), sum_exp_R(num_rows), tail_max_R(num_rows), tail_sum_exp_R(num_rows);
  Rows<int64_t> ids_RK(num_rows, k);
  Rows<float> values_RK(num_rows, k);
  expect_success(launch_topk_logprobs(
      TopkLogprobsTask<Logit>{logits_RV.const_matrix(), num_rows, Shard{kVocabStart, counted},
                              RowFactors{factors_R.data()}, k, ids_RK.matrix(), values_RK.matrix(), max_R.data(),
                              sum_exp_R.data(), tail_max_R.data(), tail_sum_exp_R.data()},
      nullptr));

  for (int64_t r = 0; r < num_rows; ++r) {
    const auto z = [&](int64_t column) { return to_float(logits_RV.at(r, column)) * factors_R[r]; };
    std::vector<int64_t> columns(counted);
    std::iota(columns.begin(), columns.end(), 0);
    std::stable_sort(columns.begin(), columns.end(), [&](int64_t a, int64_t b) { return z(a) > z(b); });
    std::vector<double> all, outside;
    for (int64_t i = 0; i < counted; ++i) {
      all.push_back(z(columns[i]));
      if (i >= k) {
        outside.push_back(z(columns[i]));
      }
    }
    for (int64_t i = 0; i < k; ++i) {
      expect_close("id", ids_RK.at(r, i), i < counted ? kVocabStart + columns[i] : -1, 0);
      expect_close("value", values_RK.at(r, i), i < counted ? z(columns[i]) : -INFINITY, 0);
    }
    const Sum whole(all), tail(outside);
    expect_close("max", max_R[r], whole.max, 0);
    expect_close("sum_exp", sum_exp_R[r], whole.sum, 3e-6);
    expect_close("tail_max", tail_max_R[r], tail.max, 0);
    expect_close("tail_sum_exp", tail_sum_exp_R[r], tail.sum, 3e-6);
  }
}

}  // namespace

CHECK(topk_logprobs) {
  compare<float>(2, 1237, 5, 3, 1230, kRandom, 1);
  compare<Bfloat16>(2, 8191, 64, 1, 8190, kRandom, 2);
  compare<Half>(2, 33, 40, 5, 33, kRandom, 3);
  compare<float>(2, 7, 3, 0, 7, kFewValues, 4);
  compare<float>(1, 1, 1, 0, 1, kRandom, 5);
  compare<float>(1, 6151, 256, 0, 6150, kRising, 6);
  compare<Bfloat16>(1, 4099, 17, 0, 4099, kFewValues, 7);
  compare<float>(1, 2048, 2, 0, 2048, kRisingBelowFirst, 8);  // whole vectors: the largest come last
}
