// sparse_softmax_grad_ against double loops: odd shapes, misaligned rows, duplicates, ids of nobody, padding columns.
//
// Shape suffixes: R rows, V columns of this shard, K ids a row.

#include <map>

#include "check.h"

using namespace standalone;
using namespace titan_opd;

namespace {

template <typename Logit, typename Id>
void compare(int64_t num_rows, int64_t num_columns, int64_t num_ids, int64_t padding, int64_t counted, unsigned seed) {
  constexpr int64_t kVocabStart = 70;
  Random random(seed);
  Rows<Logit> logits_RV(num_rows, num_columns, padding);
  random.fill_normal(logits_RV, 3.0f);
  const Rows<Logit> before_RV = logits_RV.copy();
  Rows<Id> ids_RK(num_rows, num_ids);
  Rows<float> g_RK(num_rows, num_ids), own_RK(num_rows, num_ids);
  random.fill_normal(g_RK, 1.0f);
  Array<float> factors_R(num_rows), lse_R(num_rows), tail_lse_R(num_rows), g_lse_R(num_rows), g_tail_R(num_rows);
  for (int64_t r = 0; r < num_rows; ++r) {
    factors_R[r] = 0.5f + random.uniform();
    lse_R[r] = 4.0f + random.uniform();
    tail_lse_R[r] = 3.0f + random.uniform();
    g_lse_R[r] = random.normal(1.0f);
    g_tail_R[r] = random.normal(1.0f);
    for (int64_t k = 0; k < num_ids; ++k) {
      ids_RK.at(r, k) = static_cast<Id>(kVocabStart + random.integer(-2, num_columns + 1));
    }
    if (num_ids > 2) {
      ids_RK.at(r, 0) = static_cast<Id>(kVocabStart + counted - 1);  // a row's end, twice
      ids_RK.at(r, num_ids - 1) = ids_RK.at(r, 0);
      ids_RK.at(r, 1) = static_cast<Id>(kVocabStart);
    }
  }
  const Ids ids{ids_RK.elements.data(), sizeof(Id) == 8, ids_RK.stride, 1, num_ids};
  expect_success(launch_sparse_softmax_grad(
      SparseSoftmaxGradTask<Logit>{logits_RV.matrix(), num_columns, ids, num_rows, Shard{kVocabStart, counted},
                                   RowFactors{factors_R.data()}, g_RK.const_matrix(), lse_R.data(), tail_lse_R.data(),
                                   g_lse_R.data(), g_tail_R.data(), own_RK.matrix()},
      nullptr));

  for (int64_t r = 0; r < num_rows; ++r) {
    std::map<int64_t, double> g_of_column;
    for (int64_t k = 0; k < num_ids; ++k) {
      g_of_column[static_cast<int64_t>(ids_RK.at(r, k)) - kVocabStart] += g_RK.at(r, k);
    }
    for (int64_t column = 0; column < num_columns; ++column) {
      double expected = 0;
      if (column < counted) {
        const double factor = factors_R[r];
        const double z = to_float(before_RV.at(r, column)) * factor;
        const auto g = g_of_column.find(column);
        expected = g_lse_R[r] * std::exp(z - lse_R[r]);
        expected += g != g_of_column.end() ? g->second : g_tail_R[r] * std::exp(z - tail_lse_R[r]);
        expected *= factor;
      }
      expect_close("gradient", to_float(logits_RV.at(r, column)), expected, rounding(Logit{}));
    }
    for (int64_t column = num_columns; r + 1 < num_rows && column < logits_RV.stride; ++column) {
      expect_close("between rows", to_float(logits_RV.at(r, column)), to_float(before_RV.at(r, column)), 0);
    }
  }
}

}  // namespace

CHECK(sparse_softmax_grad) {
  compare<float, int64_t>(3, 1237, 5, 3, 1230, 1);
  compare<Bfloat16, int32_t>(3, 8191, 9, 1, 8190, 2);
  compare<Half, int64_t>(2, 33, 40, 5, 33, 3);
  compare<Bfloat16, int64_t>(4, 7, 3, 0, 7, 4);
  compare<float, int32_t>(2, 1, 0, 0, 1, 5);
  compare<float, int64_t>(2, 40, 3, 1, 1, 6);
}
