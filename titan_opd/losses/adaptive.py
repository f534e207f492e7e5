"""The weight that adaptive KL (AKL, arXiv 2404.02657, section 4) gives to the forward KL, row by row.

Shape suffixes: B rows of a block, V columns of this rank's shard.
"""

from __future__ import annotations

import torch
from torch import Tensor

from titan_opd.losses.vocab_parallel import VocabShard


def head_share(q_BV: Tensor, p_BV: Tensor, q_top_B: Tensor, mu: float, shard: VocabShard) -> Tensor:
    """[B] the share of sum |q - p| that lies in the teacher's head, without gradient.

    The head holds the teacher's most likely tokens, as many as fit into the mass `mu` (equally likely ones together),
    and the most likely one in any case.

    Args:
        q_BV, p_BV: the teacher's and the student's probabilities on this rank's tokens.
        q_top_B: the teacher's largest probability on all ranks.
        mu: the head's mass.
        shard: sums over ranks.
    """
    gap_BV = (q_BV - p_BV).abs()
    in_head_BV = (q_BV > _head_threshold(q_BV, mu, shard)[:, None]) | (q_BV == q_top_B[:, None])
    sums_B2 = torch.stack([torch.where(in_head_BV, gap_BV, 0).sum(-1), gap_BV.sum(-1)], dim=-1)
    head_B, total_B = shard.sum_over_shards(sums_B2).unbind(-1)
    return head_B / total_B.clamp(min=torch.finfo(total_B.dtype).tiny)


def _head_threshold(q_BV: Tensor, mu: float, shard: VocabShard) -> Tensor:
    """[B] the largest x such that the tokens of probability x or more have a mass above mu; 0 when there is none.

    A bisection: a sort over a vocabulary that is split among ranks would have to gather it. Floats that are not
    negative are ordered like their bits, so bisecting the bits ends at the exact x.
    """
    bits_dtype = torch.int64 if q_BV.dtype == torch.float64 else torch.int32
    above_all = int(torch.tensor(2, dtype=q_BV.dtype).view(bits_dtype))
    low_B = torch.zeros(len(q_BV), dtype=bits_dtype, device=q_BV.device)
    high_B = torch.full_like(low_B, above_all)
    for _ in range(above_all.bit_length()):
        middle_B = low_B + (high_B - low_B) // 2
        at_least_BV = q_BV >= middle_B.view(q_BV.dtype)[:, None]
        is_above_B = shard.sum_over_shards(torch.where(at_least_BV, q_BV, 0).sum(-1)) > mu
        low_B = torch.where(is_above_B, middle_B, low_B)
        high_B = torch.where(is_above_B, high_B, middle_B)
    return low_B.view(q_BV.dtype)
