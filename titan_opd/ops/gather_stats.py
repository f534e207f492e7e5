"""Softmax statistics and gathered logits in one read of each row.

Shape suffixes: R rows, V columns of this shard, K ids a row.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from titan_opd.ops.arguments import check_ids, check_inverse_temperature, check_logits, check_shard
from titan_opd.ops.extension import has_kernel
from titan_opd.ops.reference import gather_stats_reference
from titan_opd.ops.row_stats import RowStats


def gather_stats(
    logits_RV: Tensor,
    ids_RK: Tensor,
    *,
    vocab_start: int = 0,
    vocab_size: int | None = None,
    inverse_temperature: Tensor | None = None,
) -> RowStats:
    """Each row's softmax statistics, the same over the columns outside its ids (the tail), and its logits at the ids.

    The tail is summed over its own columns, never as a difference, so it keeps full precision where it holds 1e-6 or
    1e-30 of the mass. Differentiable in the logits wherever a function of the results uses the maxima as the shifts of
    their sums only, as `lse` and `tail_lse` do: the maxima carry no gradient.

    Args:
        logits_RV: [R, V] floating, columns vocab_start .. vocab_start + V of the vocabulary, adjacent in memory; rows
            may have any stride.
        ids_RK: [R, K] int32 or int64, global ids. An id below 0 is padding; one of another shard, or at or above
            vocab_size, is nobody's here. Duplicates are fine: the set counts them once.
        vocab_start: global id of the first column.
        vocab_size: columns whose global id is at or above it are padding and count nowhere; None: all count.
        inverse_temperature: [R] float32, what each row's logits are multiplied by before anything else; None: 1.

    Returns:
        RowStats of R rows, of the logits times the inverse temperature.

    Raises:
        ValueError: an argument has the wrong shape, dtype, device or range.
    """
    check_logits(logits_RV)
    check_ids(ids_RK, logits_RV)
    check_shard(vocab_start, vocab_size)
    check_inverse_temperature(inverse_temperature, logits_RV)
    if has_kernel(logits_RV):
        return RowStats(
            *torch.ops.titan_opd.gather_stats(logits_RV, ids_RK, vocab_start, vocab_size, inverse_temperature)
        )
    return gather_stats_reference(
        logits_RV, ids_RK, vocab_start=vocab_start, vocab_size=vocab_size, inverse_temperature=inverse_temperature
    )


@torch.library.register_fake("titan_opd::gather_stats")
def _gather_stats_fake(
    logits_RV: Tensor,
    ids_RK: Tensor,
    vocab_start: int = 0,
    vocab_size: int | None = None,
    inverse_temperature: Tensor | None = None,
    isa: str | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    num_rows, num_ids = ids_RK.shape
    row = [logits_RV.new_empty([num_rows], dtype=torch.float32) for _ in range(4)]
    return (*row, logits_RV.new_empty([num_rows, num_ids], dtype=torch.float32))


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    logits_RV, ids_RK, vocab_start, vocab_size, inverse_temperature, _ = inputs
    max_R, _, tail_max_R, _, _ = output
    ctx.mark_non_differentiable(max_R, tail_max_R)
    ctx.save_for_backward(logits_RV, ids_RK, max_R, tail_max_R, inverse_temperature)
    ctx.shard = (vocab_start, vocab_size)


def _backward(
    ctx: Any, _max: None, grad_sum_R: Tensor, _tail_max: None, grad_tail_sum_R: Tensor, grad_candidates_RK: Tensor
) -> tuple[Tensor | None, ...]:
    """With the maxima as constant shifts, d sum_exp / dz_j = exp(z_j - max): the logit gradient's formula."""
    logits_RV, ids_RK, max_R, tail_max_R, inverse_temperature = ctx.saved_tensors
    grad_RV = logits_RV.clone()
    torch.ops.titan_opd.sparse_softmax_grad_(
        grad_RV,
        ids_RK,
        grad_candidates_RK.contiguous(),
        max_R,
        tail_max_R,
        grad_sum_R.contiguous(),
        grad_tail_sum_R.contiguous(),
        *ctx.shard,
        inverse_temperature,
    )
    return grad_RV, None, None, None, None, None


torch.library.register_autograd("titan_opd::gather_stats", _backward, setup_context=_setup_context)
