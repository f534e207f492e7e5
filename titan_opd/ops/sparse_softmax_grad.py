"""The gradient of a function of a row's log-sum-exps and candidates, written over the logits.

Shape suffixes: R rows, V columns of this shard, K ids a row.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from titan_opd.ops.arguments import (
    check_ids,
    check_inverse_temperature,
    check_logits,
    check_row_values,
    check_separate_rows,
    check_shard,
)
from titan_opd.ops.extension import has_kernel
from titan_opd.ops.reference import sparse_softmax_grad_reference_

_NO_DERIVATIVE = (
    "sparse_softmax_grad_ has no derivative of its own: it overwrites logits with a gradient; call it under "
    "torch.no_grad(), with detached tensors, or without create_graph"
)


def sparse_softmax_grad_(
    logits_RV: Tensor,
    ids_RK: Tensor,
    g_RK: Tensor,
    lse_R: Tensor,
    tail_lse_R: Tensor,
    g_lse_R: Tensor,
    g_tail_R: Tensor,
    *,
    vocab_start: int = 0,
    vocab_size: int | None = None,
    inverse_temperature: Tensor | None = None,
) -> Tensor:
    """Replace logits by the gradient in them of a function of (z at the ids, lse, tail_lse), given its partials.

    With z the logits times the inverse temperature, L and t the log-sum-exps of z over the vocabulary and over its
    tokens outside the row's ids, and g the partials with these as independent variables:

        dz_j = g_lse exp(z_j - L) + [j outside ids] g_tail exp(z_j - t) + sum_k g_k [j = id_k]

    and the gradient in the logit is dz_j times the inverse temperature. Each element is formed in float32 (float64 for
    float64) and rounded once. Outside the ids one exponential serves both terms, exp(z_j - t) (g_tail + g_lse
    exp(t - L)), so that nothing cancels or overflows however little mass the tail has.

    L and t may be other shifts if the partials are scaled to them, because only g_lse exp(-L) and g_tail exp(-t) count:
    a caller that has maxima and sums passes max, g_lse / sum_exp, tail_max and g_tail / tail_sum_exp, and spares L its
    rounding. A shift must not be below the largest logit of its set by more than rounding, nor t above L.

    Args:
        logits_RV: [R, V] floating, columns vocab_start .. vocab_start + V of the vocabulary, adjacent in memory; rows
            may have any stride at which they do not overlap. Overwritten; columns of padding become 0.
        ids_RK: [R, K] int32 or int64, global ids. Those below 0, of other shards, or at or above vocab_size are passed
            over, with their partials. The partials of duplicates add up.
        g_RK: [R, K], partials in the logits at the ids; like all numbers of rows float32, float64 for float64 logits.
        lse_R: [R], over the whole vocabulary.
        tail_lse_R: [R]; -inf where nothing is outside the ids: g_tail does not count then.
        g_lse_R: [R].
        g_tail_R: [R].
        vocab_start: global id of the first column.
        vocab_size: columns whose global id is at or above it are padding; None: there is none.
        inverse_temperature: [R], what the row's logits are multiplied by before anything else; None: 1.

    Returns:
        `logits_RV`, which now is the gradient.

    Raises:
        ValueError: an argument has the wrong shape, dtype, device or range.
        RuntimeError: autograd would have to differentiate this.
    """
    check_logits(logits_RV)
    check_separate_rows(logits_RV)
    check_ids(ids_RK, logits_RV)
    check_shard(vocab_start, vocab_size)
    rows = {"lse": lse_R, "tail_lse": tail_lse_R, "g_lse": g_lse_R, "g_tail": g_tail_R}
    for name, values_R in rows.items():
        check_row_values(values_R, [len(logits_RV)], logits_RV, name)
    check_row_values(g_RK, list(ids_RK.shape), logits_RV, "g")
    check_inverse_temperature(inverse_temperature, logits_RV)
    if not has_kernel(logits_RV):
        _refuse_to_differentiate(logits_RV, g_RK, *rows.values(), inverse_temperature)
        return sparse_softmax_grad_reference_(
            logits_RV,
            ids_RK,
            g_RK,
            *rows.values(),
            vocab_start=vocab_start,
            vocab_size=vocab_size,
            inverse_temperature=inverse_temperature,
        )
    torch.ops.titan_opd.sparse_softmax_grad_(
        logits_RV,
        ids_RK,
        g_RK.contiguous(),
        *(values_R.contiguous() for values_R in rows.values()),
        vocab_start,
        vocab_size,
        inverse_temperature,
    )
    return logits_RV


@torch.library.register_fake("titan_opd::sparse_softmax_grad_")
def _sparse_softmax_grad_fake(logits_RV: Tensor, *_: Any) -> None:
    return None


def _sparse_softmax_grad_autograd(*arguments: Any) -> None:
    _refuse_to_differentiate(*arguments)
    with torch._C._AutoDispatchBelowAutograd():
        torch.ops.titan_opd.sparse_softmax_grad_(*arguments)


torch.library.impl("titan_opd::sparse_softmax_grad_", "Autograd")(_sparse_softmax_grad_autograd)


def _refuse_to_differentiate(*arguments: Any) -> None:
    if torch.is_grad_enabled() and any(isinstance(one, Tensor) and one.requires_grad for one in arguments):
        raise RuntimeError(_NO_DERIVATIVE)
