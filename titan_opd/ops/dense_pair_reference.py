"""dense_pair_sums and dense_pair_grad_ in plain PyTorch: their definition, and the code for what no kernel covers.

Shape suffixes: R rows, V columns of this shard, S sums a row.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from titan_opd.ops.row_stats import RowStats


def dense_pair_sums_reference(
    student_RV: Tensor,
    teacher_RV: Tensor,
    student_stats: RowStats,
    teacher_stats: RowStats,
    *,
    min_logprob: float,
    beta: float | None = None,
    vocab_start: int = 0,
    vocab_size: int | None = None,
) -> Tensor:
    """[S, R], the fields of `DensePairSums` in order, with several copies of both sides' logits."""
    num_columns = _num_tokens(student_RV, vocab_start, vocab_size)
    student_RV, teacher_RV = student_RV[:, :num_columns], teacher_RV[:, :num_columns]
    log_p_RV = _log_softmax(student_RV, student_stats)
    unclamped_RV = _log_softmax(teacher_RV, teacher_stats)
    log_q_RV = unclamped_RV.clamp(min=min_logprob)
    p_RV, q_RV = log_p_RV.exp(), log_q_RV.exp()
    tops_RV = _is_top(student_RV, student_stats) & _is_top(teacher_RV, teacher_stats)
    none_R = torch.zeros_like(student_stats.max)
    to_mixture = (none_R, none_R)
    if beta is not None:
        log_m_RV = _log_mixture(log_q_RV, log_p_RV, beta)
        to_mixture = (_expectation(q_RV, log_q_RV - log_m_RV), _expectation(p_RV, log_p_RV - log_m_RV))
    return torch.stack(
        [
            q_RV.sum(-1),
            -_expectation(q_RV, log_q_RV),
            -_expectation(p_RV, log_p_RV),
            _expectation(q_RV, log_q_RV - log_p_RV),
            _expectation(p_RV, log_p_RV - log_q_RV),
            *to_mixture,
            (unclamped_RV < min_logprob).sum(-1).to(p_RV.dtype),
            tops_RV.any(-1).to(p_RV.dtype),
        ]
    )


def dense_pair_grad_reference_(
    student_RV: Tensor,
    teacher_RV: Tensor,
    student_stats: RowStats,
    teacher_stats: RowStats,
    offsets_R: Tensor,
    coefficients_R: Tensor,
    *,
    forward_weight: float,
    reverse_weight: float,
    jsd_weight: float,
    beta: float,
    min_logprob: float,
    vocab_start: int = 0,
    vocab_size: int | None = None,
) -> Tensor:
    """`titan_opd.ops.dense_pair_grad_` for any device and floating dtype; `offsets_R` is the sum of the slopes."""
    num_columns = _num_tokens(student_RV, vocab_start, vocab_size)
    log_p_RV = _log_softmax(student_RV[:, :num_columns], student_stats)
    log_q_RV = _log_softmax(teacher_RV[:, :num_columns], teacher_stats).clamp(min=min_logprob)
    p_RV = log_p_RV.exp()
    slopes_RV = reverse_weight * (log_p_RV - log_q_RV) - offsets_R[:, None]
    if jsd_weight != 0:
        slopes_RV += jsd_weight * (1 - beta) * (log_p_RV - _log_mixture(log_q_RV, log_p_RV, beta))
    grad_RV = torch.where(p_RV == 0, 0.0, p_RV * slopes_RV) - forward_weight * log_q_RV.exp()
    student_RV[:, :num_columns] = coefficients_R[:, None] * grad_RV
    student_RV[:, num_columns:] = 0
    return student_RV


def _num_tokens(logits_RV: Tensor, vocab_start: int, vocab_size: int | None) -> int:
    num_columns = logits_RV.shape[1]
    return num_columns if vocab_size is None else min(max(vocab_size - vocab_start, 0), num_columns)


def _log_softmax(logits_RV: Tensor, stats: RowStats) -> Tensor:
    return logits_RV.to(stats.max.dtype) - stats.max[:, None] - stats.sum_exp.log()[:, None]


def _is_top(logits_RV: Tensor, stats: RowStats) -> Tensor:
    return logits_RV.to(stats.max.dtype) == stats.max[:, None]


def _log_mixture(log_q_RV: Tensor, log_p_RV: Tensor, beta: float) -> Tensor:
    return torch.logaddexp(log_q_RV + math.log(beta), log_p_RV + math.log1p(-beta))


def _expectation(weights_RV: Tensor, values_RV: Tensor) -> Tensor:
    """[R] sum of weights times values, where a weight of 0 makes 0 of any value."""
    return torch.where(weights_RV == 0, 0.0, weights_RV * values_RV).sum(-1)
