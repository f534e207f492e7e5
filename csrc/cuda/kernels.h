// The launchers of the .cu files: plain pointers in, an error code out. A task has at least one row.
#pragma once

#if !defined(TITAN_OPD_EMULATED)
#include <cuda_runtime_api.h>
#else
#include "../emu/cuda_on_cpu.h"
#endif

#include "../tasks.h"

namespace titan_opd {

template <typename Logit>
cudaError_t launch_gather_stats(const GatherStatsTask<Logit>& task, cudaStream_t stream);

template <typename Logit>
cudaError_t launch_sparse_softmax_grad(const SparseSoftmaxGradTask<Logit>& task, cudaStream_t stream);

template <typename Student, typename Teacher>
cudaError_t launch_dense_pair_sums(const DensePairSumsTask<Student, Teacher>& task, cudaStream_t stream);

template <typename Student, typename Teacher>
cudaError_t launch_dense_pair_grad(const DensePairGradTask<Student, Teacher>& task, cudaStream_t stream);

template <typename Logit>
cudaError_t launch_topk_logprobs(const TopkLogprobsTask<Logit>& task, cudaStream_t stream);

template <typename Logit>
cudaError_t launch_gumbel_sample(const GumbelSampleTask<Logit>& task, cudaStream_t stream);

// Any number of copies, in as few launches as their descriptions take.
cudaError_t launch_multi_copy(const CopyTask* tasks, int64_t num_tasks, cudaStream_t stream);

}  // namespace titan_opd
