"""Draws from each row's softmax that are the same however the vocabulary is split.

Shape suffixes: R rows, V columns of this shard, m draws a row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from titan_opd.ops.arguments import check_device, check_inverse_temperature, check_logits, check_shard
from titan_opd.ops.extension import has_kernel
from titan_opd.ops.gumbel_sample_reference import RaceWinners, gumbel_sample_reference
from titan_opd.ops.no_derivative import refuse_to_differentiate, register_without_derivative

_REASON = "a drawn id is no differentiable function of the logits"


def gumbel_sample(
    logits_RV: Tensor,
    keys_R: Tensor,
    num_samples: int,
    *,
    vocab_start: int = 0,
    vocab_size: int | None = None,
    inverse_temperature: Tensor | None = None,
) -> RaceWinners:
    """`num_samples` independent ids from the softmax of each row, by the Gumbel-max trick.

    An id's score is its logit plus Gumbel noise, a function of (row key, draw, global id) alone, and the largest score
    wins (Gumbel 1954; Maddison, Tarlow and Minka, "A* Sampling", NeurIPS 2014). So a shard of the vocabulary finds the
    best of its ids, and the best of the shards is the draw: the same for every split, exactly. The row is read once for
    four draws on a GPU, once for all on the CPU; a logarithm is taken only where an id may win. Without derivative.

    Args:
        logits_RV: [R, V] floating, columns vocab_start .. vocab_start + V of the vocabulary, adjacent in memory; rows
            may have any stride. A logit of -inf is never drawn.
        keys_R: [R] int64, what the noise of each row is a function of, as `noise.row_keys` makes them. Equal keys draw
            with equal noise.
        num_samples: m, at least 1.
        vocab_start: global id of the first column.
        vocab_size: columns whose global id is at or above it are padding and never drawn; None: all count.
        inverse_temperature: [R] float32, what each row's logits are multiplied by before anything else; None: 1.

    Raises:
        ValueError: an argument has the wrong shape, dtype, device or range.
        RuntimeError: autograd records, and the logits or the inverse temperature need a gradient.
    """
    check_logits(logits_RV)
    if keys_R.dtype != torch.int64 or list(keys_R.shape) != [logits_RV.shape[0]]:
        raise ValueError(f"keys must be int64 [{logits_RV.shape[0]}], got {keys_R.dtype} {list(keys_R.shape)}")
    check_device(keys_R, logits_RV, "keys")
    if num_samples < 1:
        raise ValueError(f"num_samples must be at least 1, got {num_samples}")
    check_shard(vocab_start, vocab_size)
    check_inverse_temperature(inverse_temperature, logits_RV)
    if has_kernel(logits_RV):
        arguments = (logits_RV, keys_R.contiguous(), num_samples, vocab_start, vocab_size, inverse_temperature)
        return RaceWinners(*torch.ops.titan_opd.gumbel_sample(*arguments))
    refuse_to_differentiate("gumbel_sample", _REASON, logits_RV, inverse_temperature)
    return gumbel_sample_reference(
        logits_RV,
        keys_R,
        num_samples,
        vocab_start=vocab_start,
        vocab_size=vocab_size,
        inverse_temperature=inverse_temperature,
    )


@torch.library.register_fake("titan_opd::gumbel_sample")
def _gumbel_sample_fake(
    logits_RV: Tensor,
    keys_R: Tensor,
    num_samples: int,
    vocab_start: int = 0,
    vocab_size: int | None = None,
    inverse_temperature: Tensor | None = None,
    isa: str | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    shape = [logits_RV.shape[0], num_samples]
    dtypes = (torch.int64, torch.float64, torch.float32)
    return tuple(logits_RV.new_empty(shape, dtype=dtype) for dtype in dtypes)


register_without_derivative("gumbel_sample", _REASON)
