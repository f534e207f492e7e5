#include "isa.h"

#include <torch/csrc/stable/library.h>
#include <torch/headeronly/util/Exception.h>

namespace titan_opd {
namespace {

// The features named here are those of the kernels' target pragmas (row_sum_*.cpp).
Isa detect_isa() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512vl")) {
    return Isa::kAvx512;
  }
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
    return Isa::kAvx2;
  }
#endif
  return Isa::kPortable;
}

std::string cpu_isa() {
  return isa_name(best_isa());
}

}  // namespace

Isa best_isa() {
  static const Isa isa = detect_isa();
  return isa;
}

const char* isa_name(Isa isa) {
  switch (isa) {
    case Isa::kAvx512:
      return "avx512";
    case Isa::kAvx2:
      return "avx2";
    case Isa::kPortable:
      return "portable";
  }
  return "unknown";
}

Isa select_isa(const std::optional<std::string>& name) {
  if (!name.has_value()) {
    return best_isa();
  }
  for (const Isa isa : {Isa::kPortable, Isa::kAvx2, Isa::kAvx512}) {
    if (*name == isa_name(isa)) {
      // The enumerators stand in order: a machine that has one has all before it.
      STD_TORCH_CHECK(isa <= best_isa(), "isa = '", *name, "': this machine's best is '", isa_name(best_isa()), "'");
      return isa;
    }
  }
  STD_TORCH_CHECK(false, "isa = '", *name, "' is not one of 'portable', 'avx2', 'avx512'");
  return Isa::kPortable;  // unreachable: the check above throws
}

}  // namespace titan_opd

// No tensor argument names a device, hence the key that serves every backend.
STABLE_TORCH_LIBRARY_IMPL(titan_opd, CompositeExplicitAutograd, library) {
  library.impl("cpu_isa", TORCH_BOX(&titan_opd::cpu_isa));
}
