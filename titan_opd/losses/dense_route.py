"""The dense route: divergences over the whole vocabulary, the teacher's logits computed beside the student's.

The KLs and the Jensen-Shannon divergence are one read of both sides' logits and one that writes the gradient, beside
each side's softmax statistics; the other divergences go the elementwise route.

Shape suffixes: C rows of a chunk, V columns of this rank's shard.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from titan_opd.config.objective import Objective
from titan_opd.losses.elementwise_route import ElementwiseRoute
from titan_opd.losses.head import HeadInputs, Route
from titan_opd.losses.rows import RowValues
from titan_opd.losses.teacher_logits import TeacherLogits
from titan_opd.losses.vocab_parallel import VocabShard
from titan_opd.ops import DensePairSums, RowStats, dense_pair_grad_, dense_pair_sums


@dataclass(frozen=True)
class PairWeights:
    """A divergence as a sum of those that the operators know, beta being the teacher's share of the mixture."""

    forward_kl: float = 0.0
    reverse_kl: float = 0.0
    jsd: float = 0.0
    beta: float = 0.5

    @classmethod
    def of(cls, objective: Objective) -> PairWeights | None:
        """None for a divergence that is no such sum."""
        match objective.kind:
            case "forward_kl":
                return cls(forward_kl=1.0)
            case "reverse_kl":
                return cls(reverse_kl=1.0)
            case "mixed_kl":
                return cls(forward_kl=objective.alpha, reverse_kl=1 - objective.alpha)
            case "jsd":
                return cls(jsd=1.0, beta=objective.beta)
        return None

    def value(self, sums: DensePairSums) -> Tensor:
        """[C] the divergence. Terms of weight 0 stay out: they may be infinite."""
        terms = (
            (self.forward_kl, sums.forward_kl),
            (self.reverse_kl, sums.reverse_kl),
            (self.jsd * self.beta, sums.teacher_to_mixture),
            (self.jsd * (1 - self.beta), sums.student_to_mixture),
        )
        return sum((weight * sum_C for weight, sum_C in terms if weight != 0), torch.zeros_like(sums.forward_kl))


def dense_route(objective: Objective, teacher: TeacherLogits) -> Route:
    """The fastest route of a divergence over the whole vocabulary."""
    weights = PairWeights.of(objective)
    if weights is None:
        return ElementwiseRoute(objective, teacher)
    return PairRoute(weights, objective.min_logprob, teacher)


class PairRoute:
    """Reads both sides' logits for a divergence's value, and again for its gradient."""

    def __init__(self, weights: PairWeights, min_logprob: float, teacher: TeacherLogits) -> None:
        self._weights = weights
        self._min_logprob = min_logprob
        self._teacher = teacher

    def __call__(self, inputs: HeadInputs, rows: slice, logits_CV: Tensor, *, write_gradient: bool) -> RowValues:
        shard, weights, dtype = inputs.shard, self._weights, inputs.coefficients.dtype
        teacher_CV = self._teacher.chunk(rows)
        pair = (
            logits_CV,
            teacher_CV,
            _stats(logits_CV, shard, dtype),
            _stats(teacher_CV, self._teacher.shard, dtype),
        )
        tokens = {"min_logprob": self._min_logprob, "vocab_start": shard.start, "vocab_size": shard.vocab_size}
        local = dense_pair_sums(*pair, beta=weights.beta if weights.jsd else None, **tokens)
        sums = local if shard.group is None else DensePairSums(*shard.sum_over_shards(torch.stack(local)))
        if write_gradient:
            dense_pair_grad_(
                *pair,
                sums,
                inputs.coefficients[rows],
                forward_weight=weights.forward_kl,
                reverse_weight=weights.reverse_kl,
                jsd_weight=weights.jsd,
                beta=weights.beta,
                **tokens,
            )
        metrics = {
            "teacher_entropy": sums.teacher_entropy,
            "student_entropy": sums.student_entropy,
            "forward_kl": sums.forward_kl,
            "reverse_kl": sums.reverse_kl,
            "teacher_clamped_share": sums.num_clamped / shard.vocab_size,
            "top1_agreement": sums.top1_agreement.clamp(max=1),  # equally likely tokens may be on several ranks
        }
        return RowValues(weights.value(sums), metrics)


def _stats(logits_CV: Tensor, shard: VocabShard, dtype: torch.dtype) -> RowStats:
    """In one dtype for both sides, whose products may differ in theirs."""
    no_ids = torch.empty(len(logits_CV), 0, dtype=torch.int64, device=logits_CV.device)
    return RowStats(*(field.to(dtype) for field in shard.stats(logits_CV, no_ids)))
