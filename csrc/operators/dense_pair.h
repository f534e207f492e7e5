// dense_pair_sums and dense_pair_grad_ on tensors, for any device: divergences between a student and a teacher over the
// whole vocabulary, from both sides' logits and softmax statistics. One read of both sides gives all sums (every sum is
// over tokens, so shards add up), a second writes the gradient over the student's logits.
#pragma once

#include "tensors.h"

namespace titan_opd {

// The arguments that both operators share.
struct PairArguments {
  const Tensor& student_RV;
  const Tensor& teacher_RV;
  const Tensor& student_max_R;
  const Tensor& student_sum_exp_R;
  const Tensor& teacher_max_R;
  const Tensor& teacher_sum_exp_R;
  double min_logprob;
  int64_t vocab_start;
  std::optional<int64_t> vocab_size;
};

// The number of tokens of a checked pair.
inline int64_t checked_pair(const char* op, const PairArguments& arguments) {
  const Tensor& student_RV = arguments.student_RV;
  const Tensor& teacher_RV = arguments.teacher_RV;
  check_logits(op, "student", student_RV);
  check_logits(op, "teacher", teacher_RV);
  const int64_t num_rows = student_RV.size(0);
  const int64_t num_columns = checked_shard(op, student_RV, arguments.vocab_start, arguments.vocab_size).num_columns;
  STD_TORCH_CHECK(teacher_RV.size(0) == num_rows, op, ": teacher must have student's number of rows");
  STD_TORCH_CHECK(teacher_RV.size(1) >= num_columns, op, ": teacher must have a column for each token of student");
  STD_TORCH_CHECK(teacher_RV.device() == student_RV.device(), op, ": teacher must be on student's device");
  check_float(op, "student_max", arguments.student_max_R, {num_rows}, student_RV);
  check_float(op, "student_sum_exp", arguments.student_sum_exp_R, {num_rows}, student_RV);
  check_float(op, "teacher_max", arguments.teacher_max_R, {num_rows}, student_RV);
  check_float(op, "teacher_sum_exp", arguments.teacher_sum_exp_R, {num_rows}, student_RV);
  return num_columns;
}

template <typename Student, typename Teacher>
Pair<Student, Teacher> make_pair(const PairArguments& arguments, Student* student, int64_t num_columns, double beta,
                                 bool has_mixture) {
  const auto numbers = [](const Tensor& tensor) { return static_cast<const float*>(tensor.const_data_ptr()); };
  return {{student, arguments.student_RV.stride(0)},
          const_matrix<Teacher>(arguments.teacher_RV),
          arguments.student_RV.size(0),
          num_columns,
          {numbers(arguments.student_max_R), numbers(arguments.student_sum_exp_R)},
          {numbers(arguments.teacher_max_R), numbers(arguments.teacher_sum_exp_R)},
          static_cast<float>(arguments.min_logprob),
          static_cast<float>(beta),
          has_mixture};
}

// Checks, makes the output and calls `run` with the task in the types of both sides' logits.
template <typename Run>
Tensor dense_pair_sums(const PairArguments& arguments, std::optional<double> beta, Run run) {
  constexpr const char* op = "dense_pair_sums";
  const int64_t num_columns = checked_pair(op, arguments);
  const int64_t num_rows = arguments.student_RV.size(0);
  Tensor sums_SR = new_float(arguments.student_RV, {kNumPairSums, num_rows});
  if (num_rows > 0) {
    dispatch_logits(op, arguments.student_RV, [&](auto student) {
      dispatch_logits(op, arguments.teacher_RV, [&](auto teacher) {
        using Student = decltype(student);
        using Teacher = decltype(teacher);
        const auto* data = static_cast<const Student*>(arguments.student_RV.const_data_ptr());
        run(DensePairSumsTask<Student, Teacher>{
            make_pair<const Student, Teacher>(arguments, data, num_columns, beta.value_or(0.0), beta.has_value()),
            {float_data(sums_SR), num_rows}});
      });
    });
  }
  return sums_SR;
}

struct PairGradWeights {
  double forward;
  double reverse;
  double jsd;
  double beta;
};

// Checks and calls `run` with the task in the types of both sides' logits; `student_RV` is that of the arguments.
template <typename Run>
void dense_pair_grad_(Tensor& student_RV, const PairArguments& arguments, const Tensor& offset_R,
                      const Tensor& coefficient_R, const PairGradWeights& weights, Run run) {
  constexpr const char* op = "dense_pair_grad_";
  const int64_t num_columns = checked_pair(op, arguments);
  const int64_t num_rows = student_RV.size(0);
  STD_TORCH_CHECK(num_rows <= 1 || student_RV.stride(0) >= student_RV.size(1), op, ": student's rows must not overlap");
  check_float(op, "offsets", offset_R, {num_rows}, student_RV);
  check_float(op, "coefficients", coefficient_R, {num_rows}, student_RV);
  if (num_rows == 0) {
    return;
  }
  dispatch_logits(op, student_RV, [&](auto student) {
    dispatch_logits(op, arguments.teacher_RV, [&](auto teacher) {
      using Student = decltype(student);
      using Teacher = decltype(teacher);
      auto* data = static_cast<Student*>(student_RV.mutable_data_ptr());
      run(DensePairGradTask<Student, Teacher>{
          make_pair<Student, Teacher>(arguments, data, num_columns, weights.beta, weights.jsd != 0.0),
          student_RV.size(1), static_cast<float>(weights.forward), static_cast<float>(weights.reverse),
          static_cast<float>(weights.jsd * (1.0 - weights.beta)),
          static_cast<const float*>(offset_R.const_data_ptr()),
          static_cast<const float*>(coefficient_R.const_data_ptr())});
    });
  });
}

}  // namespace titan_opd
