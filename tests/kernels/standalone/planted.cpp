// Accesses outside an array, each in a kernel of this file: shows that AddressSanitizer sees them through the emulation.
// Not linked into the other checks; each must end the program.

#include "check.h"

using cuda_on_cpu::run_grid;
using standalone::Array;

// The element that the last thread touches is the first outside.
CHECK(planted_read_past_an_array) {
  Array<float> values(95);
  Array<float> sums(1);
  run_grid(1, 96, 0, [&] { atomicAdd(&sums[0], values[threadIdx.x]); });
}

CHECK(planted_write_before_an_array) {
  Array<uint16_t> values(32);
  run_grid(1, 32, 0, [&] { values[static_cast<int64_t>(threadIdx.x) - 1] = 1; });
}

CHECK(planted_write_past_dynamic_shared_memory) {
  run_grid(1, 32, 31 * sizeof(float), [] {
    static_cast<float*>(cuda_on_cpu::dynamic_shared_memory())[threadIdx.x] = 1.0f;
  });
}

CHECK(planted_write_past_static_shared_memory) {
  Array<float> out(32);
  run_grid(1, 32, 0, [&] {
    __shared__ volatile float values[31];
    values[threadIdx.x] = 1.0f;
    out[threadIdx.x] = values[0];
  });
}

CHECK(planted_read_past_a_threads_own_array) {
  Array<int> out(32);
  run_grid(1, 32, 0, [&] {
    volatile int own[4] = {1, 2, 3, 4};
    out[threadIdx.x] = own[(threadIdx.x + 4) / 7];
  });
}

// Not outside: an access of 16 bytes at an address that is no multiple of 16, which a GPU refuses.
CHECK(planted_misaligned_vector) {
  Array<uint4> values(33);
  Array<uint4> out(32);
  run_grid(1, 32, 0, [&] {
    const auto* shifted = reinterpret_cast<const uint4*>(reinterpret_cast<const float*>(values.data()) + 1);
    out[threadIdx.x] = __ldg(shifted + threadIdx.x);
  });
}
