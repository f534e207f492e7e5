// What a kernel is given, on the CPU and on the GPU alike: plain pointers and sizes, checked by operators/*.h. No torch
// header here, so that .cu files compile in seconds.
//
// Shape suffixes: R rows, V columns of this shard, K ids a row.
#pragma once

#include <cmath>

#include "elements.h"

namespace titan_opd {

// Rows of adjacent elements.
template <typename Element>
struct Matrix {
  Element* data;
  int64_t row_stride;

  TITAN_OPD_HOST_DEVICE Element* row(int64_t r) const { return data + r * row_stride; }
};

// Token ids, int32 or int64, with any strides.
struct Ids {
  const void* data;
  bool is_int64;
  int64_t row_stride;
  int64_t column_stride;
  int64_t num_columns;

  TITAN_OPD_HOST_DEVICE int64_t at(int64_t r, int64_t k) const {
    const int64_t offset = r * row_stride + k * column_stride;
    return is_int64 ? static_cast<const int64_t*>(data)[offset] : static_cast<const int32_t*>(data)[offset];
  }
};

// The columns of a vocabulary shard that count, and the global id of the first.
struct Shard {
  int64_t vocab_start;
  int64_t num_columns;

  // The column of a global id; -1 for padding and for what another shard owns.
  TITAN_OPD_HOST_DEVICE int64_t column(int64_t id) const {
    // vocab_start >= 0, so the first comparison also keeps the subtraction from overflowing.
    return id < vocab_start || id - vocab_start >= num_columns ? -1 : id - vocab_start;
  }
};

// A factor of each row's logits: z = logit * factor. Null: 1.
struct RowFactors {
  const float* data;

  TITAN_OPD_HOST_DEVICE float at(int64_t r) const { return data == nullptr ? 1.0f : data[r]; }
};

template <typename Logit>
struct GatherStatsTask {
  Matrix<const Logit> logits_RV;
  Ids ids_RK;
  int64_t num_rows;
  Shard shard;
  RowFactors inverse_temperature_R;
  float* max_R;
  float* sum_exp_R;
  float* tail_max_R;
  float* tail_sum_exp_R;
  Matrix<float> candidates_RK;
};

template <typename Logit>
struct SparseSoftmaxGradTask {
  Matrix<Logit> logits_RV;  // replaced by the gradient
  int64_t num_columns;      // V; those past the shard's are padding
  Ids ids_RK;
  int64_t num_rows;
  Shard shard;
  RowFactors inverse_temperature_R;
  Matrix<const float> g_RK;
  const float* lse_R;
  const float* tail_lse_R;
  const float* g_lse_R;
  const float* g_tail_R;
  Matrix<float> own_RK;  // scratch
};

// The numbers of one row's gradient, the inverse temperature multiplied in: lse_scale exp(z - lse) at the ids, to which
// their g is added, and outside_scale exp(z - outside_shift) outside.
struct SoftmaxGradRow {
  float lse;
  float lse_scale;
  float outside_shift;
  float outside_scale;

  template <typename Logit>
  TITAN_OPD_HOST_DEVICE SoftmaxGradRow(const SparseSoftmaxGradTask<Logit>& task, int64_t r) {
    const float factor = task.inverse_temperature_R.at(r);
    const float tail_lse = task.tail_lse_R[r];
    // A row of -inf alone: relative to 0 its exponentials are 0, relative to -inf they would be NaN.
    lse = task.lse_R[r] == -INFINITY ? 0.0f : task.lse_R[r];
    lse_scale = factor * task.g_lse_R[r];
    outside_shift = lse;
    outside_scale = lse_scale;
    if (tail_lse != -INFINITY) {
      outside_shift = tail_lse;
      outside_scale = factor * task.g_tail_R[r] + lse_scale * expf(tail_lse - lse);
    }
  }
};

// A softmax over the whole vocabulary, of which this shard may be a part.
struct SoftmaxStats {
  const float* max_R;
  const float* sum_exp_R;
};

// What dense_pair_sums gives of each row, in this order: titan_opd/ops/dense_pair.py says what they are.
enum PairSum {
  kTeacherMass,
  kTeacherEntropy,
  kStudentEntropy,
  kForwardKl,
  kReverseKl,
  kTeacherToMixture,
  kStudentToMixture,
  kNumClamped,
  kTop1Agreement,
  kNumPairSums
};

// A row of a student and a teacher; log_sum is log sum exp(logit - max).
struct PairRow {
  float student_max;
  float student_log_sum;
  float teacher_max;
  float teacher_log_sum;
  float min_logprob;
  float beta;  // the teacher's share of the mixture m = beta q + (1 - beta) p
};

// Both sides' logits of the same tokens; Student is const where it is only read.
template <typename Student, typename Teacher>
struct Pair {
  Matrix<Student> student_RV;
  Matrix<const Teacher> teacher_RV;
  int64_t num_rows;
  int64_t num_columns;  // tokens; padding may follow
  SoftmaxStats student;
  SoftmaxStats teacher;
  float min_logprob;
  float beta;
  bool has_mixture;
};

template <typename Student, typename Teacher>
struct DensePairSumsTask {
  Pair<const Student, Teacher> pair;
  Matrix<float> sums_SR;  // a row for each PairSum
};

// A row's gradient, coefficient times that of
//   forward KL(q || p) + reverse KL(p || q) + jsd_weight (beta KL(q || m) + (1 - beta) KL(p || m)).
struct PairWeights {
  float forward;
  float reverse;
  float mixture;  // jsd_weight (1 - beta)
  float offset;   // what is subtracted from each slope, so that the gradient sums to zero
  float coefficient;
};

template <typename Student, typename Teacher>
struct DensePairGradTask {
  Pair<Student, Teacher> pair;  // the student's logits are replaced by the gradient
  int64_t num_student_columns;  // those from pair.num_columns on are padding
  float forward_weight;
  float reverse_weight;
  float mixture_weight;
  const float* offset_R;
  const float* coefficient_R;
};

// The most ids that topk_logprobs finds a row.
constexpr int64_t kMaxTopk = 256;

template <typename Logit>
struct TopkLogprobsTask {
  Matrix<const Logit> logits_RV;
  int64_t num_rows;
  Shard shard;
  RowFactors inverse_temperature_R;
  int k;
  Matrix<int64_t> ids_RK;
  Matrix<float> values_RK;
  float* max_R;
  float* sum_exp_R;
  float* tail_max_R;
  float* tail_sum_exp_R;
};

template <typename Logit>
struct GumbelSampleTask {
  Matrix<const Logit> logits_RV;
  const int64_t* keys_R;
  int64_t num_rows;
  int num_samples;  // m
  Shard shard;
  RowFactors inverse_temperature_R;
  Matrix<int64_t> ids_Rm;
  Matrix<double> scores_Rm;
  Matrix<float> values_Rm;
};

enum class ElementType : int32_t { kFloat32, kBfloat16, kFloat16 };

TITAN_OPD_HOST_DEVICE int64_t element_size(ElementType type) {
  return type == ElementType::kFloat32 ? 4 : 2;
}

// Calls `run` with an element of the type: run(float{}), run(Bfloat16{}), run(Half{}).
template <typename Run>
TITAN_OPD_HOST_DEVICE void dispatch_element(ElementType type, Run run) {
  switch (type) {
    case ElementType::kFloat32:
      return run(float{});
    case ElementType::kBfloat16:
      return run(Bfloat16{});
    case ElementType::kFloat16:
      return run(Half{});
  }
}

// One tensor's copy into another, as rows of adjacent elements.
struct CopyTask {
  const void* source;
  void* destination;
  int64_t num_rows;
  int64_t num_columns;
  int64_t source_stride;
  int64_t destination_stride;
  ElementType source_type;
  ElementType destination_type;

  TITAN_OPD_HOST_DEVICE int64_t num_elements() const { return num_rows * num_columns; }
};

}  // namespace titan_opd
