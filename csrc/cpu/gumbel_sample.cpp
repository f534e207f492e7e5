// gumbel_sample on the CPU. An id's score is at most z - log(w / 2^32), w its first 32 bits of noise. So in a block of
// columns with the largest logit `peak` only those with w <= 2^32 exp(peak - best) can beat the best score so far: one
// exponential a block, one hash and one integer comparison an id, and logarithms for the few that pass.

#include "../operators/gumbel_sample.h"

#include <algorithm>
#include <limits>
#include <string>
#include <vector>

#include "isa.h"
#include "parallel.h"
#include "rows.h"

namespace titan_opd {
namespace {

constexpr int64_t kFirstColumns = 64;
constexpr int64_t kMaxColumns = 2048;

struct Race {
  uint64_t draw_key;
  double best = -INFINITY;
  int64_t column = -1;
};

// The largest first noise word with which a logit of at most `peak` may score `best` or more.
uint32_t noise_limit(float peak, double best) {
  constexpr double kRounding = 1.0 + 1e-9;  // of the exponential and the logarithms
  const double limit = std::exp(peak - best) * 0x1p32 * kRounding;
  constexpr uint32_t kAll = std::numeric_limits<uint32_t>::max();
  return limit < kAll ? static_cast<uint32_t>(limit) : kAll;
}

// Whether z's score may be above `best`, without a logarithm: w >= 2^(31 - zeros), hence w / 2^32 >= 2^-(zeros + 1).
bool may_win(float z, uint32_t word, double best) {
  constexpr double kLn2 = 0.69314718056;  // rounded up
  return word == 0 ? z > -INFINITY : z + (__builtin_clz(word) + 1) * kLn2 > best;
}

template <typename Logit>
class Sampler {
 public:
  Sampler(const GumbelSampleTask<Logit>& task, Isa isa)
      : task_(task), kernels_(row_kernels<Logit>(isa)), races_(task.num_samples) {}

  void run_row(int64_t r) {
    const Logit* row = task_.logits_RV.row(r);
    const float factor = task_.inverse_temperature_R.at(r);
    for (int d = 0; d < task_.num_samples; ++d) {
      races_[d] = Race{absorb(static_cast<uint64_t>(task_.keys_R[r]), d)};
    }
    const bool is_distribution = run_races(row, factor);
    for (int d = 0; d < task_.num_samples; ++d) {
      const Race& race = races_[d];
      const bool has_winner = is_distribution && race.column >= 0;
      const float nobody = is_distribution ? -INFINITY : NAN;
      task_.ids_Rm.row(r)[d] = has_winner ? task_.shard.vocab_start + race.column : -1;
      task_.scores_Rm.row(r)[d] = has_winner ? race.best : nobody;
      task_.values_Rm.row(r)[d] = has_winner ? to_float(row[race.column]) * factor : nobody;
    }
  }

 private:
  // False when a logit is NaN or +inf.
  bool run_races(const Logit* row, float factor) {
    const int64_t num_columns = task_.shard.num_columns;
    for (int64_t begin = 0; begin < num_columns;) {
      // Short steps first: without a best score every id may win.
      const int64_t step = std::min(std::clamp(begin, kFirstColumns, kMaxColumns), num_columns - begin);
      float peak;
      if (!kernels_.peak(row + begin, step, factor, &peak)) {
        return false;
      }
      if (peak > -INFINITY) {
        for (Race& race : races_) {
          run_block(race, row, begin, step, factor, peak);
        }
      }
      begin += step;
    }
    return true;
  }

  void run_block(Race& race, const Logit* row, int64_t begin, int64_t num_columns, float factor, float peak) const {
    uint64_t masks[kMaxColumns / 64];
    const uint32_t first_id = static_cast<uint32_t>(task_.shard.vocab_start + begin);
    kernels_.low_noise(race.draw_key, first_id, num_columns, noise_limit(peak, race.best), masks);
    for (int64_t word_begin = 0; word_begin < num_columns; word_begin += 64) {
      uint64_t bits = masks[word_begin / 64];
      const int64_t rest = num_columns - word_begin;
      if (rest < 64) {
        bits &= (uint64_t{1} << rest) - 1;
      }
      for (; bits != 0; bits &= bits - 1) {
        const int64_t c = word_begin + __builtin_ctzll(bits);
        const uint32_t id = first_id + static_cast<uint32_t>(c);
        const float z = to_float(row[begin + c]) * factor;
        if (!may_win(z, race_word(race.draw_key, id), race.best)) {
          continue;
        }
        const double score = race_score(z, race.draw_key, id);
        if (score > race.best) {  // of equal scores the lower id stays
          race.best = score;
          race.column = begin + c;
        }
      }
    }
  }

  const GumbelSampleTask<Logit>& task_;
  RowKernels<Logit> kernels_;
  std::vector<Race> races_;
};

std::tuple<Tensor, Tensor, Tensor> gumbel_sample_cpu(const Tensor& logits_RV, const Tensor& keys_R,
                                                     int64_t num_samples, int64_t vocab_start,
                                                     std::optional<int64_t> vocab_size,
                                                     std::optional<Tensor> inverse_temperature_R,
                                                     std::optional<std::string> isa_name) {
  const Isa isa = select_isa(isa_name);
  return gumbel_sample(
      logits_RV, keys_R, num_samples, vocab_start, vocab_size, inverse_temperature_R, [&](const auto& task) {
        for_each_row_range(task.num_rows, task.shard.num_columns * task.num_samples, [&](int64_t begin, int64_t end) {
          Sampler sampler(task, isa);
          for (int64_t r = begin; r < end; ++r) {
            sampler.run_row(r);
          }
        });
      });
}

}  // namespace
}  // namespace titan_opd

STABLE_TORCH_LIBRARY_IMPL(titan_opd, CPU, library) {
  library.impl("gumbel_sample", TORCH_BOX(&titan_opd::gumbel_sample_cpu));
}
