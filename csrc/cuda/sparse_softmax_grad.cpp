#include "../operators/sparse_softmax_grad.h"

#include "device_op.h"

namespace titan_opd {
namespace {

void sparse_softmax_grad_cuda(Tensor logits_RV, const Tensor& ids_RK, const Tensor& g_RK, const Tensor& lse_R,
                              const Tensor& tail_lse_R, const Tensor& g_lse_R, const Tensor& g_tail_R,
                              int64_t vocab_start, std::optional<int64_t> vocab_size,
                              std::optional<Tensor> inverse_temperature_R, std::optional<std::string> isa) {
  constexpr const char* op = "sparse_softmax_grad_";
  check_no_isa(op, isa);
  sparse_softmax_grad_(logits_RV, ids_RK, g_RK, lse_R, tail_lse_R, g_lse_R, g_tail_R, vocab_start, vocab_size,
                       inverse_temperature_R, [&](const auto& task) {
                         run_on_device(op, logits_RV, [&](cudaStream_t stream) {
                           return launch_sparse_softmax_grad(task, stream);
                         });
                       });
}

}  // namespace
}  // namespace titan_opd

TITAN_OPD_DEVICE_IMPL(library) {
  library.impl("sparse_softmax_grad_", TORCH_BOX(&titan_opd::sparse_softmax_grad_cuda));
}
