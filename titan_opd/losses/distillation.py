"""`distillation_loss`: every objective behind one call.

Shape suffixes: N rows (response tokens), V vocabulary (or this rank's shard of it), H hidden.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from titan_opd.config.objective import Objective
from titan_opd.losses.candidate_route import CandidateRoute
from titan_opd.losses.dense_route import dense_route
from titan_opd.losses.head import HeadInputs, HeadOutput, Route, run_head
from titan_opd.losses.hybrid import Hybrid
from titan_opd.losses.hybrid_route import DrawnHybridRoute, draw_row_keys
from titan_opd.losses.inputs import build_inputs
from titan_opd.losses.policy import PolicyGradient
from titan_opd.losses.rows import RowLoss
from titan_opd.losses.samples import CrossEntropy, MonteCarloForwardKL
from titan_opd.losses.scores import TeacherScores
from titan_opd.losses.sparse import SupportDivergence
from titan_opd.losses.sweeps import call_bound
from titan_opd.losses.teacher_logits import TeacherLogits


@dataclass(frozen=True, eq=False)
class DistillationOutput:
    """What `distillation_loss` returns.

    Attributes:
        loss: scalar, sum of weight times value over rows, divided by the number of tokens; differentiable once in
            hidden and lm_head_weight.
        per_token: [N], each row's value before weights, without gradient; 0 for rows of weight 0.
        metrics: scalars without gradient, means over the rows of non-zero weight ("_max": the largest);
            titan_opd/losses/README.md says what each is.
        written_logprobs: [N] the student's log-probability of each row's `written_ids`, at the objective's temperature,
            without gradient; 0 for rows of weight 0. None when not asked for.
    """

    loss: Tensor
    per_token: Tensor
    metrics: dict[str, Tensor]
    written_logprobs: Tensor | None = None


def distillation_loss(
    hidden: Tensor,
    lm_head_weight: Tensor,
    objective: Objective,
    scores: TeacherScores,
    token_weights: Tensor,
    num_tokens: float | None = None,
    policy_versions: Tensor | None = None,
    current_version: int | None = None,
    vocab_size: int | None = None,
    tp_group: dist.ProcessGroup | None = None,
    *,
    logits_chunk_mb: float = 256.0,
    generator: torch.Generator | None = None,
    m2po_bound: Tensor | None = None,
    written_ids: Tensor | None = None,
) -> DistillationOutput:
    """The objective's loss on response tokens, never holding a matrix of tokens by vocabulary.

    Gradients are taken in this call, in three products; `backward` only scales them. Products are in hidden's dtype
    (float16: in float32, because its range ends at 65504) and sums in float32, for float64 in float64. When neither
    hidden nor lm_head_weight requires a gradient, only the values are computed.

    Args:
        hidden: [N, H], the student's hidden states after the final norm; row i predicts response token i.
        lm_head_weight: [V, H], or this rank's shard of it, split like torch.chunk, when tp_group is given.
        objective: what is minimised.
        scores: what the objective needs of the teacher and the rollout, with N rows.
        token_weights: [N]; a row of weight 0 is left out, whatever its scores are.
        num_tokens: the denominator, for micro-batches the count of the whole step; None: the rows of non-zero weight.
        policy_versions: [N] int, the version that wrote each token, for `staleness_discount`.
        current_version: the version being trained.
        vocab_size: rows of the vocabulary at or above it are padding and have no probability on either side.
        tp_group: ranks among which the vocabulary is split; all pass the same rows.
        logits_chunk_mb: memory for a chunk of logits, MiB.
        generator: draws the student's sample for a dense `hybrid`; None: torch's default generator. Under tp_group the
            first rank's numbers are used.
        m2po_bound: scalar, the bound of a whole optimizer step's samples, by `losses.m2po_bound`; None: that of this
            call's, found in a pass over the logits of its own.
        written_ids: [N] int64, tokens whose log-probability is returned, for one more read of the logits.

    Raises:
        ValueError: a field that the objective needs is missing, or shapes, ids or log-probabilities cannot be right.
    """
    inputs, teacher = build_inputs(
        hidden,
        lm_head_weight,
        objective,
        scores,
        token_weights,
        num_tokens=num_tokens,
        policy_versions=policy_versions,
        current_version=current_version,
        vocab_size=vocab_size,
        tp_group=tp_group,
        logits_chunk_mb=logits_chunk_mb,
        written_ids=written_ids,
    )
    active = inputs.row_numbers
    keys = None
    if objective.kind == "hybrid" and teacher is not None:
        keys = draw_row_keys(len(hidden), hidden.device, tp_group, generator)[active]
    grad_enabled = torch.is_grad_enabled()
    output = run_head(
        inputs,
        _route(objective, inputs, teacher, keys, m2po_bound),
        for_hidden=grad_enabled and hidden.requires_grad,
        for_weight=grad_enabled and lm_head_weight.requires_grad,
    )
    loss = _attach_gradients((inputs.coefficients * output.per_token).sum(), hidden, lm_head_weight, active, output)

    def among_all(values: Tensor) -> Tensor:
        return values.new_zeros(len(hidden)).index_copy(0, active, values)

    written = None if output.written_logprobs is None else among_all(output.written_logprobs)
    return DistillationOutput(loss, among_all(output.per_token), output.metrics, written)


def _route(
    objective: Objective,
    inputs: HeadInputs,
    teacher: TeacherLogits | None,
    keys: Tensor | None,
    m2po_bound: Tensor | None,
) -> Route:
    if teacher is not None and keys is not None:
        return DrawnHybridRoute(Hybrid(objective), teacher, keys)
    if teacher is not None:
        return dense_route(objective, teacher)
    if objective.correction == "m2po":
        bound = call_bound(inputs, objective) if m2po_bound is None else m2po_bound
        return CandidateRoute(PolicyGradient(objective, bound))
    return CandidateRoute(_row_loss(objective))


def _row_loss(objective: Objective) -> RowLoss:
    match objective.kind:
        case "cross_entropy":
            return CrossEntropy()
        case "mc_forward_kl":
            return MonteCarloForwardKL(objective)
        case "policy_gradient":
            return PolicyGradient(objective)
        case "hybrid":
            return Hybrid(objective)
    return SupportDivergence(objective)


def _attach_gradients(
    loss: Tensor, hidden: Tensor, lm_head_weight: Tensor, active: Tensor, output: HeadOutput
) -> Tensor:
    """The loss as a function of hidden and lm_head_weight with the gradients that the head took."""
    if output.grad_hidden is None and output.grad_weight is None:
        return loss
    grad_hidden = output.grad_hidden
    if grad_hidden is not None and len(active) < len(hidden):
        grad_hidden = grad_hidden.new_zeros(hidden.shape).index_copy(0, active, grad_hidden)
    return _LossWithGradients.apply(loss, hidden, lm_head_weight, (grad_hidden, output.grad_weight))


class _LossWithGradients(torch.autograd.Function):
    """A scalar whose gradients are known. Backward scales them in place and hands them over, so that none is copied."""

    @staticmethod
    def forward(
        ctx: Any, loss: Tensor, hidden: Tensor, lm_head_weight: Tensor, gradients: tuple[Tensor | None, Tensor | None]
    ) -> Tensor:
        ctx.gradients = gradients
        return loss.clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.gradients is None:
            raise RuntimeError(
                "a second backward through a distillation loss; its gradients were handed over by the first: "
                "call distillation_loss again"
            )
        gradients, ctx.gradients = ctx.gradients, None
        return None, *(None if grad is None else grad.mul_(upstream) for grad in gradients), None
