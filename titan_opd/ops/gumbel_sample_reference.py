"""gumbel_sample in plain PyTorch: its definition, and the code for what no kernel covers.

Shape suffixes: R rows, V columns of this shard, m draws a row.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from titan_opd.ops.noise import race_uniforms
from titan_opd.ops.reference import scaled_logits


class RaceWinners(NamedTuple):
    """The ids drawn from the rows of one vocabulary shard.

    Attributes:
        ids: [R, m] int64, global; -1 where nothing can be drawn: no logit is above -inf, or one is NaN or +inf.
        scores: [R, m] float64, by which shards compare their winners: the larger score, of equal ones the lower id, is
            the whole's. -inf without a logit above -inf, NaN for a row with a NaN or +inf.
        values: [R, m] float32 (float64 for float64 logits), the logits z at the ids; where the id is -1, the score.
    """

    ids: Tensor
    scores: Tensor
    values: Tensor


def gumbel_sample_reference(
    logits_RV: Tensor,
    keys_R: Tensor,
    num_samples: int,
    *,
    vocab_start: int = 0,
    vocab_size: int | None = None,
    inverse_temperature: Tensor | None = None,
) -> RaceWinners:
    """`titan_opd.ops.gumbel_sample` for any device and floating dtype; holds [R, m, V] float64."""
    z_RV = scaled_logits(logits_RV, vocab_start, vocab_size, inverse_temperature)
    ids_V = torch.arange(vocab_start, vocab_start + z_RV.shape[1], device=z_RV.device)
    gumbel_RmV = -(-torch.log1p(-race_uniforms(keys_R, num_samples, ids_V))).log()
    # One more column of -inf, so that an empty shard has a maximum.
    scores_RmV = F.pad(z_RV[:, None, :] + gumbel_RmV, (0, 1), value=-torch.inf)
    wrong_R1 = ~(z_RV < torch.inf).all(dim=1, keepdim=True)
    scores_Rm, columns_Rm = scores_RmV.amax(dim=2), scores_RmV.argmax(dim=2)  # of equal scores the first
    scores_Rm = torch.where(wrong_R1, torch.nan, scores_Rm)
    has_winner_Rm = scores_Rm > -torch.inf
    ids_Rm = torch.where(has_winner_Rm, columns_Rm + vocab_start, -1)
    winners_Rm = F.pad(z_RV, (0, 1)).gather(1, columns_Rm)
    values_Rm = torch.where(has_winner_Rm, winners_Rm, scores_Rm.to(z_RV.dtype))
    return RaceWinners(ids_Rm, scores_Rm, values_Rm)
