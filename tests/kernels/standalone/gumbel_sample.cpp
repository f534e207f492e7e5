// gumbel_sample against the race run by brute force: odd shapes, more draws than a block's group, rows without a winner.
//
// Shape suffixes: R rows, V columns of this shard, m draws a row.

#include "../../../csrc/noise.h"
#include "check.h"

using namespace standalone;
using namespace titan_opd;

namespace {

enum Row { kFinite, kAllMinusInfinity, kWithNan };

template <typename Logit>
void compare(int64_t num_rows, int64_t num_columns, int num_samples, int64_t padding, int64_t counted, Row last_row,
             unsigned seed) {
  constexpr int64_t kVocabStart = 300;
  Random random(seed);
  Rows<Logit> logits_RV(num_rows, num_columns, padding);
  random.fill_normal(logits_RV, 2.0f);
  if (last_row == kAllMinusInfinity) {
    for (int64_t column = 0; column < num_columns; ++column) {
      from_float(-INFINITY, logits_RV.at(num_rows - 1, column));
    }
  } else if (last_row == kWithNan) {
    from_float(NAN, logits_RV.at(num_rows - 1, counted - 1));
  }
  Array<int64_t> keys_R(num_rows);
  Array<float> factors_R(num_rows);
  for (int64_t r = 0; r < num_rows; ++r) {
    keys_R[r] = random.integer(INT64_MIN, INT64_MAX);
    factors_R[r] = 0.5f + random.uniform();
  }
  Rows<int64_t> ids_Rm(num_rows, num_samples);
  Rows<double> scores_Rm(num_rows, num_samples);
  Rows<float> values_Rm(num_rows, num_samples);
  expect_success(launch_gumbel_sample(
      GumbelSampleTask<Logit>{logits_RV.const_matrix(), keys_R.data(), num_rows, num_samples,
                              Shard{kVocabStart, counted}, RowFactors{factors_R.data()}, ids_Rm.matrix(),
                              scores_Rm.matrix(), values_Rm.matrix()},
      nullptr));

  for (int64_t r = 0; r < num_rows; ++r) {
    for (int m = 0; m < num_samples; ++m) {
      const uint64_t draw_key = absorb(static_cast<uint64_t>(keys_R[r]), static_cast<uint64_t>(m));
      double best = -INFINITY;
      int64_t winner = -1;
      bool has_nan = false;
      for (int64_t column = 0; column < counted; ++column) {
        const float z = to_float(logits_RV.at(r, column)) * factors_R[r];
        has_nan = has_nan || std::isnan(z);
        const double score = race_score(z, draw_key, static_cast<uint32_t>(kVocabStart + column));
        if (score > best) {
          best = score;
          winner = column;
        }
      }
      const bool has_winner = winner >= 0 && !has_nan;
      const double nobody = has_nan ? NAN : -INFINITY;
      expect_close("id", ids_Rm.at(r, m), has_winner ? kVocabStart + winner : -1, 0);
      expect_close("score", scores_Rm.at(r, m), has_winner ? best : nobody, 1e-12);
      const double value = has_winner ? to_float(logits_RV.at(r, winner)) * factors_R[r] : nobody;
      expect_close("value", values_Rm.at(r, m), value, 0);
    }
  }
}

}  // namespace

CHECK(gumbel_sample) {
  compare<float>(3, 1237, 5, 3, 1230, kFinite, 1);
  compare<Bfloat16>(2, 8191, 9, 1, 8190, kFinite, 2);
  compare<Half>(2, 33, 4, 5, 33, kAllMinusInfinity, 3);
  compare<Bfloat16>(4, 7, 70, 0, 7, kFinite, 4);
  compare<float>(2, 515, 3, 2, 513, kWithNan, 5);
  compare<float>(2, 1, 1, 0, 1, kFinite, 6);
}
