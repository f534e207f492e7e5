// The Python module `titan_opd._C`: importing it registers the operators below with torch.
//
// A schema stands here, its implementations beside their kernels; the fake (meta) implementations that
// torch.compile needs are in titan_opd/ops, where shapes are easier to read.

#include <Python.h>
#include <torch/csrc/stable/library.h>

STABLE_TORCH_LIBRARY(titan_opd, library) {
  // logits [R, V] float32 or bfloat16, ids [R, K] int32 or int64; see titan_opd/ops/gather_stats.py.
  // `isa` forces a kernel ("portable", "avx2", "avx512") for tests and benchmarks; None takes the best.
  library.def(
      "gather_stats(Tensor logits, Tensor ids, int vocab_start, int? vocab_size, str? isa=None)"
      " -> (Tensor max, Tensor sum_exp, Tensor tail_max, Tensor tail_sum_exp, Tensor candidates)");
  // The kernel that `isa=None` takes on this machine.
  library.def("cpu_isa() -> str");
}

PyMODINIT_FUNC PyInit__C() {
  static PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_C", nullptr, -1, nullptr};
  return PyModule_Create(&definition);
}
