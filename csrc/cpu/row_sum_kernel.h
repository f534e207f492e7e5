// The body of the row_sum_* kernels. Included once by each row_sum_*.cpp, after that file's target pragma, so that the
// compiler vectorises the same loops for another instruction set.
//
// Everything is in an unnamed namespace and nothing here instantiates a standard template: an inline function with
// external linkage, compiled for AVX-512 in one file, could be the copy that the linker keeps for all files, and would
// crash on a CPU without it.

#if defined(__clang__)
#error "clang ignores the target pragmas and would build every kernel for the baseline CPU: use g++ (CXX=g++)"
#endif

namespace titan_opd {
namespace {

// 8 KiB of float32: a block is read twice (its maximum, its exponentials), both times from the L1 cache.
constexpr int64_t kBlockColumns = 2048;
// Columns in a word of the bitmap; a block is padded to whole words, so that its loops need no remainder.
constexpr int64_t kWordColumns = 64;
static_assert(kBlockColumns % kWordColumns == 0, "a block holds whole words");

// e^x for x <= 0 and NaN for NaN. Relative error below 1e-7 (1 + |x|): small where a term counts in a sum whose
// largest term is 1. Below -87, where no term counts, e^-87.
//
// e^x = 2^n 2^r with n the integer nearest to y = x / ln 2 and |r| <= 1/2; 2^r by the polynomial of Cephes' exp2f, 2^n
// by its exponent bits.
inline float exp_nonpositive(float x) {
  constexpr float kLog2E = 1.44269504f;
  // Adding 1.5 * 2^23 rounds to the nearest integer and leaves it in the low bits. This vectorises on every CPU, which
  // std::rint and a conversion to int do not.
  constexpr float kRounder = 12582912.0f;

  x = -87.0f > x ? -87.0f : x;  // also makes a number of -inf; lets NaN pass
  const float y = x * kLog2E;
  const float rounded = y + kRounder;
  const float r = y - (rounded - kRounder);

  float power_r = 1.535336188319500e-4f;
  power_r = power_r * r + 1.339887440266574e-3f;
  power_r = power_r * r + 9.618437357674640e-3f;
  power_r = power_r * r + 5.550332471162809e-2f;
  power_r = power_r * r + 2.402264791363012e-1f;
  power_r = power_r * r + 6.931472028550421e-1f;
  power_r = power_r * r + 1.0f;

  uint32_t bits;
  __builtin_memcpy(&bits, &rounded, sizeof(bits));
  bits = (bits + 127u) << 23;  // n in the exponent field; what kRounder put above it is shifted out
  float power_n;
  __builtin_memcpy(&power_n, &bits, sizeof(power_n));
  return power_r * power_n;
}

inline float larger(float a, float b) {
  return a > b ? a : b;  // b when a is NaN
}

// The largest value, passing over NaN. Four running maxima, because one would wait for its own latency at each step.
inline float block_max(const float* block, int64_t num_columns) {
  const int64_t quarter = num_columns / 4;
  float max0 = -INFINITY, max1 = -INFINITY, max2 = -INFINITY, max3 = -INFINITY;
#pragma omp simd reduction(max : max0, max1, max2, max3)
  for (int64_t c = 0; c < quarter; ++c) {
    max0 = larger(block[c], max0);
    max1 = larger(block[c + quarter], max1);
    max2 = larger(block[c + 2 * quarter], max2);
    max3 = larger(block[c + 3 * quarter], max3);
  }
  return larger(larger(max0, max1), larger(max2, max3));
}

// `num_columns` is a multiple of kWordColumns.
inline ExpSum block_sum(const float* block, int64_t num_columns) {
  const float max = block_max(block, num_columns);
  const float shift = max == -INFINITY ? 0.0f : max;  // -inf - -inf would be NaN
  float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
  for (int64_t c = 0; c < num_columns; ++c) {
    sum += exp_nonpositive(block[c] - shift);
  }
  if (sum != sum) {  // a NaN, or a +inf: +inf - +inf
    return {NAN, NAN};
  }
  if (max == -INFINITY) {
    return {};
  }
  return {max, sum};
}

// Copies a block as float32, with -inf for the columns left out and for those that fill up the last word. `left_out`
// starts at the block's own word. Returns the number of columns with the filling.
template <typename Logit>
inline int64_t load_block(const Logit* row, int64_t num_columns, const uint64_t* left_out, float* block) {
#pragma omp simd
  for (int64_t c = 0; c < num_columns; ++c) {
    block[c] = to_float(row[c]);
  }
  int64_t filled = num_columns;
  for (; filled % kWordColumns != 0; ++filled) {
    block[filled] = -INFINITY;
  }
  if (left_out != nullptr) {
    for (int64_t begin = 0; begin < num_columns; begin += kWordColumns) {
      for (uint64_t bits = left_out[begin / kWordColumns]; bits != 0; bits &= bits - 1) {
        block[begin + __builtin_ctzll(bits)] = -INFINITY;
      }
    }
  }
  return filled;
}

// Asks for the next block before this one's exponentials are computed: memory and arithmetic overlap. For logits that
// come from main memory this saves 10 to 20 % of the time; from a cache it costs 4 %.
template <typename Logit>
inline void prefetch(const Logit* row, int64_t num_columns) {
  constexpr int64_t kColumnsPerLine = 64 / sizeof(Logit);
  for (int64_t c = 0; c < num_columns; c += kColumnsPerLine) {
    __builtin_prefetch(row + c);
  }
}

template <typename Logit>
inline ExpSum row_sum(const Logit* row, int64_t num_columns, const uint64_t* left_out) {
  alignas(64) float block[kBlockColumns];
  const auto block_columns = [&](int64_t begin) {
    const int64_t rest = num_columns - begin;
    return rest < kBlockColumns ? rest : kBlockColumns;
  };
  ExpSum total;
  for (int64_t begin = 0; begin < num_columns; begin += kBlockColumns) {
    const uint64_t* block_left_out = left_out == nullptr ? nullptr : left_out + begin / kWordColumns;
    const int64_t filled = load_block(row + begin, block_columns(begin), block_left_out, block);
    const int64_t next = begin + kBlockColumns;
    if (next < num_columns) {
      prefetch(row + next, block_columns(next));
    }
    total = merge(total, block_sum(block, filled));
  }
  return total;
}

}  // namespace
}  // namespace titan_opd
