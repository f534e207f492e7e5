// The Python module `titan_opd._EMU`: the operators under `torch.ops.titan_opd_emu`, for CPU tensors, by the CUDA
// kernels in emulation.

#include <Python.h>
#include <torch/csrc/stable/library.h>

#include "../schemas.h"
#include "fibers.h"

namespace {

void set_thread_order(int64_t order) {
  cuda_on_cpu::set_thread_order(static_cast<unsigned>(order));
}

}  // namespace

STABLE_TORCH_LIBRARY(titan_opd_emu, library) {
  titan_opd::define_operators(library);
  library.def("set_thread_order(int order) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(titan_opd_emu, CompositeExplicitAutograd, library) {
  library.impl("set_thread_order", TORCH_BOX(&set_thread_order));
}

PyMODINIT_FUNC PyInit__EMU() {
  static PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_EMU", nullptr, -1, nullptr};
  return PyModule_Create(&definition);
}
