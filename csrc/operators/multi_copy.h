// multi_copy on tensors, for any device: lists of tensors to plain copies of rows, and the refusal of what a copy in
// any order would get wrong.
#pragma once

#include <cstdint>

#include "tensors.h"

namespace titan_opd {

inline ElementType checked_element_type(const char* list, size_t i, const Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case ScalarType::Float:
      return ElementType::kFloat32;
    case ScalarType::BFloat16:
      return ElementType::kBfloat16;
    case ScalarType::Half:
      return ElementType::kFloat16;
    default:
      STD_TORCH_CHECK(false, "multi_copy: ", list, "[", i, "] must be float32, bfloat16 or float16");
  }
  return ElementType::kFloat32;  // unreachable: the check above throws
}

// Both tensors as rows of adjacent elements. The innermost dimensions that are contiguous on both sides are the
// columns; the others must be one dimension of rows.
inline CopyTask checked_copy(size_t i, const Tensor& source, Tensor& destination) {
  STD_TORCH_CHECK(source.device() == destination.device(), "multi_copy: sources[", i, "] and destinations[", i,
                  "] must be on one device");
  bool same_shape = source.dim() == destination.dim();
  struct Dimension {
    int64_t size, source_stride, destination_stride;
  };
  std::vector<Dimension> dimensions;  // without those of size 1
  for (int64_t d = 0; same_shape && d < source.dim(); ++d) {
    same_shape = source.size(d) == destination.size(d);
    if (source.size(d) != 1) {
      dimensions.push_back({source.size(d), source.stride(d), destination.stride(d)});
    }
  }
  STD_TORCH_CHECK(same_shape, "multi_copy: sources[", i, "] and destinations[", i, "] must have one shape");

  CopyTask task{source.const_data_ptr(),
                destination.mutable_data_ptr(),
                /*num_rows=*/1,
                /*num_columns=*/1,
                /*source_stride=*/0,
                /*destination_stride=*/0,
                checked_element_type("sources", i, source),
                checked_element_type("destinations", i, destination)};
  if (source.numel() == 0) {
    task.num_columns = 0;
    return task;
  }
  const auto inner = [&]() -> const Dimension& { return dimensions.back(); };
  while (!dimensions.empty() && inner().source_stride == task.num_columns &&
         inner().destination_stride == task.num_columns) {
    task.num_columns *= inner().size;
    dimensions.pop_back();
  }
  if (dimensions.empty()) {
    return task;
  }
  task.source_stride = inner().source_stride;
  task.destination_stride = inner().destination_stride;
  while (!dimensions.empty()) {
    STD_TORCH_CHECK(inner().source_stride == task.source_stride * task.num_rows &&
                        inner().destination_stride == task.destination_stride * task.num_rows,
                    "multi_copy: sources[", i, "] and destinations[", i,
                    "] must reduce to rows of adjacent elements; pass contiguous tensors");
    task.num_rows *= inner().size;
    dimensions.pop_back();
  }
  STD_TORCH_CHECK(task.destination_stride >= task.num_columns, "multi_copy: destinations[", i,
                  "] shares memory among its own elements");
  return task;
}

// The memory of one tensor.
struct CopyWindow {
  uintptr_t begin;
  uintptr_t end;
  uintptr_t row_bytes;
  uintptr_t stride_bytes;  // 0 for a single row
  bool is_destination;
  size_t index;

  const char* list() const { return is_destination ? "destinations[" : "sources["; }
};

inline CopyWindow window_of(const void* data, int64_t num_rows, int64_t num_columns, int64_t stride, ElementType type,
                            bool is_destination, size_t index) {
  const auto begin = reinterpret_cast<uintptr_t>(data);
  const uintptr_t size = element_size(type);
  const uintptr_t row_bytes = num_columns * size;
  const uintptr_t stride_bytes = num_rows > 1 ? stride * size : 0;
  return {begin, begin + (num_rows - 1) * stride_bytes + row_bytes, row_bytes, stride_bytes, is_destination, index};
}

// Whether two tensors share memory, `first` being the one that begins first. Slices of columns of one matrix do not,
// though they lie in each other's extent; any other two that do are taken to share.
inline bool overlap(const CopyWindow& first, const CopyWindow& second) {
  if (second.begin >= first.end) {
    return false;
  }
  if (first.stride_bytes == 0 || first.stride_bytes != second.stride_bytes) {
    return true;
  }
  const uintptr_t offset = (second.begin - first.begin) % first.stride_bytes;
  return offset < first.row_bytes || offset + second.row_bytes > first.stride_bytes;
}

inline void check_no_overlap(const std::vector<CopyTask>& tasks) {
  std::vector<CopyWindow> windows;
  for (size_t i = 0; i < tasks.size(); ++i) {
    const CopyTask& task = tasks[i];
    if (task.num_columns > 0) {
      windows.push_back(window_of(task.source, task.num_rows, task.num_columns, task.source_stride, task.source_type,
                                  false, i));
      windows.push_back(window_of(task.destination, task.num_rows, task.num_columns, task.destination_stride,
                                  task.destination_type, true, i));
    }
  }
  std::sort(windows.begin(), windows.end(),
            [](const CopyWindow& a, const CopyWindow& b) { return a.begin < b.begin; });
  for (size_t i = 0; i < windows.size(); ++i) {
    for (size_t j = i + 1; j < windows.size() && windows[j].begin < windows[i].end; ++j) {
      const bool is_written = windows[i].is_destination || windows[j].is_destination;
      STD_TORCH_CHECK(!is_written || !overlap(windows[i], windows[j]), "multi_copy: ", windows[i].list(),
                      windows[i].index, "] and ", windows[j].list(), windows[j].index, "] share memory");
    }
  }
}

// The checked copies, without the empty ones; all on one device.
inline std::vector<CopyTask> checked_copies(const std::vector<Tensor>& sources, std::vector<Tensor>& destinations) {
  STD_TORCH_CHECK(sources.size() == destinations.size(), "multi_copy: ", sources.size(), " sources, but ",
                  destinations.size(), " destinations");
  std::vector<CopyTask> tasks;
  for (size_t i = 0; i < sources.size(); ++i) {
    STD_TORCH_CHECK(sources[i].device() == sources[0].device(), "multi_copy: sources[", i,
                    "] must be on the first one's device");
    tasks.push_back(checked_copy(i, sources[i], destinations[i]));
  }
  check_no_overlap(tasks);
  tasks.erase(std::remove_if(tasks.begin(), tasks.end(), [](const CopyTask& task) { return task.num_columns == 0; }),
              tasks.end());
  return tasks;
}

// Calls `run` with an element of each side's type: run(source, destination).
template <typename Run>
void dispatch_copy(const CopyTask& task, Run run) {
  dispatch_element(task.source_type, [&](auto source) {
    dispatch_element(task.destination_type, [&](auto destination) { run(source, destination); });
  });
}

}  // namespace titan_opd
