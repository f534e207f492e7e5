"""The route of sparse and sampled objectives: only a row's candidates and the mass around them matter.

Shape suffixes: N rows, C rows of a chunk, V columns of this rank's shard, K candidates a row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from titan_opd.losses.head import HeadInputs
from titan_opd.losses.logit_gradient import Partials, write_logit_gradient
from titan_opd.losses.rows import RowLoss, RowValues, StudentRows
from titan_opd.losses.scores import TeacherScores
from titan_opd.ops import RowStats


class CandidateRoute:
    """Reads each row of logits once, differentiates the loss on [C, K] numbers, writes the logits' gradient once."""

    def __init__(self, row_loss: RowLoss) -> None:
        self.row_loss = row_loss

    def __call__(self, inputs: HeadInputs, rows: slice, logits_CV: Tensor, *, write_gradient: bool) -> RowValues:
        return self.evaluate(inputs, rows, logits_CV, inputs.scores[rows], write_gradient=write_gradient)

    def evaluate(
        self, inputs: HeadInputs, rows: slice, logits_CV: Tensor, scores: TeacherScores, *, write_gradient: bool
    ) -> RowValues:
        """The rows' values under given scores of theirs."""
        ids_CK = self.row_loss.candidates(scores)
        stats = inputs.shard.stats(logits_CV, ids_CK)
        if not write_gradient:
            return self.row_loss(student_rows(stats, *logits_below_max(stats)), scores)
        values, partials = _differentiate(self.row_loss, stats, scores, inputs.coefficients[rows])
        write_logit_gradient(logits_CV, ids_CK, stats, partials, inputs.shard)
        return values


def logits_below_max(stats: RowStats) -> tuple[Tensor, Tensor, Tensor]:
    """The candidates' logits [C, K], L [C] and t [C], all less the row's largest logit.

    Only so are the log-probabilities of a peaked row exact in float32: L itself is rounded to the spacing of numbers of
    its size. Where nothing is outside the candidates t, -inf, is replaced before it can enter a graph.
    """
    has_tail_C = stats.tail_sum_exp > 0
    tail_C = torch.where(has_tail_C, stats.tail_max - stats.max + stats.tail_sum_exp.log(), 0)
    return stats.candidates - stats.max[:, None], stats.sum_exp.log(), tail_C


def student_rows(stats: RowStats, candidates_CK: Tensor, lse_C: Tensor, tail_C: Tensor) -> StudentRows:
    """Log-probabilities from logits less the row's largest, in which they are differentiable."""
    has_tail_C = stats.tail_sum_exp > 0
    return StudentRows(
        logprobs=candidates_CK - lse_C[:, None],
        tail_logprobs=torch.where(has_tail_C, tail_C - lse_C, 0),
        has_tail=has_tail_C,
        top_logprob=-lse_C.detach(),
    )


def _differentiate(
    row_loss: RowLoss, stats: RowStats, scores: TeacherScores, coefficients_C: Tensor
) -> tuple[RowValues, Partials]:
    with torch.enable_grad():
        leaves = [leaf.requires_grad_() for leaf in logits_below_max(stats)]
        values = row_loss(student_rows(stats, *leaves), scores)
        total = (coefficients_C * values.per_token).sum()
        candidates_CK, lse_C, tail_C = torch.autograd.grad(total, leaves, allow_unused=True)
    zeros_C = torch.zeros_like(stats.max)
    return values, Partials(candidates_CK, zeros_C if lse_C is None else lse_C, tail_C)
