// gumbel_sample on the GPU: a block for each row and group of draws. Each thread keeps its best score of each draw; a score
// that all the block's threads have beaten is not computed: its bound, from the leading zeros of the noise, tells.
//
// Shape suffixes: R rows, V columns of this shard, m draws a row.

#include "../noise.h"
#include "../order_keys.h"
#include "device.cuh"
#include "kernels.h"

namespace titan_opd {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarpThreads;
constexpr int kGroupDraws = 4;  // that share one read of the row

struct Winner {
  double score;
  int column;  // -1: nobody, with the score -inf
};

__device__ __forceinline__ Winner better(Winner a, Winner b) {
  const bool take_b = b.score > a.score || (b.score == a.score && b.column < a.column);
  return take_b ? b : a;
}

__device__ __forceinline__ Winner warp_best(Winner value) {
  for (int offset = kWarpThreads / 2; offset > 0; offset /= 2) {
    const Winner other{__shfl_xor_sync(kAllLanes, value.score, offset),
                       __shfl_xor_sync(kAllLanes, value.column, offset)};
    value = better(value, other);
  }
  return value;
}

// More than the noise can be, given its first word, by its leading zeros; the uniform's least value is 2^-53.
__device__ __forceinline__ float noise_bound(uint32_t word) {
  constexpr float kLn2 = 0.6931472f;
  constexpr float kRounding = 1e-3f;
  return word == 0 ? 37.0f : static_cast<float>(__clz(static_cast<int>(word)) + 1) * kLn2 + kRounding;
}

// The upper half of an order key, which atomicMax can compare.
__device__ __forceinline__ unsigned order_bits(float value) {
  return static_cast<unsigned>(order_key(value, 0) >> 32);
}

template <typename Logit>
__global__ void __launch_bounds__(kThreads) gumbel_sample_kernel(GumbelSampleTask<Logit> task, int num_groups) {
  __shared__ unsigned floors[kGroupDraws];  // order bits of no more than the best score so far
  __shared__ Winner winners[kGroupDraws][kWarps];
  __shared__ unsigned any_wrong;

  const int64_t r = blockIdx.x / num_groups;
  const int first_draw = static_cast<int>(blockIdx.x % num_groups) * kGroupDraws;
  const Logit* row = task.logits_RV.row(r);
  const float factor = task.inverse_temperature_R.at(r);
  if (threadIdx.x < kGroupDraws) {
    floors[threadIdx.x] = order_bits(kMinusInfinity);
  }
  if (threadIdx.x == 0) {
    any_wrong = 0;
  }
  __syncthreads();

  uint64_t draw_keys[kGroupDraws];
  Winner own[kGroupDraws];
  for (int d = 0; d < kGroupDraws; ++d) {
    draw_keys[d] = absorb(static_cast<uint64_t>(task.keys_R[r]), static_cast<uint64_t>(first_draw + d));
    own[d] = {kMinusInfinity, -1};
  }
  bool is_wrong = false;
  for_each_column(row, task.shard.num_columns, factor, [&](int64_t column, const auto& z) {
    constexpr int N = sizeof(z) / sizeof(z[0]);
    const uint32_t id = static_cast<uint32_t>(task.shard.vocab_start + column);
#pragma unroll
    for (int d = 0; d < kGroupDraws; ++d) {
      if (first_draw + d >= task.num_samples) {
        break;
      }
      // Other threads raise it meanwhile: an old value only spares less.
      const volatile unsigned* floor_bits = &floors[d];
      float floor = key_logit(static_cast<uint64_t>(*floor_bits) << 32);
      for (int j = 0; j < N; ++j) {
        is_wrong |= !(z[j] < INFINITY);
        // As a difference, which stays exact where the logits are large; false for a logit of -inf.
        if (!(noise_bound(race_word(draw_keys[d], id + j)) > floor - z[j])) {
          continue;
        }
        const Winner candidate{race_score(z[j], draw_keys[d], id + j), static_cast<int>(column) + j};
        own[d] = own[d].column < 0 ? candidate : better(own[d], candidate);
        const float rounded = static_cast<float>(candidate.score);
        const float below = rounded - fabsf(rounded) * 1e-6f;
        if (below > floor) {
          floor = below;
          atomicMax(&floors[d], order_bits(below));
        }
      }
    }
  });
  if (is_wrong) {
    atomicOr(&any_wrong, 1u);
  }

  const int lane = threadIdx.x % kWarpThreads;
  const int warp = threadIdx.x / kWarpThreads;
  for (int d = 0; d < kGroupDraws; ++d) {
    const Winner winner = warp_best(own[d]);
    if (lane == 0) {
      winners[d][warp] = winner;
    }
  }
  __syncthreads();
  const int d = threadIdx.x;
  if (d < kGroupDraws && first_draw + d < task.num_samples) {
    Winner winner = winners[d][0];
    for (int w = 1; w < kWarps; ++w) {
      winner = better(winner, winners[d][w]);
    }
    const float nobody = any_wrong != 0 ? NAN : kMinusInfinity;
    const bool has_winner = any_wrong == 0 && winner.column >= 0;
    const int64_t draw = first_draw + d;
    task.ids_Rm.row(r)[draw] = has_winner ? task.shard.vocab_start + winner.column : -1;
    task.scores_Rm.row(r)[draw] = has_winner ? winner.score : nobody;
    task.values_Rm.row(r)[draw] = has_winner ? to_float(row[winner.column]) * factor : nobody;
  }
}

}  // namespace

template <typename Logit>
cudaError_t launch_gumbel_sample(const GumbelSampleTask<Logit>& task, cudaStream_t stream) {
  const int num_groups = (task.num_samples + kGroupDraws - 1) / kGroupDraws;
  TITAN_OPD_LAUNCH(gumbel_sample_kernel<Logit>, static_cast<unsigned>(task.num_rows * num_groups), kThreads, 0, stream,
                   task, num_groups);
  return cudaGetLastError();
}

template cudaError_t launch_gumbel_sample(const GumbelSampleTask<float>&, cudaStream_t);
template cudaError_t launch_gumbel_sample(const GumbelSampleTask<Bfloat16>&, cudaStream_t);
template cudaError_t launch_gumbel_sample(const GumbelSampleTask<Half>&, cudaStream_t);

}  // namespace titan_opd
