"""What has to be known of many rows before the gradients of the first: passes over the logits without gradients.

An optimizer step of several micro-batches, on several processes, sweeps them all before it takes gradients.

Shape suffixes: N rows, C rows of a chunk, K samples a row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from titan_opd.config.objective import Objective
from titan_opd.losses.candidate_route import logits_below_max, student_rows
from titan_opd.losses.head import HeadInputs
from titan_opd.losses.inputs import HeadOptions, build_inputs
from titan_opd.losses.policy import PolicyGradient, m2po_bound
from titan_opd.losses.rows import StudentRows
from titan_opd.losses.scores import TeacherScores

if TYPE_CHECKING:
    from typing_extensions import Unpack


def policy_logprobs(
    hidden: Tensor,
    lm_head_weight: Tensor,
    objective: Objective,
    scores: TeacherScores,
    token_weights: Tensor,
    **options: Unpack[HeadOptions],
) -> Tensor:
    """The present student's log-probabilities of `scores.ids`: `proximal_logprobs` for the optimizer steps to come.

    Arguments as in `distillation_loss`, for an objective of kind policy_gradient.

    Returns:
        [N, K], of the distribution really sampled from (renormalised on `scores.behavior_support`); 0 for rows of
        weight 0 and for padding.
    """
    needs = Objective(
        "policy_gradient", support=objective.support, temperature=objective.temperature, correction="none"
    )  # of the scores no more than their ids
    inputs, _ = build_inputs(hidden, lm_head_weight, needs, scores, token_weights, **options)
    loss = PolicyGradient(needs)
    active_NK = _sweep(inputs, loss, loss.policy_logprobs)
    return active_NK.new_zeros(scores.ids.shape).index_copy(0, inputs.row_numbers, active_NK)


def binding_squares(
    hidden: Tensor,
    lm_head_weight: Tensor,
    objective: Objective,
    scores: TeacherScores,
    token_weights: Tensor,
    **options: Unpack[HeadOptions],
) -> Tensor:
    """The squared log-ratios of those samples whose clip would bind, for `m2po_bound` of a whole optimizer step.

    Arguments as in `distillation_loss`, for an objective with the correction m2po.

    Returns:
        One number for each such sample in the rows of non-zero weight.
    """
    undiscounted = replace(objective, staleness_discount=1.0)  # it weights rows, and says nothing about the bound
    inputs, _ = build_inputs(hidden, lm_head_weight, undiscounted, scores, token_weights, **options)
    squares_NK = _binding_squares(inputs, objective)
    return squares_NK[squares_NK.isfinite()]


def call_bound(inputs: HeadInputs, objective: Objective) -> Tensor:
    """M2PO's bound where one call is the whole optimizer step."""
    return m2po_bound(_binding_squares(inputs, objective), objective.m2_budget)


def _binding_squares(inputs: HeadInputs, objective: Objective) -> Tensor:
    loss = PolicyGradient(objective)
    return _sweep(inputs, loss, loss.binding_squares)


@torch.no_grad()
def _sweep(inputs: HeadInputs, loss: PolicyGradient, read: Callable[[StudentRows, TeacherScores], Tensor]) -> Tensor:
    """[N, K] what `read` makes of all rows, chunk by chunk: one product."""
    values = []
    for rows, logits_CV in inputs.logits():
        scores = inputs.scores[rows]
        stats = inputs.shard.stats(logits_CV, loss.candidates(scores))
        values.append(read(student_rows(stats, *logits_below_max(stats)), scores))
    return torch.cat(values)
