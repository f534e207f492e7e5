"""The gradient of a row's loss with respect to its logits, written over the logits.

With z the logits, L their log-sum-exp, t that of the tokens outside the row's candidates, and g the partials of the
loss in (z at the candidates, L, t) as independent variables: `titan_opd.ops.sparse_softmax_grad_`.

Shape suffixes: C rows of a chunk, V columns of this rank's shard, K candidates a row.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from titan_opd.losses.vocab_parallel import VocabShard
from titan_opd.ops import RowStats, sparse_softmax_grad_

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
    logits_CV: Tensor, ids_CK: Tensor, stats: RowStats, partials: Partials, shard: VocabShard
) -> None:
    """Replace logits by the loss's gradient in them, each element formed in the statistics' dtype and rounded once.

    Args:
        logits_CV: [C, V], the shard's logits.
        ids_CK: the candidates, padded with ids below 0.
        stats: of these logits and candidates, over the whole vocabulary.
        partials: of the loss.
        shard: where the columns belong.
    """
    # exp(z - L) is exp(z - max) / sum_exp: subtracting a rounded L would cost a peaked row its normalisation.
    if partials.tail is None:
        tail_C = torch.zeros_like(stats.max)
    else:
        tail_C = torch.where(stats.tail_sum_exp > 0, partials.tail / stats.tail_sum_exp, 0)
    sparse_softmax_grad_(
        logits_CV,
        ids_CK,
        partials.candidates,
        stats.max,
        stats.tail_max,
        partials.lse / stats.sum_exp,
        tail_C,
        vocab_start=shard.start,
        vocab_size=shard.vocab_size,
    )
