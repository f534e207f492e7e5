// dense_pair_sums and dense_pair_grad_ against double loops: odd shapes, rows aligned and not, two types, padding.
//
// Shape suffixes: R rows, V columns of this shard, S sums a row.

#include "check.h"

using namespace standalone;
using namespace titan_opd;

namespace {

constexpr float kMinLogprob = -9.0f;  // some of the teacher's tokens are below it
constexpr float kBeta = 0.3f;

// A softmax's maximum and sum over the columns that count.
template <typename Logit>
struct Stats {
  Array<float> max_R, sum_exp_R;

  Stats(const Rows<Logit>& logits_RV, int64_t counted) : max_R(logits_RV.rows), sum_exp_R(logits_RV.rows) {
    for (int64_t r = 0; r < logits_RV.rows; ++r) {
      max_R[r] = -INFINITY;
      for (int64_t column = 0; column < counted; ++column) {
        max_R[r] = std::fmax(max_R[r], to_float(logits_RV.at(r, column)));
      }
      double sum = 0;
      for (int64_t column = 0; column < counted; ++column) {
        sum += std::exp(static_cast<double>(to_float(logits_RV.at(r, column))) - max_R[r]);
      }
      sum_exp_R[r] = static_cast<float>(sum);
    }
  }

  double log_probability(float logit, int64_t r) const {
    return static_cast<double>(logit) - max_R[r] - std::log(static_cast<double>(sum_exp_R[r]));
  }
  SoftmaxStats task() const { return {max_R.data(), sum_exp_R.data()}; }
};

template <typename Student, typename Teacher>
void compare(int64_t num_rows, int64_t num_columns, int64_t padding, int64_t counted, bool has_mixture, unsigned seed) {
  Random random(seed);
  Rows<Student> student_RV(num_rows, num_columns, padding);
  Rows<Teacher> teacher_RV(num_rows, num_columns, padding);
  random.fill_normal(student_RV, 3.0f);
  random.fill_normal(teacher_RV, 3.0f);
  for (int64_t r = 0; r < num_rows; ++r) {  // the last token is on top of both sides
    from_float(16.0f, student_RV.at(r, counted - 1));
    from_float(15.0f, teacher_RV.at(r, counted - 1));
    if (counted > 2) {  // and another with it
      student_RV.at(r, 0) = student_RV.at(r, counted - 1);
      teacher_RV.at(r, 0) = teacher_RV.at(r, counted - 1);
    }
  }
  const Rows<Student> before_RV = student_RV.copy();
  const Stats<Student> student(student_RV, counted);
  const Stats<Teacher> teacher(teacher_RV, counted);

  Rows<float> sums_SR(kNumPairSums, num_rows);
  expect_success(launch_dense_pair_sums(
      DensePairSumsTask<Student, Teacher>{{before_RV.const_matrix(), teacher_RV.const_matrix(), num_rows, counted,
                                           student.task(), teacher.task(), kMinLogprob, kBeta, has_mixture},
                                          sums_SR.matrix()},
      nullptr));
  Array<float> offset_R(num_rows), coefficient_R(num_rows);
  for (int64_t r = 0; r < num_rows; ++r) {
    offset_R[r] = random.normal(1.0f);
    coefficient_R[r] = random.normal(1.0f);
  }
  const float forward = 0.7f, reverse = -0.4f, mixture = has_mixture ? 0.9f : 0.0f;
  expect_success(launch_dense_pair_grad(
      DensePairGradTask<Student, Teacher>{{student_RV.matrix(), teacher_RV.const_matrix(), num_rows, counted,
                                           student.task(), teacher.task(), kMinLogprob, kBeta, has_mixture},
                                          num_columns, forward, reverse, mixture, offset_R.data(),
                                          coefficient_R.data()},
      nullptr));

  for (int64_t r = 0; r < num_rows; ++r) {
    double expected[kNumPairSums] = {};
    for (int64_t column = 0; column < num_columns; ++column) {
      double gradient = 0;
      if (column < counted) {
        const float z = to_float(before_RV.at(r, column)), u = to_float(teacher_RV.at(r, column));
        const double log_p = student.log_probability(z, r), unclamped = teacher.log_probability(u, r);
        const double log_q = std::fmax(unclamped, kMinLogprob);
        const double p = std::exp(log_p), q = std::exp(log_q);
        const double log_m = std::log(kBeta * q + (1.0 - kBeta) * p);
        expected[kTeacherMass] += q;
        expected[kTeacherEntropy] -= q * log_q;
        expected[kStudentEntropy] -= p * log_p;
        expected[kForwardKl] += q * (log_q - log_p);
        expected[kReverseKl] += p * (log_p - log_q);
        expected[kTeacherToMixture] += has_mixture ? q * (log_q - log_m) : 0;
        expected[kStudentToMixture] += has_mixture ? p * (log_p - log_m) : 0;
        expected[kNumClamped] += unclamped < kMinLogprob;
        if (z == student.max_R[r] && u == teacher.max_R[r]) {
          expected[kTop1Agreement] = 1;
        }
        const double slope = reverse * (log_p - log_q) + mixture * (log_p - log_m) - offset_R[r];
        gradient = coefficient_R[r] * (p * slope - forward * q);
      }
      expect_close("gradient", to_float(student_RV.at(r, column)), gradient, rounding(Student{}));
    }
    for (int s = 0; s < kNumPairSums; ++s) {
      expect_close("sum " + std::to_string(s), sums_SR.at(s, r), expected[s], 1e-5);
    }
    for (int64_t column = num_columns; r + 1 < num_rows && column < student_RV.stride; ++column) {
      expect_close("between rows", to_float(student_RV.at(r, column)), to_float(before_RV.at(r, column)), 0);
    }
  }
}

}  // namespace

CHECK(dense_pair) {
  compare<float, float>(3, 1237, 3, 1230, true, 1);
  compare<Bfloat16, Bfloat16>(3, 4131, 5, 4129, true, 2);
  compare<Bfloat16, float>(2, 1032, 0, 1031, false, 3);  // rows aligned to 16 bytes
  compare<Half, Bfloat16>(2, 33, 5, 33, true, 4);
  compare<float, Half>(4, 7, 0, 3, false, 5);
  compare<float, float>(2, 1, 1, 1, true, 6);
}
