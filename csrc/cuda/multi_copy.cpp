#include "../operators/multi_copy.h"

#include "device_op.h"

namespace titan_opd {
namespace {

void multi_copy_cuda(std::vector<Tensor> sources, std::vector<Tensor> destinations, std::optional<std::string> isa) {
  check_no_isa("multi_copy", isa);
  const std::vector<CopyTask> tasks = checked_copies(sources, destinations);
  if (!tasks.empty()) {
    run_on_device("multi_copy", sources[0], [&](cudaStream_t stream) {
      return launch_multi_copy(tasks.data(), static_cast<int64_t>(tasks.size()), stream);
    });
  }
}

}  // namespace
}  // namespace titan_opd

TITAN_OPD_DEVICE_IMPL(library) {
  library.impl("multi_copy", TORCH_BOX(&titan_opd::multi_copy_cuda));
}
