"""Hybrid policy distillation (HPD, arXiv 2604.20244): the expert's token and the student's own at the same prefix.

Shape suffixes: C rows of a chunk, 2 tokens a row: the expert's, then the student's sample.
"""

from __future__ import annotations

import torch
from torch import Tensor

from titan_opd.config.objective import Objective
from titan_opd.losses.rows import RowValues, StudentRows, share_of
from titan_opd.losses.scores import TeacherScores


class Hybrid:
    """-w* log p(a*) - w log p(a), with weights from both sides' probabilities of the two tokens."""

    def __init__(self, objective: Objective) -> None:
        self.objective = objective

    def candidates(self, scores: TeacherScores) -> Tensor:
        return scores.ids

    def __call__(self, student: StudentRows, scores: TeacherScores) -> RowValues:
        log_p_C2 = student.logprobs
        log_q_C2 = scores.logprobs.clamp(min=self.objective.min_logprob)
        weights_C2 = hybrid_weights(log_q_C2, log_p_C2.detach(), scores.ids[:, 0] == scores.ids[:, 1])
        clamped_C2 = (scores.logprobs < self.objective.min_logprob).to(log_q_C2.dtype)
        log_ratio_C2 = log_q_C2 - log_p_C2.detach()
        # A weight is p log q and what q(a*) adds to it, the teacher's, less p log p, the student's.
        acts_C2 = weights_C2 != 0
        own_part_C2 = torch.where(acts_C2, log_p_C2.detach().exp() * -log_p_C2.detach(), 0)
        teacher_part_C2 = torch.where(acts_C2, (weights_C2 - own_part_C2).abs(), 0)
        metrics = {
            "expert_weight": weights_C2[:, 0],
            "own_weight": weights_C2[:, 1],
            "expert_log_ratio": log_ratio_C2[:, 0],
            "own_log_ratio": log_ratio_C2[:, 1],
            "teacher_gradient_share": share_of(teacher_part_C2.sum(-1), own_part_C2.sum(-1)),
            "teacher_clamped_share": clamped_C2.mean(-1),
        }
        return RowValues(-(weights_C2 * log_p_C2).sum(-1), metrics)


def hybrid_weights(log_q_C2: Tensor, log_p_C2: Tensor, same_C: Tensor) -> Tensor:
    """[C, 2] the weights w* and w of the expert's token a* and the student's sample a.

    With k(x) = p(x) (log q(x) - log p(x)), which is positive where the teacher wants more of x: w* = q(a*) + k(a*)
    where k(a*) > 0, with another q(a*) if k(a) < 0 too, else k(a*); w = k(a) where k(a) < 0 and the tokens differ,
    else 0.
    """
    gain_expert_C, gain_own_C = (log_p_C2.exp() * (log_q_C2 - log_p_C2)).unbind(-1)
    q_expert_C = log_q_C2[:, 0].exp()
    bonus_C = torch.where(gain_own_C < 0, 2 * q_expert_C, q_expert_C)
    expert_C = gain_expert_C + torch.where(gain_expert_C > 0, bonus_C, 0)
    own_C = torch.where(same_C, 0, gain_own_C.clamp(max=0))
    return torch.stack([expert_C, own_C], dim=-1)
