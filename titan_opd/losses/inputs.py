"""From a caller's rows to those that count, checked, with the student's and the teacher's output projections.

Shape suffixes: N rows (response tokens).
"""

from __future__ import annotations

from typing import TypedDict

import torch
import torch.distributed as dist
from torch import Tensor

from titan_opd.config.objective import Objective
from titan_opd.losses.checks import check_shapes, check_values, usable_fields
from titan_opd.losses.chunks import rows_per_chunk
from titan_opd.losses.head import HeadInputs
from titan_opd.losses.scores import TeacherScores
from titan_opd.losses.teacher_logits import TeacherLogits
from titan_opd.losses.vocab_parallel import VocabShard, product_dtype


class HeadOptions(TypedDict, total=False):
    """How logits are computed, whatever the objective; `distillation_loss` says what each option is."""

    vocab_size: int | None
    tp_group: dist.ProcessGroup | None
    logits_chunk_mb: float


def build_inputs(
    hidden: Tensor,
    lm_head_weight: Tensor,
    objective: Objective,
    scores: TeacherScores,
    token_weights: Tensor,
    *,
    num_tokens: float | None = None,
    policy_versions: Tensor | None = None,
    current_version: int | None = None,
    vocab_size: int | None = None,
    tp_group: dist.ProcessGroup | None = None,
    logits_chunk_mb: float = 256.0,
    written_ids: Tensor | None = None,
) -> tuple[HeadInputs, TeacherLogits | None]:
    """What the loss head works on, and for the dense support the teacher's logits; arguments as `distillation_loss`.

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
    row_bytes = shard.max_row_bytes + (0 if teacher is None else teacher.shard.max_row_bytes)
    inputs = HeadInputs(
        row_numbers=active,
        hidden=hidden.detach()[active].to(shard.weight.dtype),
        scores=active_scores,
        coefficients=weights / (max(len(active), 1) if num_tokens is None else num_tokens),
        shard=shard,
        temperature=objective.temperature,
        rows_per_chunk=rows_per_chunk(len(active), row_bytes, logits_chunk_mb),
        written_ids=None if written_ids is None else written_ids[active],
    )
    return inputs, teacher


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
