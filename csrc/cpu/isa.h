// Which instruction set the CPU kernels use, chosen when the program runs.
#pragma once

#include <optional>
#include <string>

namespace titan_opd {

enum class Isa { kPortable, kAvx2, kAvx512 };

// The widest one this machine has.
Isa best_isa();

// The named one ("portable", "avx2", "avx512"), or the best for std::nullopt. Throws when the name is unknown or
// this machine lacks the instructions.
Isa select_isa(const std::optional<std::string>& name);

const char* isa_name(Isa isa);

}  // namespace titan_opd
