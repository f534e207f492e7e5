// The operators' schemas, once for the library `titan_opd` (module _C) and its emulated twin `titan_opd_emu` (_EMU).
//
// The implementations stand beside their kernels; the fake (meta) implementations that torch.compile needs are in
// titan_opd/ops, where shapes are easier to read. Shapes: R rows, V columns of a vocabulary shard, K ids a row.
//
// `isa` forces a CPU kernel ("portable", "avx2", "avx512") for tests and benchmarks; None takes the best. On other
// devices it must be None.
#pragma once

namespace titan_opd {

template <typename Library>
void define_operators(Library& library) {
  // titan_opd/ops/gather_stats.py
  library.def(
      "gather_stats(Tensor logits, Tensor ids, int vocab_start=0, int? vocab_size=None,"
      " Tensor? inverse_temperature=None, str? isa=None)"
      " -> (Tensor max, Tensor sum_exp, Tensor tail_max, Tensor tail_sum_exp, Tensor candidates)");
  // titan_opd/ops/sparse_softmax_grad.py
  library.def(
      "sparse_softmax_grad_(Tensor(a!) logits, Tensor ids, Tensor g, Tensor lse, Tensor tail_lse, Tensor g_lse,"
      " Tensor g_tail, int vocab_start=0, int? vocab_size=None, Tensor? inverse_temperature=None, str? isa=None)"
      " -> ()");
  // titan_opd/ops/dense_pair.py
  library.def(
      "dense_pair_sums(Tensor student, Tensor teacher, Tensor student_max, Tensor student_sum_exp, Tensor teacher_max,"
      " Tensor teacher_sum_exp, float min_logprob, float? beta=None, int vocab_start=0, int? vocab_size=None,"
      " str? isa=None) -> Tensor");
  library.def(
      "dense_pair_grad_(Tensor(a!) student, Tensor teacher, Tensor student_max, Tensor student_sum_exp,"
      " Tensor teacher_max, Tensor teacher_sum_exp, Tensor offsets, Tensor coefficients, float forward_weight,"
      " float reverse_weight, float jsd_weight, float beta, float min_logprob, int vocab_start=0,"
      " int? vocab_size=None, str? isa=None) -> ()");
  // titan_opd/ops/multi_copy.py
  library.def("multi_copy(Tensor[] sources, Tensor(a!)[] destinations, str? isa=None) -> ()");
  // titan_opd/ops/topk_logprobs.py
  library.def(
      "topk_logprobs(Tensor logits, int k, int vocab_start=0, int? vocab_size=None, Tensor? inverse_temperature=None,"
      " str? isa=None)"
      " -> (Tensor ids, Tensor values, Tensor max, Tensor sum_exp, Tensor tail_max, Tensor tail_sum_exp)");
  // titan_opd/ops/gumbel_sample.py
  library.def(
      "gumbel_sample(Tensor logits, Tensor keys, int num_samples, int vocab_start=0, int? vocab_size=None,"
      " Tensor? inverse_temperature=None, str? isa=None) -> (Tensor ids, Tensor scores, Tensor values)");
}

}  // namespace titan_opd
