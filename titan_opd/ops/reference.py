"""The operators in plain PyTorch: their definition, and the code for what no kernel covers.

Shape suffixes: R rows, V columns of this shard, K ids a row.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from titan_opd.ops.row_stats import RowStats, TopK


def gather_stats_reference(
    logits_RV: Tensor,
    ids_RK: Tensor,
    *,
    vocab_start: int = 0,
    vocab_size: int | None = None,
    inverse_temperature: Tensor | None = None,
) -> RowStats:
    """`titan_opd.ops.gather_stats` for any device and floating dtype, with several copies of the logits."""
    # One more column of -inf: where nobody's ids point, and what keeps an empty shard from being a special case.
    z_RV = F.pad(scaled_logits(logits_RV, vocab_start, vocab_size, inverse_temperature), (0, 1), value=-torch.inf)
    columns_RK, owned_RK = local_columns(ids_RK, vocab_start, z_RV.shape[1] - 1)

    candidates_RK = torch.where(owned_RK, z_RV.gather(1, columns_RK), 0.0)
    max_R, sum_exp_R = _max_and_sum_exp(z_RV)
    tail_max_R, tail_sum_exp_R = _max_and_sum_exp(z_RV.scatter(1, columns_RK, -torch.inf))
    return RowStats(max_R, sum_exp_R, tail_max_R, tail_sum_exp_R, candidates_RK)


def topk_logprobs_reference(
    logits_RV: Tensor,
    k: int,
    *,
    vocab_start: int = 0,
    vocab_size: int | None = None,
    inverse_temperature: Tensor | None = None,
) -> TopK:
    """`titan_opd.ops.topk_logprobs` for any device and floating dtype: a stable sort, then its ids' statistics."""
    shard = {"vocab_start": vocab_start, "vocab_size": vocab_size, "inverse_temperature": inverse_temperature}
    columns_RK = scaled_logits(logits_RV, **shard).sort(dim=1, descending=True, stable=True).indices[:, :k]
    ids_RK = F.pad(columns_RK + vocab_start, (0, k - columns_RK.shape[1]), value=-1)
    stats = gather_stats_reference(logits_RV, ids_RK, **shard)
    values_RK = torch.where(ids_RK < 0, -torch.inf, stats.candidates)
    return TopK(ids_RK, values_RK, *stats[:4])


def sparse_softmax_grad_reference_(
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
    """`titan_opd.ops.sparse_softmax_grad_` for any device and floating dtype, with several copies of the logits."""
    z_RV = scaled_logits(logits_RV, vocab_start, vocab_size, inverse_temperature)
    num_columns = z_RV.shape[1]
    columns_RK, _ = local_columns(ids_RK, vocab_start, num_columns)
    # One more column, where nobody's ids point.
    at_ids_RV = z_RV.new_zeros(len(z_RV), num_columns + 1).scatter_add(1, columns_RK, g_RK)[:, :num_columns]
    outside_RV = torch.ones_like(F.pad(z_RV, (0, 1)), dtype=torch.bool).scatter(1, columns_RK, False)[:, :num_columns]

    grad_RV = g_lse_R[:, None] * _exp_below(z_RV, lse_R)
    grad_RV += torch.where(outside_RV, g_tail_R[:, None] * _exp_below(z_RV, tail_lse_R), 0)
    grad_RV += at_ids_RV
    if inverse_temperature is not None:
        grad_RV *= inverse_temperature[:, None]
    logits_RV[:, :num_columns] = grad_RV
    logits_RV[:, num_columns:] = 0
    return logits_RV


def _exp_below(z_RV: Tensor, lse_R: Tensor) -> Tensor:
    """exp(z - lse); 0 for a set of which lse = -inf says that it has no mass."""
    return (z_RV - torch.where(lse_R == -torch.inf, torch.inf, lse_R)[:, None]).exp()


def scaled_logits(
    logits_RV: Tensor, vocab_start: int, vocab_size: int | None, inverse_temperature: Tensor | None
) -> Tensor:
    """The columns that are no padding, in at least float32, times the inverse temperature."""
    num_columns = logits_RV.shape[1]
    if vocab_size is not None:
        num_columns = min(max(vocab_size - vocab_start, 0), num_columns)
    z_RV = logits_RV[:, :num_columns].to(torch.promote_types(logits_RV.dtype, torch.float32))
    return z_RV if inverse_temperature is None else z_RV * inverse_temperature[:, None]


def local_columns(ids_RK: Tensor, vocab_start: int, num_columns: int) -> tuple[Tensor, Tensor]:
    """The shard's columns of global ids, `num_columns` for those of nobody here; and which ids are this shard's."""
    local_RK = ids_RK.long() - vocab_start
    owned_RK = (ids_RK >= 0) & (local_RK >= 0) & (local_RK < num_columns)
    return torch.where(owned_RK, local_RK, num_columns), owned_RK


def _max_and_sum_exp(z_RV: Tensor) -> tuple[Tensor, Tensor]:
    max_R = z_RV.amax(dim=1)
    shift_R = torch.where(max_R == -torch.inf, 0.0, max_R)  # -inf - -inf would be NaN
    sum_exp_R = (z_RV - shift_R[:, None]).exp().sum(dim=1)
    return torch.where(sum_exp_R.isnan(), torch.nan, max_R), sum_exp_R
