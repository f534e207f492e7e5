// The Python module `titan_opd._C`: importing it registers the operators with torch, and their CPU kernels.

#include <Python.h>
#include <torch/csrc/stable/library.h>

#include "schemas.h"

STABLE_TORCH_LIBRARY(titan_opd, library) {
  titan_opd::define_operators(library);
  // titan_opd/ops/digests.py, of which other devices have the reference: [number of tensors] int64.
  library.def("multi_copy_digests(Tensor[] sources, Tensor(a!)[] destinations, str? isa=None) -> Tensor");
  library.def("multi_digest(Tensor[] tensors, str? isa=None) -> Tensor");
  // The kernel that `isa=None` takes on this machine.
  library.def("cpu_isa() -> str");
}

PyMODINIT_FUNC PyInit__C() {
  static PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_C", nullptr, -1, nullptr};
  return PyModule_Create(&definition);
}
