// multi_digest on the CPU: the digests of many tensors in one pass over their bytes, which the threads share.

#include <algorithm>
#include <string>
#include <vector>

#include "../operators/tensors.h"
#include "digest.h"
#include "isa.h"
#include "parallel.h"

namespace titan_opd {
namespace {

Tensor multi_digest_cpu(std::vector<Tensor> tensors, std::optional<std::string> isa_name) {
  const ByteKernels kernels = byte_kernels(select_isa(isa_name));
  STD_TORCH_CHECK(!tensors.empty(), "multi_digest: no tensors");
  Tensor result = torch::stable::new_empty(tensors[0], {static_cast<int64_t>(tensors.size())}, ScalarType::Long);
  auto* digests = static_cast<int64_t*>(result.mutable_data_ptr());
  std::vector<const char*> data;
  std::vector<int64_t> sizes, first_blocks;
  int64_t num_blocks = 0;
  for (size_t i = 0; i < tensors.size(); ++i) {
    STD_TORCH_CHECK(tensors[i].is_contiguous(), "multi_digest: tensors[", i, "] must be contiguous");
    data.push_back(static_cast<const char*>(tensors[i].const_data_ptr()));
    sizes.push_back(tensors[i].numel() * tensors[i].element_size());
    digests[i] = sizes[i];
    first_blocks.push_back(num_blocks);
    num_blocks += (sizes[i] + kDigestBytes - 1) / kDigestBytes;
  }
  for_each_row_range(num_blocks, kDigestWords, [&](int64_t begin, int64_t end) {
    size_t t = std::upper_bound(first_blocks.begin(), first_blocks.end(), begin) - first_blocks.begin() - 1;
    for (int64_t block = begin; block < end;) {
      while (t + 1 < tensors.size() && first_blocks[t + 1] <= block) {
        ++t;
      }
      const int64_t last = t + 1 < tensors.size() ? std::min(end, first_blocks[t + 1]) : end;
      uint64_t digest = 0;
      for (; block < last; ++block) {
        const int64_t number = block - first_blocks[t];
        const int64_t first = number * kDigestBytes;
        digest += digest_of_block(kernels, data[t] + first, std::min(kDigestBytes, sizes[t] - first), number);
      }
      add_to_digest(&digests[t], digest);
    }
  });
  return result;
}

}  // namespace
}  // namespace titan_opd

STABLE_TORCH_LIBRARY_IMPL(titan_opd, CPU, library) {
  library.impl("multi_digest", TORCH_BOX(&titan_opd::multi_digest_cpu));
}
