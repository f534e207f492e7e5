"""The k largest logits of each row with its softmax statistics, in one read.

Shape suffixes: R rows, V columns of this shard, K = k ids a row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from titan_opd.ops.arguments import check_inverse_temperature, check_logits, check_shard
from titan_opd.ops.extension import has_kernel
from titan_opd.ops.no_derivative import refuse_to_differentiate, register_without_derivative
from titan_opd.ops.reference import topk_logprobs_reference
from titan_opd.ops.row_stats import TopK

MAX_TOPK = 256
_REASON = "it serves scores that are constants of a loss; gather_stats at its ids has one"


def topk_logprobs(
    logits_RV: Tensor,
    k: int,
    *,
    vocab_start: int = 0,
    vocab_size: int | None = None,
    inverse_temperature: Tensor | None = None,
) -> TopK:
    """Each row's k most likely ids, their logits, and the softmax statistics of the row and of all other columns.

    The tail is summed over its own columns, never as a difference, so it keeps full precision where it holds 1e-6 of
    the mass. Equal logits are ordered by id, so the result is the same on every device and however the vocabulary is
    split. NaN counts as larger than every number and +inf as it is: they come first, and the sums over a set that holds
    one are NaN. Without derivative.

    Args:
        logits_RV: [R, V] floating, columns vocab_start .. vocab_start + V of the vocabulary, adjacent in memory; rows
            may have any stride. V may be smaller than k, or 0.
        k: 1 to 256.
        vocab_start: global id of the first column.
        vocab_size: columns whose global id is at or above it are padding and count nowhere; None: all count.
        inverse_temperature: [R] float32, what each row's logits are multiplied by before anything else; None: 1.

    Raises:
        ValueError: an argument has the wrong shape, dtype, device or range.
        RuntimeError: autograd records, and the logits or the inverse temperature need a gradient.
    """
    check_logits(logits_RV)
    if not 1 <= k <= MAX_TOPK:
        raise ValueError(f"k must be 1 to {MAX_TOPK}, got {k}")
    check_shard(vocab_start, vocab_size)
    check_inverse_temperature(inverse_temperature, logits_RV)
    if has_kernel(logits_RV):
        return TopK(*torch.ops.titan_opd.topk_logprobs(logits_RV, k, vocab_start, vocab_size, inverse_temperature))
    refuse_to_differentiate("topk_logprobs", _REASON, logits_RV, inverse_temperature)
    return topk_logprobs_reference(
        logits_RV, k, vocab_start=vocab_start, vocab_size=vocab_size, inverse_temperature=inverse_temperature
    )


@torch.library.register_fake("titan_opd::topk_logprobs")
def _topk_logprobs_fake(
    logits_RV: Tensor,
    k: int,
    vocab_start: int = 0,
    vocab_size: int | None = None,
    inverse_temperature: Tensor | None = None,
    isa: str | None = None,
) -> tuple[Tensor, ...]:
    num_rows = logits_RV.shape[0]
    ids_RK = logits_RV.new_empty([num_rows, k], dtype=torch.int64)
    values_RK = logits_RV.new_empty([num_rows, k], dtype=torch.float32)
    return ids_RK, values_RK, *(logits_RV.new_empty([num_rows], dtype=torch.float32) for _ in range(4))


register_without_derivative("topk_logprobs", _REASON)
