// From an operator's call to a launch, on the GPU and, for tests, in the emulation: the .cpp files of this folder are
// compiled once for each.
#pragma once

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/Exception.h>

#include <optional>
#include <string>

#include "kernels.h"

#if defined(TITAN_OPD_EMULATED)
#define TITAN_OPD_DEVICE_IMPL(library) STABLE_TORCH_LIBRARY_IMPL(titan_opd_emu, CPU, library)
#else
#define TITAN_OPD_DEVICE_IMPL(library) STABLE_TORCH_LIBRARY_IMPL(titan_opd, CUDA, library)
#endif

namespace titan_opd {

// Calls `launch(stream)` on the tensor's device and its current stream; an error code becomes an exception.
template <typename Launch>
void run_on_device(const char* op, const torch::stable::Tensor& tensor, Launch launch) {
#if defined(TITAN_OPD_EMULATED)
  static_cast<void>(tensor);
  const cudaError_t error = launch(nullptr);
#else
  const auto device = tensor.get_device_index();
  const torch::stable::accelerator::DeviceGuard guard(device);
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device, &stream));
  const cudaError_t error = launch(static_cast<cudaStream_t>(stream));
#endif
  STD_TORCH_CHECK(error == cudaSuccess, op, ": ", cudaGetErrorString(error));
}

// `isa` chooses among the CPU's kernels.
inline void check_no_isa(const char* op, const std::optional<std::string>& isa) {
  STD_TORCH_CHECK(!isa.has_value(), op, ": isa = '", isa.value_or(""), "' is for tensors on the CPU");
}

}  // namespace titan_opd
