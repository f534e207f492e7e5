// dense_pair_sums and dense_pair_grad_ on the GPU: a block for each row of both sides.
//
// Shape suffixes: R rows, V columns of this shard, S sums a row.

#include "../pair_element.h"
#include "device.cuh"
#include "kernels.h"

namespace titan_opd {
namespace {

constexpr int kThreads = 512;
constexpr int kWarps = kThreads / kWarpThreads;

struct DeviceMath {
  static __device__ __forceinline__ float exp(float x) { return __expf(x); }
  // Not __logf: near 1 its absolute error is as large as the terms of a small divergence.
  static __device__ __forceinline__ float log(float x) { return logf(x); }
};

template <int N, typename Student, typename Teacher, typename Visit>
__device__ __forceinline__ void visit_packs(const Student* student, const Teacher* teacher, int64_t begin, int64_t end,
                                            Visit visit) {
#pragma unroll 2
  for (int64_t column = begin + int64_t{N} * threadIdx.x; column < end; column += int64_t{N} * kThreads) {
    const auto student_pack = *reinterpret_cast<const Pack<Student, N>*>(student + column);
    const auto teacher_pack = *reinterpret_cast<const Pack<Teacher, N>*>(teacher + column);
    float z[N];
    float u[N];
    for (int j = 0; j < N; ++j) {
      z[j] = to_float(student_pack.elements[j]);
      u[j] = to_float(teacher_pack.elements[j]);
    }
    visit(column, z, u);
  }
}

// Calls visit(column, z, u) once for every column of both rows, the block's threads side by side: z and u are arrays of
// as many adjacent logits as fit 16 bytes on the wider side, or of one where a row is not aligned to that.
template <typename Student, typename Teacher, typename Visit>
__device__ __forceinline__ void for_each_pair(const Student* student, const Teacher* teacher, int64_t num_columns,
                                              Visit visit) {
  constexpr int kVector = 16 / (sizeof(Student) > sizeof(Teacher) ? sizeof(Student) : sizeof(Teacher));
  const bool in_packs = is_aligned<Student, kVector>(student) && is_aligned<Teacher, kVector>(teacher);
  const int64_t packed = in_packs ? num_columns / kVector * kVector : 0;
  visit_packs<kVector>(student, teacher, 0, packed, visit);
  visit_packs<1>(student, teacher, packed, num_columns, visit);
}

template <typename Student, typename Teacher>
__device__ __forceinline__ PairRow row_of(const Pair<Student, Teacher>& pair, int64_t r) {
  return {pair.student.max_R[r], logf(pair.student.sum_exp_R[r]), pair.teacher.max_R[r],
          logf(pair.teacher.sum_exp_R[r]), pair.min_logprob, pair.beta};
}

// The sum over all lanes of the warp, in every lane.
__device__ __forceinline__ float warp_sum(float value) {
  for (int offset = kWarpThreads / 2; offset > 0; offset /= 2) {
    value += __shfl_xor_sync(kAllLanes, value, offset);
  }
  return value;
}

template <typename Student, typename Teacher, bool kMixture>
__global__ void __launch_bounds__(kThreads) dense_pair_sums_kernel(DensePairSumsTask<Student, Teacher> task) {
  __shared__ float warp_sums[kNumPairSums][kWarps];

  const int64_t r = blockIdx.x;
  const PairRow row = row_of(task.pair, r);
  float sums[kNumPairSums] = {};
  for_each_pair(task.pair.student_RV.row(r), task.pair.teacher_RV.row(r), task.pair.num_columns,
                [&](int64_t, const auto& z, const auto& u) {
                  for (int j = 0; j < static_cast<int>(sizeof(z) / sizeof(float)); ++j) {
                    const PairElement one = pair_element<DeviceMath, kMixture>(z[j], u[j], row);
                    sums[kTeacherMass] += one.q;
                    sums[kTeacherEntropy] -= weighted(one.q, one.log_q);
                    sums[kStudentEntropy] -= weighted(one.p, one.log_p);
                    sums[kForwardKl] += weighted(one.q, one.log_q - one.log_p);
                    sums[kReverseKl] += weighted(one.p, one.log_p - one.log_q);
                    if constexpr (kMixture) {
                      sums[kTeacherToMixture] += weighted(one.q, one.log_q_over_m);
                      sums[kStudentToMixture] += weighted(one.p, one.log_p_over_m);
                    }
                    sums[kNumClamped] += one.is_clamped ? 1.0f : 0.0f;
                    sums[kTop1Agreement] += z[j] == row.student_max && u[j] == row.teacher_max ? 1.0f : 0.0f;
                  }
                });

  const int lane = threadIdx.x % kWarpThreads;
  const int warp = threadIdx.x / kWarpThreads;
  for (int s = 0; s < kNumPairSums; ++s) {
    sums[s] = warp_sum(sums[s]);
    if (lane == 0) {
      warp_sums[s][warp] = sums[s];
    }
  }
  __syncthreads();
  if (warp == 0) {
    for (int s = 0; s < kNumPairSums; ++s) {
      float sum = warp_sum(lane < kWarps ? warp_sums[s][lane] : 0.0f);
      if (s == kTop1Agreement) {
        sum = fminf(sum, 1.0f);  // several tokens may be on top together
      }
      if (lane == 0) {
        task.sums_SR.row(s)[r] = sum;
      }
    }
  }
}

template <typename Student, typename Teacher, bool kMixture>
__global__ void __launch_bounds__(kThreads) dense_pair_grad_kernel(DensePairGradTask<Student, Teacher> task) {
  const int64_t r = blockIdx.x;
  const PairRow row = row_of(task.pair, r);
  const PairWeights weights{task.forward_weight, task.reverse_weight, task.mixture_weight, task.offset_R[r],
                            task.coefficient_R[r]};
  Student* student = task.pair.student_RV.row(r);
  // Each element is read and written by one thread.
  for_each_pair(student, task.pair.teacher_RV.row(r), task.pair.num_columns,
                [&](int64_t column, const auto& z, const auto& u) {
                  constexpr int kCount = sizeof(z) / sizeof(float);
                  Pack<Student, kCount> pack;
                  for (int j = 0; j < kCount; ++j) {
                    from_float(pair_gradient<DeviceMath, kMixture>(z[j], u[j], row, weights), pack.elements[j]);
                  }
                  *reinterpret_cast<Pack<Student, kCount>*>(student + column) = pack;
                });
  for (int64_t column = task.pair.num_columns + threadIdx.x; column < task.num_student_columns; column += kThreads) {
    from_float(0.0f, student[column]);
  }
}

}  // namespace

template <typename Student, typename Teacher>
cudaError_t launch_dense_pair_sums(const DensePairSumsTask<Student, Teacher>& task, cudaStream_t stream) {
  const auto blocks = static_cast<unsigned>(task.pair.num_rows);
  if (task.pair.has_mixture) {
    TITAN_OPD_LAUNCH((dense_pair_sums_kernel<Student, Teacher, true>), blocks, kThreads, 0, stream, task);
  } else {
    TITAN_OPD_LAUNCH((dense_pair_sums_kernel<Student, Teacher, false>), blocks, kThreads, 0, stream, task);
  }
  return cudaGetLastError();
}

template <typename Student, typename Teacher>
cudaError_t launch_dense_pair_grad(const DensePairGradTask<Student, Teacher>& task, cudaStream_t stream) {
  const auto blocks = static_cast<unsigned>(task.pair.num_rows);
  if (task.pair.has_mixture) {
    TITAN_OPD_LAUNCH((dense_pair_grad_kernel<Student, Teacher, true>), blocks, kThreads, 0, stream, task);
  } else {
    TITAN_OPD_LAUNCH((dense_pair_grad_kernel<Student, Teacher, false>), blocks, kThreads, 0, stream, task);
  }
  return cudaGetLastError();
}

#define TITAN_OPD_INSTANTIATE(Student, Teacher)                                                            \
  template cudaError_t launch_dense_pair_sums(const DensePairSumsTask<Student, Teacher>&, cudaStream_t); \
  template cudaError_t launch_dense_pair_grad(const DensePairGradTask<Student, Teacher>&, cudaStream_t)

TITAN_OPD_INSTANTIATE(float, float);
TITAN_OPD_INSTANTIATE(float, Bfloat16);
TITAN_OPD_INSTANTIATE(float, Half);
TITAN_OPD_INSTANTIATE(Bfloat16, float);
TITAN_OPD_INSTANTIATE(Bfloat16, Bfloat16);
TITAN_OPD_INSTANTIATE(Bfloat16, Half);
TITAN_OPD_INSTANTIATE(Half, float);
TITAN_OPD_INSTANTIATE(Half, Bfloat16);
TITAN_OPD_INSTANTIATE(Half, Half);

#undef TITAN_OPD_INSTANTIATE

}  // namespace titan_opd
