"""Objectives that average log-probabilities of given tokens: labels, or samples of the teacher.

Shape suffixes: C rows of a chunk, K samples a row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from titan_opd.config.objective import Objective
from titan_opd.losses.rows import RowValues, StudentRows, masked_mean, valid_candidates, valid_ids
from titan_opd.losses.scores import TeacherScores


class CrossEntropy:
    """-log p(label): supervised fine-tuning, and sequence-level distillation when the labels are the teacher's text."""

    def candidates(self, scores: TeacherScores) -> Tensor:
        return scores.labels[:, None]

    def __call__(self, student: StudentRows, scores: TeacherScores) -> RowValues:
        log_p_C = student.logprobs.squeeze(1)
        is_top_C = log_p_C.detach() >= student.top_logprob
        return RowValues(-log_p_C, {"top1_agreement": is_top_C.to(log_p_C.dtype)})


class MonteCarloForwardKL:
    """The mean of log q(a) - log p(a) over samples a of the teacher: unbiased for the forward KL."""

    def __init__(self, objective: Objective) -> None:
        self.objective = objective

    def candidates(self, scores: TeacherScores) -> Tensor:
        return valid_ids(scores)

    def __call__(self, student: StudentRows, scores: TeacherScores) -> RowValues:
        valid_CK = valid_candidates(scores)
        teacher_CK = torch.where(valid_CK, scores.logprobs, 0)
        log_q_CK = teacher_CK.clamp(min=self.objective.min_logprob)
        per_token_C = masked_mean(log_q_CK - student.logprobs, valid_CK)
        clamped_CK = (teacher_CK < self.objective.min_logprob).to(log_q_CK.dtype)
        metrics = {
            "forward_kl": per_token_C.detach(),
            "teacher_entropy": -masked_mean(log_q_CK, valid_CK),
            "teacher_clamped_share": masked_mean(clamped_CK, valid_CK),
        }
        return RowValues(per_token_C, metrics)
