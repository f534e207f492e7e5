// Rows shared among threads.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <algorithm>

namespace titan_opd {

// Calls work(begin, end) on parts of 0 .. num_rows, on torch's own threads: they keep to torch.set_num_threads, and no
// second pool competes with them. Fewer elements than torch's own grain are not worth a second thread.
template <typename Work>
void for_each_row_range(int64_t num_rows, int64_t elements_per_row, Work work) {
  constexpr int64_t kElementsPerThread = 32768;
  const int64_t rows_per_thread = std::max<int64_t>(1, kElementsPerThread / std::max<int64_t>(1, elements_per_row));
  torch::stable::parallel_for(0, num_rows, rows_per_thread, work);
}

}  // namespace titan_opd
