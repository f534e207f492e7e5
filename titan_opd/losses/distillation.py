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
from titan_opd.losses.candidate_route import CandidateRoute, bound_by_batch
from titan_opd.losses.checks import check_shapes, check_values, usable_fields
from titan_opd.losses.dense_route import DenseRoute, TeacherLogits
from titan_opd.losses.head import HeadInputs, HeadOutput, Route, run_head
from titan_opd.losses.hybrid import Hybrid
from titan_opd.losses.hybrid_route import DrawnHybridRoute, draw_uniforms
from titan_opd.losses.policy import PolicyGradient
from titan_opd.losses.rows import RowLoss
from titan_opd.losses.samples import CrossEntropy, MonteCarloForwardKL
from titan_opd.losses.scores import TeacherScores
from titan_opd.losses.sparse import SupportDivergence
from titan_opd.losses.vocab_parallel import VocabShard, product_dtype


@dataclass(frozen=True, eq=False)
class DistillationOutput:
    """What `distillation_loss` returns.

    Attributes:
        loss: scalar, sum of weight times value over rows, divided by the number of tokens; differentiable once in
            hidden and lm_head_weight.
        per_token: [N], each row's value before weights, without gradient; 0 for rows of weight 0.
        metrics: scalars without gradient, means over the rows of non-zero weight ("_max": the largest);
            titan_opd/losses/README.md says what each is.
    """

    loss: Tensor
    per_token: Tensor
    metrics: dict[str, Tensor]


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

    Raises:
        ValueError: a field that the objective needs is missing, or shapes, ids or log-probabilities cannot be right.
    """
    check_shapes(hidden, lm_head_weight, objective, scores, token_weights)
    if num_tokens is not None and not num_tokens > 0:
        raise ValueError(f"num_tokens = {num_tokens} must be positive; it divides the loss")
    sum_dtype = torch.promote_types(hidden.dtype, torch.float32)
    active = token_weights.nonzero().squeeze(1)
    active_scores = _used_scores(scores, objective, sum_dtype)[active]
    weights = token_weights[active].to(sum_dtype)
    staleness = _staleness(objective, policy_versions, current_version, active)
    if staleness is not None:
        weights = weights * objective.staleness_discount ** staleness.to(sum_dtype)

    shard = VocabShard.create(lm_head_weight, product_dtype(hidden), vocab_size, tp_group)
    check_values(objective, active_scores, weights, staleness, vocab_size=shard.vocab_size, row_numbers_N=active)
    teacher = None
    if objective.support == "dense":
        teacher = TeacherLogits.create(active_scores, objective.temperature, vocab_size, beside=shard)
    inputs = HeadInputs(
        hidden=hidden.detach()[active].to(shard.weight.dtype),
        scores=active_scores,
        coefficients=weights / (max(len(active), 1) if num_tokens is None else num_tokens),
        shard=shard,
        temperature=objective.temperature,
        rows_per_chunk=_rows_per_chunk(logits_chunk_mb, shard, teacher),
    )
    uniforms = None
    if objective.kind == "hybrid" and teacher is not None:
        uniforms = draw_uniforms(len(hidden), like=weights, group=tp_group, generator=generator)[active]
    grad_enabled = torch.is_grad_enabled()
    output = run_head(
        inputs,
        _route(objective, inputs, teacher, uniforms),
        for_hidden=grad_enabled and hidden.requires_grad,
        for_weight=grad_enabled and lm_head_weight.requires_grad,
    )
    loss = _attach_gradients((inputs.coefficients * output.per_token).sum(), hidden, lm_head_weight, active, output)
    per_token = output.per_token.new_zeros(len(hidden)).index_copy(0, active, output.per_token)
    return DistillationOutput(loss, per_token, output.metrics)


def _used_scores(scores: TeacherScores, objective: Objective, dtype: torch.dtype) -> TeacherScores:
    """Only what the objective reads, log-probabilities in the dtype of the sums."""
    values = {name: getattr(scores, name) for name in usable_fields(objective)}
    for name, value in values.items():
        if value is not None:
            values[name] = value.detach().to(dtype) if name.endswith("logprobs") else value.detach()
    return TeacherScores(**values)


def _staleness(
    objective: Objective, policy_versions: Tensor | None, current_version: int | None, active: Tensor
) -> Tensor | None:
    """[N] versions behind of the rows that count, when the objective discounts them."""
    if objective.staleness_discount == 1:
        return None
    if policy_versions is None or current_version is None:
        raise ValueError(
            f"objective.staleness_discount = {objective.staleness_discount} needs policy_versions and current_version"
        )
    return current_version - policy_versions[active].long()


def _rows_per_chunk(logits_chunk_mb: float, shard: VocabShard, teacher: TeacherLogits | None) -> int:
    """As many rows as have their logits, the student's and the teacher's, in the given memory."""
    row_bytes = shard.max_row_bytes + (0 if teacher is None else teacher.shard.max_row_bytes)
    return max(1, int(logits_chunk_mb * 2**20 / row_bytes))


def _route(objective: Objective, inputs: HeadInputs, teacher: TeacherLogits | None, uniforms: Tensor | None) -> Route:
    if teacher is not None and uniforms is not None:
        return DrawnHybridRoute(Hybrid(objective), teacher, uniforms)
    if teacher is not None:
        return DenseRoute(objective, teacher)
    if objective.correction == "m2po":
        return CandidateRoute(bound_by_batch(inputs, PolicyGradient(objective)))
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
