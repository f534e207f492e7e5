// dense_pair_sums and dense_pair_grad_ on the CPU: both sides go through as blocks of float32 in the L1 cache, so that
// one loop serves all pairs of types.

#include "../operators/dense_pair.h"

#include <algorithm>
#include <cmath>
#include <string>
#include <type_traits>

#include "isa.h"
#include "parallel.h"
#include "rows.h"

namespace titan_opd {
namespace {

constexpr int64_t kPairBlockColumns = 1024;

// A block of a row as float32: the row itself where it is that already.
template <typename Logit>
class FloatBlock {
 public:
  explicit FloatBlock(Isa isa) : kernels_(conversion_kernels<Logit>(isa)) {}

  const float* read(const Logit* row, int64_t num_columns) {
    if constexpr (std::is_same_v<Logit, float>) {
      return row;
    } else {
      kernels_.load(row, num_columns, values_);
      return values_;
    }
  }

  // Where to write what `finish` puts into the row; may be what `read` returned.
  float* target(Logit* row) {
    if constexpr (std::is_same_v<Logit, float>) {
      return row;
    } else {
      return values_;
    }
  }

  void finish(int64_t num_columns, Logit* row) {
    if constexpr (!std::is_same_v<Logit, float>) {
      kernels_.store(values_, num_columns, row);
    }
  }

 private:
  ConversionKernels<Logit> kernels_;
  alignas(64) float values_[kPairBlockColumns];
};

template <typename Student, typename Teacher>
PairRow row_of(const Pair<Student, Teacher>& pair, int64_t r) {
  const auto log_sum = [r](const SoftmaxStats& stats) {
    return static_cast<float>(std::log(static_cast<double>(stats.sum_exp_R[r])));
  };
  return {pair.student.max_R[r], log_sum(pair.student), pair.teacher.max_R[r],
          log_sum(pair.teacher), pair.min_logprob,      pair.beta};
}

template <typename Visit>
void for_each_block(int64_t num_columns, Visit visit) {
  for (int64_t begin = 0; begin < num_columns; begin += kPairBlockColumns) {
    visit(begin, std::min(kPairBlockColumns, num_columns - begin));
  }
}

template <typename Student, typename Teacher>
void sum_rows(const DensePairSumsTask<Student, Teacher>& task, Isa isa, int64_t begin, int64_t end) {
  const PairKernels kernels = pair_kernels(isa);
  const auto add_block = task.pair.has_mixture ? kernels.mixture_sums : kernels.sums;
  FloatBlock<Student> student(isa);
  FloatBlock<Teacher> teacher(isa);
  for (int64_t r = begin; r < end; ++r) {
    const PairRow row = row_of(task.pair, r);
    const Student* student_row = task.pair.student_RV.row(r);
    const Teacher* teacher_row = task.pair.teacher_RV.row(r);
    double sums[kNumPairSums] = {};
    for_each_block(task.pair.num_columns, [&](int64_t first, int64_t count) {
      add_block(student.read(student_row + first, count), teacher.read(teacher_row + first, count), count, row, sums);
    });
    sums[kTop1Agreement] = std::min(sums[kTop1Agreement], 1.0);  // several tokens may be on top together
    for (int s = 0; s < kNumPairSums; ++s) {
      task.sums_SR.row(s)[r] = static_cast<float>(sums[s]);
    }
  }
}

template <typename Student, typename Teacher>
void write_rows(const DensePairGradTask<Student, Teacher>& task, Isa isa, int64_t begin, int64_t end) {
  const PairKernels kernels = pair_kernels(isa);
  const auto write_block = task.pair.has_mixture ? kernels.mixture_grad : kernels.grad;
  FloatBlock<Student> student(isa);
  FloatBlock<Teacher> teacher(isa);
  for (int64_t r = begin; r < end; ++r) {
    const PairRow row = row_of(task.pair, r);
    const PairWeights weights{task.forward_weight, task.reverse_weight, task.mixture_weight, task.offset_R[r],
                              task.coefficient_R[r]};
    Student* student_row = task.pair.student_RV.row(r);
    const Teacher* teacher_row = task.pair.teacher_RV.row(r);
    for_each_block(task.pair.num_columns, [&](int64_t first, int64_t count) {
      write_block(student.read(student_row + first, count), teacher.read(teacher_row + first, count), count, row,
                  weights, student.target(student_row + first));
      student.finish(count, student_row + first);
    });
    std::fill(student_row + task.pair.num_columns, student_row + task.num_student_columns, Student{});
  }
}

// Two sides to read, and twice the arithmetic of a plain row: half the elements are worth a thread.
constexpr int64_t kCostPerColumn = 2;

Tensor dense_pair_sums_cpu(const Tensor& student_RV, const Tensor& teacher_RV, const Tensor& student_max_R,
                           const Tensor& student_sum_exp_R, const Tensor& teacher_max_R,
                           const Tensor& teacher_sum_exp_R, double min_logprob, std::optional<double> beta,
                           int64_t vocab_start, std::optional<int64_t> vocab_size,
                           std::optional<std::string> isa_name) {
  const Isa isa = select_isa(isa_name);
  const PairArguments arguments{student_RV,    teacher_RV,        student_max_R, student_sum_exp_R,
                                teacher_max_R, teacher_sum_exp_R, min_logprob,   vocab_start,
                                vocab_size};
  return dense_pair_sums(arguments, beta, [&](const auto& task) {
    for_each_row_range(task.pair.num_rows, kCostPerColumn * task.pair.num_columns,
                       [&](int64_t begin, int64_t end) { sum_rows(task, isa, begin, end); });
  });
}

void dense_pair_grad_cpu(Tensor student_RV, const Tensor& teacher_RV, const Tensor& student_max_R,
                         const Tensor& student_sum_exp_R, const Tensor& teacher_max_R, const Tensor& teacher_sum_exp_R,
                         const Tensor& offset_R, const Tensor& coefficient_R, double forward_weight,
                         double reverse_weight, double jsd_weight, double beta, double min_logprob,
                         int64_t vocab_start, std::optional<int64_t> vocab_size, std::optional<std::string> isa_name) {
  const Isa isa = select_isa(isa_name);
  const PairArguments arguments{student_RV,    teacher_RV,        student_max_R, student_sum_exp_R,
                                teacher_max_R, teacher_sum_exp_R, min_logprob,   vocab_start,
                                vocab_size};
  const PairGradWeights weights{forward_weight, reverse_weight, jsd_weight, beta};
  dense_pair_grad_(student_RV, arguments, offset_R, coefficient_R, weights, [&](const auto& task) {
    for_each_row_range(task.pair.num_rows, kCostPerColumn * task.num_student_columns,
                       [&](int64_t begin, int64_t end) { write_rows(task, isa, begin, end); });
  });
}

}  // namespace
}  // namespace titan_opd

STABLE_TORCH_LIBRARY_IMPL(titan_opd, CPU, library) {
  library.impl("dense_pair_sums", TORCH_BOX(&titan_opd::dense_pair_sums_cpu));
  library.impl("dense_pair_grad_", TORCH_BOX(&titan_opd::dense_pair_grad_cpu));
}
