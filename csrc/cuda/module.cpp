// The Python module `titan_opd._CUDA`: importing it adds the CUDA implementations to the operators of `titan_opd._C`.

#include <Python.h>

PyMODINIT_FUNC PyInit__CUDA() {
  static PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_CUDA", nullptr, -1, nullptr};
  return PyModule_Create(&definition);
}
