"""Softmax statistics and gathered logits in one read of each row.

Shape suffixes: R rows, V columns of this shard, K ids a row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from titan_opd.ops.reference import gather_stats_reference
from titan_opd.ops.row_stats import RowStats

KERNEL_DTYPES = (torch.float32, torch.bfloat16)


def gather_stats(logits_RV: Tensor, ids_RK: Tensor, *, vocab_start: int = 0, vocab_size: int | None = None) -> RowStats:
    """Each row's softmax statistics, the same over the columns outside its ids (the tail), and its logits at the ids.

    The tail is summed over its own columns, never as a difference, so it keeps full precision where it holds 1e-6 or
    1e-30 of the mass. Float32 and bfloat16 logits on the CPU go through the compiled kernel, which sums in float32
    blocks; every other dtype and device goes through `reference.gather_stats_reference`.

    Args:
        logits_RV: [R, V] floating, columns vocab_start .. vocab_start + V of the vocabulary, adjacent in memory; rows
            may have any stride. Not differentiated.
        ids_RK: [R, K] int32 or int64, global ids. An id below 0 is padding; one of another shard, or at or above
            vocab_size, is nobody's here. Duplicates are fine: the set counts them once.
        vocab_start: global id of the first column.
        vocab_size: columns whose global id is at or above it are padding and count nowhere; None: all count.

    Returns:
        RowStats of R rows.

    Raises:
        ValueError: an argument has the wrong shape, dtype, device or range, or logits would need a gradient.
    """
    _check_arguments(logits_RV, ids_RK, vocab_start, vocab_size)
    if logits_RV.device.type == "cpu" and logits_RV.dtype in KERNEL_DTYPES:
        return RowStats(*torch.ops.titan_opd.gather_stats(logits_RV, ids_RK, vocab_start, vocab_size))
    return gather_stats_reference(logits_RV, ids_RK, vocab_start=vocab_start, vocab_size=vocab_size)


def _check_arguments(logits_RV: Tensor, ids_RK: Tensor, vocab_start: int, vocab_size: int | None) -> None:
    if logits_RV.dim() != 2 or not logits_RV.is_floating_point():
        raise ValueError(f"logits must be floating [R, V], got {logits_RV.dtype} {list(logits_RV.shape)}")
    if logits_RV.shape[1] > 1 and logits_RV.stride(1) != 1:
        raise ValueError(
            f"logits must have adjacent columns, got strides {logits_RV.stride()}; pass logits.contiguous()"
        )
    if torch.is_grad_enabled() and logits_RV.requires_grad:
        raise ValueError("logits require grad, but gather_stats has no derivative; pass logits.detach()")
    if ids_RK.dim() != 2 or ids_RK.shape[0] != logits_RV.shape[0]:
        raise ValueError(f"ids must be [R, K] with logits' R = {logits_RV.shape[0]} rows, got {list(ids_RK.shape)}")
    if ids_RK.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"ids must be int32 or int64, got {ids_RK.dtype}")
    if ids_RK.device != logits_RV.device:
        raise ValueError(f"ids must be on logits' device {logits_RV.device}, got {ids_RK.device}")
    if vocab_start < 0:
        raise ValueError(f"vocab_start must be at least 0, got {vocab_start}")
    if vocab_size is not None and vocab_size < 1:
        raise ValueError(f"vocab_size must be at least 1 or None, got {vocab_size}")


@torch.library.register_fake("titan_opd::gather_stats")
def _gather_stats_fake(
    logits_RV: Tensor, ids_RK: Tensor, vocab_start: int, vocab_size: int | None, isa: str | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    num_rows, num_ids = ids_RK.shape
    row = [logits_RV.new_empty([num_rows], dtype=torch.float32) for _ in range(4)]
    return (*row, logits_RV.new_empty([num_rows, num_ids], dtype=torch.float32))
