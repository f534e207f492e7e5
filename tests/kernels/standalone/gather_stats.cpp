// gather_stats against double loops: odd shapes, misaligned rows, ids of nobody and twice, a vocabulary of two segments.
//
// Shape suffixes: R rows, V columns of this shard, K ids a row.

#include <set>

#include "check.h"

using namespace standalone;
using namespace titan_opd;

namespace {

struct Sum {
  double max = -INFINITY;
  double sum = 0;

  explicit Sum(const std::vector<double>& terms) {
    for (const double z : terms) {
      max = std::fmax(max, z);
    }
    for (const double z : terms) {
      sum += std::exp(z - (max == -INFINITY ? 0 : max));
    }
  }
};

template <typename Logit, typename Id>
void compare(int64_t num_rows, int64_t num_columns, int64_t num_ids, int64_t padding, int64_t counted, unsigned seed) {
  constexpr int64_t kVocabStart = 1000;
  Random random(seed);
  Rows<Logit> logits_RV(num_rows, num_columns, padding);
  random.fill_normal(logits_RV, 4.0f);
  Rows<Id> ids_RK(num_rows, num_ids);
  Array<float> factors_R(num_rows);
  for (int64_t r = 0; r < num_rows; ++r) {
    factors_R[r] = 0.5f + random.uniform();
    for (int64_t k = 0; k < num_ids; ++k) {
      // Every other one among the first columns: those whose bits the next segment's take the place of.
      const int64_t last = k % 2 == 0 ? num_columns + 1 : std::min<int64_t>(num_columns + 1, 127);
      ids_RK.at(r, k) = static_cast<Id>(kVocabStart + random.integer(-2, last));
    }
    if (num_ids > 2) {
      ids_RK.at(r, 0) = static_cast<Id>(kVocabStart + num_columns - 1);  // a row's end, twice
      ids_RK.at(r, 1) = ids_RK.at(r, 0);
      ids_RK.at(r, 2) = static_cast<Id>(kVocabStart);
    }
    for (int64_t k = 0; k < num_ids / 2; ++k) {  // so large that a tail with one of them in it is plainly wrong
      const int64_t column = static_cast<int64_t>(ids_RK.at(r, k)) - kVocabStart;
      if (column >= 0 && column < num_columns) {
        from_float(25.0f, logits_RV.at(r, column));
      }
    }
  }
  Array<float> max_R(num_rows), sum_exp_R(num_rows), tail_max_R(num_rows), tail_sum_exp_R(num_rows);
  Rows<float> candidates_RK(num_rows, num_ids);
  const Ids ids{ids_RK.elements.data(), sizeof(Id) == 8, ids_RK.stride, 1, num_ids};
  expect_success(launch_gather_stats(
      GatherStatsTask<Logit>{logits_RV.const_matrix(), ids, num_rows, Shard{kVocabStart, counted},
                             RowFactors{factors_R.data()}, max_R.data(), sum_exp_R.data(), tail_max_R.data(),
                             tail_sum_exp_R.data(), candidates_RK.matrix()},
      nullptr));

  for (int64_t r = 0; r < num_rows; ++r) {
    const auto z = [&](int64_t column) { return to_float(logits_RV.at(r, column)) * factors_R[r]; };
    std::set<int64_t> support;
    for (int64_t k = 0; k < num_ids; ++k) {
      const int64_t column = static_cast<int64_t>(ids_RK.at(r, k)) - kVocabStart;
      const bool owned = column >= 0 && column < counted;
      expect_close("candidates", candidates_RK.at(r, k), owned ? z(column) : 0, 0);
      if (owned) {
        support.insert(column);
      }
    }
    std::vector<double> all, outside;
    for (int64_t column = 0; column < counted; ++column) {
      all.push_back(z(column));
      if (support.count(column) == 0) {
        outside.push_back(z(column));
      }
    }
    const Sum whole(all), tail(outside);
    expect_close("max", max_R[r], whole.max, 0);
    expect_close("sum_exp", sum_exp_R[r], whole.sum, 3e-6);
    expect_close("tail_max", tail_max_R[r], tail.max, 0);
    expect_close("tail_sum_exp", tail_sum_exp_R[r], tail.sum, 3e-6);
  }
}

}  // namespace

CHECK(gather_stats) {
  compare<float, int64_t>(3, 1237, 5, 3, 1237, 1);
  compare<Bfloat16, int32_t>(3, 8191, 9, 1, 8190, 2);
  compare<Half, int64_t>(2, 33, 33, 5, 33, 3);
  compare<Bfloat16, int64_t>(4, 7, 3, 0, 7, 4);
  compare<float, int32_t>(2, 1, 0, 0, 1, 5);
  compare<float, int32_t>(2, 40, 3, 1, 0, 6);  // only padding
}

CHECK(gather_stats_two_segments) {
  compare<Bfloat16, int64_t>(1, (1 << 18) + 77, 40, 0, (1 << 18) + 77, 7);
}
