#include "../operators/dense_pair.h"

#include "device_op.h"

namespace titan_opd {
namespace {

Tensor dense_pair_sums_cuda(const Tensor& student_RV, const Tensor& teacher_RV, const Tensor& student_max_R,
                            const Tensor& student_sum_exp_R, const Tensor& teacher_max_R,
                            const Tensor& teacher_sum_exp_R, double min_logprob, std::optional<double> beta,
                            int64_t vocab_start, std::optional<int64_t> vocab_size, std::optional<std::string> isa) {
  check_no_isa("dense_pair_sums", isa);
  const PairArguments arguments{student_RV,    teacher_RV,        student_max_R, student_sum_exp_R,
                                teacher_max_R, teacher_sum_exp_R, min_logprob,   vocab_start,
                                vocab_size};
  return dense_pair_sums(arguments, beta, [&](const auto& task) {
    run_on_device("dense_pair_sums", student_RV,
                  [&](cudaStream_t stream) { return launch_dense_pair_sums(task, stream); });
  });
}

void dense_pair_grad_cuda(Tensor student_RV, const Tensor& teacher_RV, const Tensor& student_max_R,
                          const Tensor& student_sum_exp_R, const Tensor& teacher_max_R,
                          const Tensor& teacher_sum_exp_R, const Tensor& offset_R, const Tensor& coefficient_R,
                          double forward_weight, double reverse_weight, double jsd_weight, double beta,
                          double min_logprob, int64_t vocab_start, std::optional<int64_t> vocab_size,
                          std::optional<std::string> isa) {
  check_no_isa("dense_pair_grad_", isa);
  const PairArguments arguments{student_RV,    teacher_RV,        student_max_R, student_sum_exp_R,
                                teacher_max_R, teacher_sum_exp_R, min_logprob,   vocab_start,
                                vocab_size};
  const PairGradWeights weights{forward_weight, reverse_weight, jsd_weight, beta};
  dense_pair_grad_(student_RV, arguments, offset_R, coefficient_R, weights, [&](const auto& task) {
    run_on_device("dense_pair_grad_", student_RV,
                  [&](cudaStream_t stream) { return launch_dense_pair_grad(task, stream); });
  });
}

}  // namespace
}  // namespace titan_opd

TITAN_OPD_DEVICE_IMPL(library) {
  library.impl("dense_pair_sums", TORCH_BOX(&titan_opd::dense_pair_sums_cuda));
  library.impl("dense_pair_grad_", TORCH_BOX(&titan_opd::dense_pair_grad_cuda));
}
