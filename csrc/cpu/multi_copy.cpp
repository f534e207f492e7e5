// multi_copy on the CPU: all copies are cut into tiles of about equal memory, which the threads share.

#include "../operators/multi_copy.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <type_traits>
#include <vector>

#include "isa.h"
#include "parallel.h"
#include "rows.h"

namespace titan_opd {
namespace {

constexpr int64_t kTileBytes = 128 << 10;  // read and written together

template <typename Source, typename Destination>
void copy_elements(const Source* source, Destination* destination, int64_t count, Isa isa) {
  if constexpr (std::is_same_v<Source, Destination>) {
    std::memcpy(destination, source, count * sizeof(Source));
  } else if constexpr (std::is_same_v<Source, float>) {
    conversion_kernels<Destination>(isa).store(source, count, destination);
  } else if constexpr (std::is_same_v<Destination, float>) {
    conversion_kernels<Source>(isa).load(source, count, destination);
  } else {
    constexpr int64_t kBlock = 1024;
    float values[kBlock];
    for (int64_t first = 0; first < count; first += kBlock) {
      const int64_t block = std::min(kBlock, count - first);
      conversion_kernels<Source>(isa).load(source + first, block, values);
      conversion_kernels<Destination>(isa).store(values, block, destination + first);
    }
  }
}

// The elements begin .. end of a copy, counted along its rows.
void copy_range(const CopyTask& task, int64_t begin, int64_t end, Isa isa) {
  dispatch_copy(task, [&](auto source_type, auto destination_type) {
    const auto* source = static_cast<const decltype(source_type)*>(task.source);
    auto* destination = static_cast<decltype(destination_type)*>(task.destination);
    for (int64_t i = begin; i < end;) {
      const int64_t row = i / task.num_columns;
      const int64_t column = i % task.num_columns;
      const int64_t count = std::min(task.num_columns - column, end - i);
      copy_elements(source + row * task.source_stride + column, destination + row * task.destination_stride + column,
                    count, isa);
      i += count;
    }
  });
}

int64_t tile_elements(const CopyTask& task) {
  return kTileBytes / (element_size(task.source_type) + element_size(task.destination_type));
}

void multi_copy_cpu(std::vector<Tensor> sources, std::vector<Tensor> destinations,
                    std::optional<std::string> isa_name) {
  const Isa isa = select_isa(isa_name);
  const std::vector<CopyTask> tasks = checked_copies(sources, destinations);
  std::vector<int64_t> first_tiles;
  int64_t num_tiles = 0;
  for (const CopyTask& task : tasks) {
    first_tiles.push_back(num_tiles);
    num_tiles += (task.num_elements() + tile_elements(task) - 1) / tile_elements(task);
  }
  for_each_row_range(num_tiles, kTileBytes / 8, [&](int64_t begin, int64_t end) {
    size_t t = std::upper_bound(first_tiles.begin(), first_tiles.end(), begin) - first_tiles.begin() - 1;
    for (int64_t tile = begin; tile < end; ++tile) {
      while (t + 1 < tasks.size() && first_tiles[t + 1] <= tile) {
        ++t;
      }
      const int64_t first = (tile - first_tiles[t]) * tile_elements(tasks[t]);
      copy_range(tasks[t], first, std::min(first + tile_elements(tasks[t]), tasks[t].num_elements()), isa);
    }
  });
}

}  // namespace
}  // namespace titan_opd

STABLE_TORCH_LIBRARY_IMPL(titan_opd, CPU, library) {
  library.impl("multi_copy", TORCH_BOX(&titan_opd::multi_copy_cpu));
}
