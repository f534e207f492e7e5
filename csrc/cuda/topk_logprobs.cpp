#include "../operators/topk_logprobs.h"

#include "device_op.h"

namespace titan_opd {
namespace {

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> topk_logprobs_cuda(
    const Tensor& logits_RV, int64_t k, int64_t vocab_start, std::optional<int64_t> vocab_size,
    std::optional<Tensor> inverse_temperature_R, std::optional<std::string> isa) {
  check_no_isa("topk_logprobs", isa);
  return topk_logprobs(logits_RV, k, vocab_start, vocab_size, inverse_temperature_R, [&](const auto& task) {
    run_on_device("topk_logprobs", logits_RV, [&](cudaStream_t stream) { return launch_topk_logprobs(task, stream); });
  });
}

}  // namespace
}  // namespace titan_opd

TITAN_OPD_DEVICE_IMPL(library) {
  library.impl("topk_logprobs", TORCH_BOX(&titan_opd::topk_logprobs_cuda));
}
