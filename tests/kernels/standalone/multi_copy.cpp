// multi_copy against single copies: all pairs of types, rows apart, odd sizes, more copies than one launch describes.

#include <list>

#include "check.h"

using namespace standalone;
using namespace titan_opd;

namespace {

constexpr ElementType kTypes[] = {ElementType::kFloat32, ElementType::kBfloat16, ElementType::kFloat16};

// Rows of bytes, `stride` elements apart, of exactly the memory that they need.
struct Buffer {
  ElementType type;
  int64_t num_rows, num_columns, stride;
  Array<unsigned char> bytes;

  Buffer(ElementType type, int64_t num_rows, int64_t num_columns, int64_t padding)
      : type(type), num_rows(num_rows), num_columns(num_columns), stride(num_columns + padding),
        bytes(((num_rows - 1) * stride + num_columns) * element_size(type)) {}

  float get(int64_t i) const {
    float value = 0;
    dispatch_element(type, [&](auto element) {
      value = to_float(reinterpret_cast<const decltype(element)*>(bytes.data())[i]);
    });
    return value;
  }
  void set(int64_t i, float value) {
    dispatch_element(type, [&](auto element) {
      from_float(value, reinterpret_cast<decltype(element)*>(bytes.data())[i]);
    });
  }
  int64_t num_elements() const { return bytes.size() / element_size(type); }
};

}  // namespace

CHECK(multi_copy) {
  Random random(1);
  std::list<Buffer> sources, destinations;
  std::vector<CopyTask> tasks;
  for (int copy = 0; copy < 130; ++copy) {
    const ElementType from = kTypes[copy % 3], to = kTypes[copy / 3 % 3];
    // Mostly small; some over several of a launch's tiles; rows whose ends are aligned and not.
    const int64_t num_rows = copy % 4 == 0 ? random.integer(2, 9) : 1;
    const int64_t num_columns = copy % 16 == 0 ? random.integer(2000, 9000) : 8 * random.integer(0, 20) + copy % 5 + 1;
    sources.emplace_back(from, num_rows, num_columns, copy % 3);
    destinations.emplace_back(to, num_rows, num_columns, copy % 7 == 0 ? 8 : 0);
    Buffer& source = sources.back();
    Buffer& destination = destinations.back();
    for (int64_t i = 0; i < source.num_elements(); ++i) {
      source.set(i, random.normal(1.0f));
    }
    for (int64_t i = 0; i < destination.num_elements(); ++i) {
      destination.set(i, 77.0f);
    }
    tasks.push_back({source.bytes.data(), destination.bytes.data(), num_rows, num_columns, source.stride,
                     destination.stride, from, to});
  }
  expect_success(launch_multi_copy(tasks.data(), static_cast<int64_t>(tasks.size()), nullptr));

  auto source = sources.begin();
  for (const Buffer& destination : destinations) {
    for (int64_t i = 0; i < destination.num_elements(); ++i) {
      const int64_t row = i / destination.stride, column = i % destination.stride;
      double expected = 77;
      if (column < destination.num_columns) {
        Buffer rounded(destination.type, 1, 1, 0);
        rounded.set(0, source->get(row * source->stride + column));
        expected = rounded.get(0);
      }
      expect_close("element", destination.get(i), expected, 0);
    }
    ++source;
  }
}
