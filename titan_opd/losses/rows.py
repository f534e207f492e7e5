"""What passes between the loss head and an objective's mathematics: rows of candidates.

A row is one response token. Every sparse or sampled objective needs only the student's log-probabilities of a few
candidate tokens and of everything outside them (the tail); the head computes these and differentiates what comes back.

Shape suffixes: C rows of a chunk, K candidates a row.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from titan_opd.losses.scores import TeacherScores

NO_TOKEN = -1  # the id that pads a row of candidates; nobody's
_NO_MASS = -1e30  # stands for log 0 where an infinity would make gradients NaN


@dataclass(frozen=True)
class StudentRows:
    """The current student on the candidates of C rows, at the objective's temperature, natural logarithms.

    Attributes:
        logprobs: [C, K], of each candidate; meaningless, but finite, where the candidate is padding.
        tail_logprobs: [C], of all tokens outside the candidates together; 0 where there is none.
        has_tail: [C] bool, whether any token is outside the candidates.
        top_logprob: [C], of the most likely token of the whole vocabulary, without gradient.
    """

    logprobs: Tensor
    tail_logprobs: Tensor
    has_tail: Tensor
    top_logprob: Tensor


@dataclass(frozen=True)
class RowValues:
    """An objective's value and metrics of each row.

    Attributes:
        per_token: [C], differentiable in the student's log-probabilities.
        metrics: [C] each, without gradient; averaged over rows, or the largest taken where the name ends in "_max".
    """

    per_token: Tensor
    metrics: dict[str, Tensor] = field(default_factory=dict)


class RowLoss(Protocol):
    """The mathematics of one objective, given a row's candidates."""

    def candidates(self, scores: TeacherScores) -> Tensor:
        """[C, K] the tokens whose student log-probabilities the loss needs, padded with NO_TOKEN."""
        ...

    def __call__(self, student: StudentRows, scores: TeacherScores) -> RowValues:
        """The rows' values, from the student on exactly these candidates."""
        ...


def valid_candidates(scores: TeacherScores) -> Tensor:
    """[C, K] bool, which of the scores' ids are not padding."""
    if scores.valid is not None:
        return scores.valid
    return torch.ones_like(scores.ids, dtype=torch.bool)


def valid_ids(scores: TeacherScores) -> Tensor:
    """[C, K] the scores' ids, NO_TOKEN in the padding."""
    return scores.ids if scores.valid is None else torch.where(scores.valid, scores.ids, NO_TOKEN)


def masked_mean(values_CK: Tensor, valid_CK: Tensor) -> Tensor:
    """[C] the mean over the valid columns; 0 for a row that has none."""
    count_C = valid_CK.sum(-1).clamp(min=1)
    return torch.where(valid_CK, values_CK, 0).sum(-1) / count_C


def share_of(part: Tensor, rest: Tensor) -> Tensor:
    """part / (part + rest) of non-negative numbers; 0 where both are 0."""
    return part / (part + rest).clamp(min=torch.finfo(part.dtype).tiny)


def masked_logsumexp(values_CK: Tensor, valid_CK: Tensor) -> Tensor:
    """[C] log-sum-exp over the valid columns; very negative, with finite gradients, for a row that has none."""
    return torch.where(valid_CK, values_CK, _NO_MASS).logsumexp(-1)
