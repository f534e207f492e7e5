// multi_copy and multi_copy_digests on the CPU: all copies are cut into tiles of equal memory, which the threads share,
// and a tile goes through in blocks that stay in the L1 cache between being read, cast, digested and written.

#include "../operators/multi_copy.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <type_traits>
#include <vector>

#include "digest.h"
#include "isa.h"
#include "parallel.h"
#include "rows.h"

namespace titan_opd {
namespace {

constexpr int64_t kBlockBytes = kDigestBytes;  // of the destination
constexpr int64_t kTileBytes = 16 * kBlockBytes;
constexpr int64_t kStreamBytes = 8 << 20;  // more than the L2 cache holds is not worth being in it

template <typename Source, typename Destination>
void cast_elements(const Source* source, int64_t count, Isa isa, Destination* destination) {
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

// Calls run(offset in the memory, offset in the block, count) for each row's part of the elements begin .. end.
template <typename Run>
void for_each_part(const CopyTask& task, int64_t stride, int64_t begin, int64_t end, Run run) {
  for (int64_t i = begin; i < end;) {
    const int64_t column = i % task.num_columns;
    const int64_t count = std::min(task.num_columns - column, end - i);
    run(i / task.num_columns * stride + column, i - begin, count);
    i += count;
  }
}

class Copier {
 public:
  Copier(const std::vector<CopyTask>& tasks, Isa isa) : isa_(isa), kernels_(byte_kernels(isa)) {
    int64_t num_bytes = 0;
    for (const CopyTask& task : tasks) {
      num_bytes += task.num_elements() * element_size(task.destination_type);
    }
    streams_ = num_bytes >= kStreamBytes;
  }

  // Copies the elements begin .. end, a block, counted along the rows. Returns what they add to the digest of the
  // destination's bytes; 0 when none is wanted.
  uint64_t copy_block(const CopyTask& task, int64_t begin, int64_t end, bool wants_digest) const {
    uint64_t digest = 0;
    dispatch_copy(task, [&](auto source_type, auto destination_type) {
      using Source = decltype(source_type);
      using Destination = decltype(destination_type);
      const auto* source = static_cast<const Source*>(task.source);
      auto* destination = static_cast<Destination*>(task.destination);
      alignas(64) Destination buffer[kBlockBytes / sizeof(Destination)];
      const void* block = buffer;
      if (std::is_same_v<Source, Destination> && task.num_rows == 1) {
        block = source + begin;
      } else {
        for_each_part(task, task.source_stride, begin, end, [&](int64_t from, int64_t to, int64_t count) {
          cast_elements(source + from, count, isa_, buffer + to);
        });
      }
      if (wants_digest) {
        const int64_t number = begin * sizeof(Destination) / kBlockBytes;
        void* adjacent = task.num_rows == 1 ? destination + begin : nullptr;
        digest = digest_of_block(kernels_, block, (end - begin) * sizeof(Destination), number, adjacent, streams_);
        if (adjacent != nullptr) {
          return;
        }
      }
      const auto* elements = static_cast<const Destination*>(block);
      for_each_part(task, task.destination_stride, begin, end, [&](int64_t to, int64_t from, int64_t count) {
        write(elements + from, count * sizeof(Destination), destination + to);
      });
    });
    return digest;
  }

  void finish() const { kernels_.finish_streams(); }

 private:
  void write(const void* source, int64_t num_bytes, void* destination) const {
    if (streams_) {
      kernels_.stream_bytes(source, num_bytes, destination);
    } else {
      std::memcpy(destination, source, num_bytes);
    }
  }

  Isa isa_;
  ByteKernels kernels_;
  bool streams_;
};

// `digests`, one for each task, are added to; null: none.
void run_copies(const std::vector<CopyTask>& tasks, Isa isa, int64_t* const* digests) {
  const Copier copier(tasks, isa);
  std::vector<int64_t> first_tiles;
  int64_t num_tiles = 0;
  const auto elements = [](const CopyTask& task, int64_t bytes) { return bytes / element_size(task.destination_type); };
  for (const CopyTask& task : tasks) {
    first_tiles.push_back(num_tiles);
    num_tiles += (task.num_elements() + elements(task, kTileBytes) - 1) / elements(task, kTileBytes);
  }
  for_each_row_range(num_tiles, kTileBytes / 4, [&](int64_t begin, int64_t end) {
    size_t t = std::upper_bound(first_tiles.begin(), first_tiles.end(), begin) - first_tiles.begin() - 1;
    for (int64_t tile = begin; tile < end; ++tile) {
      while (t + 1 < tasks.size() && first_tiles[t + 1] <= tile) {
        ++t;
      }
      const CopyTask& task = tasks[t];
      const int64_t block = elements(task, kBlockBytes);
      const int64_t first = (tile - first_tiles[t]) * elements(task, kTileBytes);
      const int64_t last = std::min(first + elements(task, kTileBytes), task.num_elements());
      uint64_t digest = 0;
      for (int64_t i = first; i < last; i += block) {
        digest += copier.copy_block(task, i, std::min(i + block, last), digests != nullptr);
      }
      if (digests != nullptr) {
        add_to_digest(digests[t], digest);
      }
    }
    copier.finish();
  });
}

void multi_copy_cpu(std::vector<Tensor> sources, std::vector<Tensor> destinations,
                    std::optional<std::string> isa_name) {
  run_copies(checked_copies(sources, destinations), select_isa(isa_name), nullptr);
}

Tensor multi_copy_digests_cpu(std::vector<Tensor> sources, std::vector<Tensor> destinations,
                              std::optional<std::string> isa_name) {
  const Isa isa = select_isa(isa_name);
  STD_TORCH_CHECK(!sources.empty(), "multi_copy_digests: no tensors");
  const std::vector<CopyTask> tasks = checked_copies(sources, destinations);  // without the empty ones
  Tensor result = torch::stable::new_empty(sources[0], {static_cast<int64_t>(sources.size())}, ScalarType::Long);
  auto* digests = static_cast<int64_t*>(result.mutable_data_ptr());
  std::vector<int64_t*> of_tasks;
  for (size_t i = 0; i < destinations.size(); ++i) {
    digests[i] = destinations[i].numel() * destinations[i].element_size();
    if (destinations[i].numel() > 0) {
      of_tasks.push_back(&digests[i]);
    }
  }
  run_copies(tasks, isa, of_tasks.data());
  return result;
}

}  // namespace
}  // namespace titan_opd

STABLE_TORCH_LIBRARY_IMPL(titan_opd, CPU, library) {
  library.impl("multi_copy", TORCH_BOX(&titan_opd::multi_copy_cpu));
  library.impl("multi_copy_digests", TORCH_BOX(&titan_opd::multi_copy_digests_cpu));
}
