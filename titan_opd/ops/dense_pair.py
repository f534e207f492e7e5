"""Divergences between a student and a teacher over the whole vocabulary, without a pass of its own for each term.

With z and u the logits of both sides, p = softmax(z), the teacher's log-probabilities clamped from below, log q =
max(log softmax(u), min_logprob), and the mixture m = beta q + (1 - beta) p, one read of both gives

    sum q,  -sum q log q,  -sum p log p,  sum q log q/p,  sum p log p/q,  sum q log q/m,  sum p log p/m

and a second writes over z the gradient of any

    forward_weight sum q log q/p + reverse_weight sum p log p/q
        + jsd_weight (beta sum q log q/m + (1 - beta) sum p log p/m),

the forward and reverse KL and the generalised Jensen-Shannon divergence (GKD, arXiv 2306.13649, section 3). A term f_j
with slope s_j = d f_j / d log p_j has the gradient s_j - p_j sum_i s_i in logit j. The slopes are

    -q_j,    p_j (log p_j/q_j + 1),    (1 - beta) p_j log p_j/m_j,

the last because the mixture's own change, -(beta q_j + (1 - beta) p_j) (1 - beta) p_j / m_j, cancels with that of p_j.
Their sums are among the sums above, but for the 1, which cancels because sum p = 1. q need not sum to one: its sum is
kept.

Shape suffixes: R rows, V columns of this shard.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from titan_opd.ops.arguments import check_device, check_logits, check_row_values, check_separate_rows, check_shard
from titan_opd.ops.dense_pair_reference import dense_pair_grad_reference_, dense_pair_sums_reference
from titan_opd.ops.extension import has_kernel
from titan_opd.ops.no_derivative import refuse_to_differentiate, register_without_derivative
from titan_opd.ops.row_stats import RowStats

_NO_DERIVATIVE = {
    "dense_pair_sums": "dense_pair_grad_ writes the gradient of a divergence",
    "dense_pair_grad_": "it overwrites the student's logits with a gradient",
}


class DensePairSums(NamedTuple):
    """Sums of each row over a shard's tokens, [R] each; those of all shards add up to the vocabulary's.

    Attributes:
        teacher_mass: sum q, which clamping raises above 1.
        teacher_entropy: -sum q log q.
        student_entropy: -sum p log p.
        forward_kl: sum q log q/p; infinite where the student gives no mass to a token of the teacher's.
        reverse_kl: sum p log p/q.
        teacher_to_mixture: sum q log q/m; 0 when beta was None.
        student_to_mixture: sum p log p/m; 0 when beta was None.
        num_clamped: tokens whose teacher's log-probability is below min_logprob.
        top1_agreement: 1 where one of these tokens is the most likely one of both sides, else 0.
    """

    teacher_mass: Tensor
    teacher_entropy: Tensor
    student_entropy: Tensor
    forward_kl: Tensor
    reverse_kl: Tensor
    teacher_to_mixture: Tensor
    student_to_mixture: Tensor
    num_clamped: Tensor
    top1_agreement: Tensor


def dense_pair_sums(
    student_RV: Tensor,
    teacher_RV: Tensor,
    student_stats: RowStats,
    teacher_stats: RowStats,
    *,
    min_logprob: float,
    beta: float | None = None,
    vocab_start: int = 0,
    vocab_size: int | None = None,
) -> DensePairSums:
    """The sums over tokens that the divergences of two distributions and their gradients are made of.

    A token without mass adds nothing: 0 log 0 = 0. Natural logarithms. No derivative: `dense_pair_grad_` is it.

    Args:
        student_RV: [R, V] floating, columns vocab_start .. vocab_start + V of the vocabulary, adjacent in memory; rows
            may have any stride.
        teacher_RV: the same tokens' logits from the other side, of any of the dtypes of logits; padding may differ.
        student_stats: `max` and `sum_exp` of these rows over the whole vocabulary, on all shards.
        teacher_stats: the teacher's.
        min_logprob: the teacher's log-probabilities are clamped below at this; at most 0.
        beta: the teacher's share of the mixture, above 0 and below 1; None: the sums over the mixture are not wanted.
        vocab_start: global id of the first column.
        vocab_size: columns whose global id is at or above it are padding and count nowhere; None: all count.

    Raises:
        ValueError: an argument has the wrong shape, dtype, device or range.
        RuntimeError: autograd would have to differentiate this.
    """
    _check_pair(student_RV, teacher_RV, student_stats, teacher_stats, min_logprob, vocab_start, vocab_size)
    if beta is not None:
        _check_beta(beta)
    if not has_kernel(student_RV) or not has_kernel(teacher_RV):
        refuse_to_differentiate("dense_pair_sums", _NO_DERIVATIVE["dense_pair_sums"], student_RV, teacher_RV)
        return DensePairSums(
            *dense_pair_sums_reference(
                student_RV,
                teacher_RV,
                student_stats,
                teacher_stats,
                min_logprob=min_logprob,
                beta=beta,
                vocab_start=vocab_start,
                vocab_size=vocab_size,
            )
        )
    sums_SR = torch.ops.titan_opd.dense_pair_sums(
        student_RV,
        teacher_RV,
        *_contiguous(student_stats),
        *_contiguous(teacher_stats),
        min_logprob,
        beta,
        vocab_start,
        vocab_size,
    )
    return DensePairSums(*sums_SR.unbind(0))


def dense_pair_grad_(
    student_RV: Tensor,
    teacher_RV: Tensor,
    student_stats: RowStats,
    teacher_stats: RowStats,
    sums: DensePairSums,
    coefficients_R: Tensor,
    *,
    forward_weight: float = 0.0,
    reverse_weight: float = 0.0,
    jsd_weight: float = 0.0,
    beta: float = 0.5,
    min_logprob: float,
    vocab_start: int = 0,
    vocab_size: int | None = None,
) -> Tensor:
    """Replace the student's logits by the gradient in them of a combination of divergences, rounded once.

    Args:
        student_RV: as for `dense_pair_sums`; rows that do not overlap. Overwritten; columns of padding become 0.
        teacher_RV: as there.
        student_stats: as there.
        teacher_stats: as there.
        sums: of these rows, over the whole vocabulary on all shards; with the mixture if jsd_weight is not 0.
        coefficients_R: [R] float32 (float64 for float64 logits), what each row's gradient is multiplied by.
        forward_weight: of KL(q ‖ p).
        reverse_weight: of KL(p ‖ q).
        jsd_weight: of the generalised Jensen-Shannon divergence.
        beta: the teacher's share of its mixture.
        min_logprob: as for the sums.
        vocab_start: as there.
        vocab_size: as there.

    Returns:
        `student_RV`, which now is the gradient.

    Raises:
        ValueError: an argument has the wrong shape, dtype, device or range.
        RuntimeError: autograd would have to differentiate this.
    """
    _check_pair(student_RV, teacher_RV, student_stats, teacher_stats, min_logprob, vocab_start, vocab_size)
    check_separate_rows(student_RV, "student")
    _check_beta(beta)
    check_row_values(coefficients_R, [len(student_RV)], student_RV, "coefficients")
    for name in ("teacher_mass", "reverse_kl", "student_to_mixture"):
        check_row_values(getattr(sums, name), [len(student_RV)], student_RV, f"sums.{name}")
    # Terms of weight 0 stay out: their sums may be infinite.
    slope_sums = (
        (-forward_weight, sums.teacher_mass),
        (reverse_weight, sums.reverse_kl),
        (jsd_weight * (1 - beta), sums.student_to_mixture),
    )
    offsets_R = torch.zeros_like(coefficients_R)
    for weight, sum_R in slope_sums:
        if weight != 0:
            offsets_R = offsets_R + weight * sum_R
    weights = {"forward_weight": forward_weight, "reverse_weight": reverse_weight, "jsd_weight": jsd_weight}
    if not has_kernel(student_RV) or not has_kernel(teacher_RV):
        refuse_to_differentiate("dense_pair_grad_", _NO_DERIVATIVE["dense_pair_grad_"], student_RV, teacher_RV)
        return dense_pair_grad_reference_(
            student_RV,
            teacher_RV,
            student_stats,
            teacher_stats,
            offsets_R,
            coefficients_R,
            **weights,
            beta=beta,
            min_logprob=min_logprob,
            vocab_start=vocab_start,
            vocab_size=vocab_size,
        )
    torch.ops.titan_opd.dense_pair_grad_(
        student_RV,
        teacher_RV,
        *_contiguous(student_stats),
        *_contiguous(teacher_stats),
        offsets_R.contiguous(),
        coefficients_R.contiguous(),
        *weights.values(),
        beta,
        min_logprob,
        vocab_start,
        vocab_size,
    )
    return student_RV


def _check_pair(
    student_RV: Tensor,
    teacher_RV: Tensor,
    student_stats: RowStats,
    teacher_stats: RowStats,
    min_logprob: float,
    vocab_start: int,
    vocab_size: int | None,
) -> None:
    check_logits(student_RV, "student")
    check_logits(teacher_RV, "teacher")
    check_shard(vocab_start, vocab_size)
    check_device(teacher_RV, student_RV, "teacher")
    num_rows, num_columns = student_RV.shape
    if vocab_size is not None:
        num_columns = min(max(vocab_size - vocab_start, 0), num_columns)
    if teacher_RV.shape[0] != num_rows or teacher_RV.shape[1] < num_columns:
        raise ValueError(
            f"teacher must have student's {num_rows} rows and a column for each of its {num_columns} tokens, got "
            f"{list(teacher_RV.shape)}"
        )
    for side, stats in (("student", student_stats), ("teacher", teacher_stats)):
        check_row_values(stats.max, [num_rows], student_RV, f"{side}_stats.max")
        check_row_values(stats.sum_exp, [num_rows], student_RV, f"{side}_stats.sum_exp")
    if not min_logprob <= 0:
        raise ValueError(f"min_logprob must be at most 0, got {min_logprob}")


def _check_beta(beta: float) -> None:
    if not 0 < beta < 1 or math.isnan(beta):
        raise ValueError(f"beta must be above 0 and below 1, got {beta}")


def _contiguous(stats: RowStats) -> tuple[Tensor, Tensor]:
    return stats.max.contiguous(), stats.sum_exp.contiguous()


@torch.library.register_fake("titan_opd::dense_pair_sums")
def _dense_pair_sums_fake(student_RV: Tensor, *_: Any, **__: Any) -> Tensor:
    return student_RV.new_empty([len(DensePairSums._fields), student_RV.shape[0]], dtype=torch.float32)


@torch.library.register_fake("titan_opd::dense_pair_grad_")
def _dense_pair_grad_fake(*_: Any, **__: Any) -> None:
    return None


for _name, _reason in _NO_DERIVATIVE.items():
    register_without_derivative(_name, _reason)
