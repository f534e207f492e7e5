#include "../operators/gumbel_sample.h"

#include "device_op.h"

namespace titan_opd {
namespace {

std::tuple<Tensor, Tensor, Tensor> gumbel_sample_cuda(const Tensor& logits_RV, const Tensor& keys_R,
                                                      int64_t num_samples, int64_t vocab_start,
                                                      std::optional<int64_t> vocab_size,
                                                      std::optional<Tensor> inverse_temperature_R,
                                                      std::optional<std::string> isa) {
  check_no_isa("gumbel_sample", isa);
  return gumbel_sample(
      logits_RV, keys_R, num_samples, vocab_start, vocab_size, inverse_temperature_R, [&](const auto& task) {
        run_on_device("gumbel_sample", logits_RV,
                      [&](cudaStream_t stream) { return launch_gumbel_sample(task, stream); });
      });
}

}  // namespace
}  // namespace titan_opd

TITAN_OPD_DEVICE_IMPL(library) {
  library.impl("gumbel_sample", TORCH_BOX(&titan_opd::gumbel_sample_cuda));
}
