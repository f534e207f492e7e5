// The columns of a row's ids, each once, with a value of each.
#pragma once

#include <cstdint>
#include <vector>

namespace titan_opd {

class Support {
 public:
  Support(int64_t num_columns, int64_t max_size) : bitmap_((num_columns + 63) / 64) {
    columns_.reserve(max_size);
    values_.reserve(max_size);
  }

  // False, and nothing added, when the column is there already.
  bool add(int64_t column, float value) {
    uint64_t& word = bitmap_[column / 64];
    const uint64_t bit = uint64_t{1} << (column % 64);
    if ((word & bit) != 0) {
      return false;
    }
    word |= bit;
    columns_.push_back(column);
    values_.push_back(value);
    return true;
  }

  // Costs the size of the support, not of the vocabulary.
  void clear() {
    for (const int64_t column : columns_) {
      bitmap_[column / 64] = 0;
    }
    columns_.clear();
    values_.clear();
  }

  // A bit per column of the shard.
  const uint64_t* bitmap() const { return bitmap_.data(); }
  const std::vector<int64_t>& columns() const { return columns_; }
  const std::vector<float>& values() const { return values_; }

 private:
  std::vector<uint64_t> bitmap_;
  std::vector<int64_t> columns_;
  std::vector<float> values_;
};

}  // namespace titan_opd
