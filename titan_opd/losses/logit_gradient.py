"""The gradient of a row's loss with respect to its logits, written over the logits.

With z the logits, L their log-sum-exp, t that of the tokens outside the row's candidates, and g the partials of the
loss in (z at the candidates, L, t) as independent variables:

    dz_j = g_L exp(z_j - L) + [j outside the candidates] g_t exp(z_j - t) + sum_k g_k [j = id_k]

Shape suffixes: C rows of a chunk, B rows of a block, V columns of this rank's shard, K candidates a row.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from titan_opd.losses.vocab_parallel import VocabShard
from titan_opd.ops import RowStats

# Several elementwise passes over a block at a time: small enough to stay in a CPU's last cache and to bound the float32
# copies of bfloat16 logits, large enough that starting the passes costs nothing.
_BLOCK_BYTES = {"cpu": 16 << 20, "cuda": 64 << 20}


class Partials(NamedTuple):
    """Partial derivatives of the loss in the candidates' logits [C, K], L [C] and t [C]; None: it does not use t."""

    candidates: Tensor
    lse: Tensor
    tail: Tensor | None


def row_blocks(num_rows: int, row_bytes: int, device: torch.device) -> Iterator[slice]:
    """Slices of rows whose float32 (or float64) copies are of a size that elementwise passes like; at least one."""
    block_rows = max(1, _BLOCK_BYTES.get(device.type, _BLOCK_BYTES["cuda"]) // max(1, row_bytes))
    for first in range(0, max(num_rows, 1), block_rows):
        yield slice(first, min(first + block_rows, num_rows))


def write_logit_gradient(
    buffer_CV: Tensor, ids_CK: Tensor, stats: RowStats, partials: Partials, shard: VocabShard
) -> None:
    """Replace logits by the loss's gradient in them, each element formed in the statistics' dtype and rounded once.

    Args:
        buffer_CV: [C, V + 1], the shard's logits and one column of scratch.
        ids_CK: the candidates, padded with ids below 0; unique if the loss uses the tail.
        stats: of these logits and candidates, over the whole vocabulary.
        partials: of the loss.
        shard: where the columns belong.
    """
    # exp(z - L) is exp(z - max) / sum_exp: subtracting a rounded L would cost a peaked row its normalisation. Outside
    # the candidates both exponentials are one, exp(z - tail_max), which is at most 1 and exact however little mass the
    # tail has. The candidates' own elements are written over it, not corrected for it: a correction would subtract
    # numbers of the size of exp(z - t), which are huge when the tail is tiny.
    shift_C, scale_C = stats.max, partials.lse / stats.sum_exp
    if partials.tail is not None:
        own_CK = scale_C[:, None] * (stats.candidates - stats.max[:, None]).exp()
        has_tail_C = stats.tail_sum_exp > 0
        shift_C = torch.where(has_tail_C, stats.tail_max, stats.max)
        tail_scale_C = partials.tail / stats.tail_sum_exp + scale_C * (stats.tail_max - stats.max).exp()
        scale_C = torch.where(has_tail_C, tail_scale_C, scale_C)
    columns_CK = shard.columns(ids_CK)
    row_bytes = buffer_CV.shape[1] * shift_C.element_size()
    for rows in row_blocks(len(buffer_CV), row_bytes, buffer_CV.device):
        narrow_BV = buffer_CV[rows]
        block_BV = narrow_BV.to(shift_C.dtype)  # the buffer itself, unless it is narrower
        block_BV.sub_(shift_C[rows, None]).exp_().mul_(scale_C[rows, None])
        if partials.tail is not None:
            block_BV.scatter_(1, columns_CK[rows], own_CK[rows])
        block_BV.scatter_add_(1, columns_CK[rows], partials.candidates[rows])
        block_BV[:, shard.num_columns :] = 0
        if block_BV is not narrow_BV:
            narrow_BV.copy_(block_BV)
