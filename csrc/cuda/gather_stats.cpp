#include "../operators/gather_stats.h"

#include "device_op.h"

namespace titan_opd {
namespace {

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> gather_stats_cuda(
    const Tensor& logits_RV, const Tensor& ids_RK, int64_t vocab_start, std::optional<int64_t> vocab_size,
    std::optional<Tensor> inverse_temperature_R, std::optional<std::string> isa) {
  check_no_isa("gather_stats", isa);
  return gather_stats(logits_RV, ids_RK, vocab_start, vocab_size, inverse_temperature_R, [&](const auto& task) {
    run_on_device("gather_stats", logits_RV, [&](cudaStream_t stream) { return launch_gather_stats(task, stream); });
  });
}

}  // namespace
}  // namespace titan_opd

TITAN_OPD_DEVICE_IMPL(library) {
  library.impl("gather_stats", TORCH_BOX(&titan_opd::gather_stats_cuda));
}
