"""Divergences on a sparse support: the teacher's or the student's most likely tokens, and a treatment of the rest.

Shape suffixes: C rows of a chunk, K candidates a row, O outcomes: the candidates and, with it, the bucket.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from titan_opd.config.objective import Objective
from titan_opd.losses.divergences import divergence_terms, forward_kl_terms, reverse_kl_terms
from titan_opd.losses.rows import (
    RowValues,
    StudentRows,
    masked_logsumexp,
    masked_mean,
    share_of,
    valid_candidates,
    valid_ids,
)
from titan_opd.losses.scores import TeacherScores


@dataclass(frozen=True)
class _Outcomes:
    """Both sides' log-probabilities over the same outcomes; 0 where `present` is False."""

    log_q: Tensor  # [C, O] the teacher
    log_p: Tensor  # [C, O] the student
    present: Tensor  # [C, O] bool

    def sum(self, terms_CO: Tensor) -> Tensor:
        return torch.where(self.present, terms_CO, 0).sum(-1)

    def renormalized(self) -> _Outcomes:
        """Both sides divided by their mass on the outcomes."""
        sides = [
            torch.where(self.present, logprobs - masked_logsumexp(logprobs, self.present)[:, None], 0)
            for logprobs in (self.log_q, self.log_p)
        ]
        return _Outcomes(*sides, self.present)

    def with_bucket(self, log_q_tail_C: Tensor, log_p_tail_C: Tensor, has_tail_C: Tensor) -> _Outcomes:
        """One more outcome: all tokens outside; absent from rows that have none outside."""
        return _Outcomes(
            torch.cat([self.log_q, torch.where(has_tail_C, log_q_tail_C, 0)[:, None]], dim=-1),
            torch.cat([self.log_p, log_p_tail_C[:, None]], dim=-1),
            torch.cat([self.present, has_tail_C[:, None]], dim=-1),
        )

    def detached(self) -> _Outcomes:
        return _Outcomes(self.log_q, self.log_p.detach(), self.present)


class SupportDivergence:
    """A divergence between teacher and student on a top-k support.

    The tail is added as one more outcome (bucket), divided away (renormalize), or ignored (drop). The bucket holds
    exactly the mass outside the support on each side, so by the data-processing inequality an f-divergence with it
    lies between 0 and the dense value.
    """

    def __init__(self, objective: Objective) -> None:
        self.objective = objective

    def candidates(self, scores: TeacherScores) -> Tensor:
        return valid_ids(scores)

    def __call__(self, student: StudentRows, scores: TeacherScores) -> RowValues:
        valid_CK = valid_candidates(scores)
        teacher_CK = torch.where(valid_CK, scores.logprobs, 0)
        support = _Outcomes(
            log_q=teacher_CK.clamp(min=self.objective.min_logprob),
            log_p=torch.where(valid_CK, student.logprobs, 0),
            present=valid_CK,
        )
        log_q_tail_C = self._teacher_tail(support, scores)
        bucketed = support.with_bucket(log_q_tail_C, student.tail_logprobs, student.has_tail)
        match self.objective.tail:
            case "bucket":
                outcomes = bucketed
            case "renormalize":
                outcomes = support.renormalized()
            case "drop":
                outcomes = support
        per_token_C = outcomes.sum(divergence_terms(self.objective, outcomes.log_q, outcomes.log_p))

        metrics = _metrics(support.detached(), bucketed.detached())
        clamped_CK = (teacher_CK < self.objective.min_logprob).to(teacher_CK.dtype)
        metrics["teacher_clamped_share"] = masked_mean(clamped_CK, valid_CK)
        if self.objective.kind == "reverse_kl":
            metrics["teacher_gradient_share"] = _teacher_gradient_share(outcomes.detached())
        if self.objective.support == "teacher_topk":  # elsewhere the teacher's most likely token may be outside
            metrics["top1_agreement"] = _top1_agreement(support.detached(), student.top_logprob)
        return RowValues(per_token_C, metrics)

    def _teacher_tail(self, support: _Outcomes, scores: TeacherScores) -> Tensor:
        """[C] the teacher's log mass outside the support."""
        if scores.tail_logprobs is not None:
            log_tail_C = scores.tail_logprobs
        else:
            mass_C = support.sum(support.log_q.exp())
            log_tail_C = torch.log1p(-mass_C.clamp(max=1))  # rounding can take the sum above 1
        return log_tail_C.clamp(min=self.objective.min_logprob)


def _metrics(support: _Outcomes, bucketed: _Outcomes) -> dict[str, Tensor]:
    """Mass on the support, and entropies and KLs of the bucketed distributions: lower bounds of the dense ones."""
    q_CO, p_CO = bucketed.log_q.exp(), bucketed.log_p.exp()
    return {
        "teacher_support_mass": support.sum(support.log_q.exp()),
        "student_support_mass": support.sum(support.log_p.exp()),
        "teacher_entropy": -bucketed.sum(q_CO * bucketed.log_q),
        "student_entropy": -bucketed.sum(p_CO * bucketed.log_p),
        "forward_kl": bucketed.sum(forward_kl_terms(bucketed.log_q, bucketed.log_p)),
        "reverse_kl": bucketed.sum(reverse_kl_terms(bucketed.log_q, bucketed.log_p)),
    }


def _teacher_gradient_share(outcomes: _Outcomes) -> Tensor:
    """[C] of the reverse KL's gradient in the logits, p_j (log p_j - E log p) - p_j (log q_j - E log q): the second."""
    p_CO = outcomes.log_p.exp()
    mass_C = outcomes.sum(p_CO).clamp(min=torch.finfo(p_CO.dtype).tiny)  # none where all outcomes are beyond reach

    def size(logprobs_CO: Tensor) -> Tensor:
        mean_C = outcomes.sum(p_CO * logprobs_CO) / mass_C
        return outcomes.sum(p_CO * (logprobs_CO - mean_C[:, None]).abs())

    return share_of(size(outcomes.log_q), size(outcomes.log_p))


def _top1_agreement(support: _Outcomes, top_logprob_C: Tensor) -> Tensor:
    """[C] 1 where the support's most likely token of the teacher is the student's most likely token of all."""
    teacher_top_C1 = torch.where(support.present, support.log_q, -torch.inf).argmax(-1, keepdim=True)
    return (support.log_p.gather(1, teacher_top_C1).squeeze(1) >= top_logprob_C).to(support.log_p.dtype)
