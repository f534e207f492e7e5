"""Checks of the operators' common arguments, in words for people. csrc checks again what could read outside a tensor.

Shape suffixes: R rows, V columns of this shard, K ids a row.
"""

from __future__ import annotations

import torch
from torch import Tensor

LOGIT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def check_logits(logits_RV: Tensor, name: str = "logits") -> None:
    """A floating matrix of adjacent columns; rows may have any stride."""
    if logits_RV.dim() != 2 or not logits_RV.is_floating_point():
        raise ValueError(f"{name} must be floating [R, V], got {logits_RV.dtype} {list(logits_RV.shape)}")
    if logits_RV.shape[1] > 1 and logits_RV.stride(1) != 1:
        raise ValueError(
            f"{name} must have adjacent columns, got strides {logits_RV.stride()}; pass {name}.contiguous()"
        )


def check_separate_rows(logits_RV: Tensor, name: str = "logits") -> None:
    """Rows that do not share memory, for what is written in place."""
    if logits_RV.shape[0] > 1 and logits_RV.stride(0) < logits_RV.shape[1]:
        raise ValueError(
            f"{name} is overwritten and its rows overlap (strides {logits_RV.stride()}); pass a copy of it"
        )


def check_ids(ids_RK: Tensor, logits_RV: Tensor, name: str = "ids") -> None:
    """Integer ids with the logits' rows, on the logits' device."""
    if ids_RK.dim() != 2 or ids_RK.shape[0] != logits_RV.shape[0]:
        raise ValueError(f"{name} must be [R, K] with logits' R = {logits_RV.shape[0]} rows, got {list(ids_RK.shape)}")
    if ids_RK.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"{name} must be int32 or int64, got {ids_RK.dtype}")
    check_device(ids_RK, logits_RV, name)


def check_shard(vocab_start: int, vocab_size: int | None) -> None:
    if vocab_start < 0:
        raise ValueError(f"vocab_start must be at least 0, got {vocab_start}")
    if vocab_size is not None and vocab_size < 1:
        raise ValueError(f"vocab_size must be at least 1 or None, got {vocab_size}")


def check_row_values(values: Tensor, shape: list[int], logits_RV: Tensor, name: str) -> None:
    """Numbers of each row: float32, or float64 for float64 logits, on the logits' device."""
    wanted = torch.float64 if logits_RV.dtype == torch.float64 else torch.float32
    if values.dtype != wanted or list(values.shape) != shape:
        raise ValueError(f"{name} must be {wanted} {shape}, got {values.dtype} {list(values.shape)}")
    check_device(values, logits_RV, name)


def check_inverse_temperature(inverse_temperature_R: Tensor | None, logits_RV: Tensor) -> None:
    if inverse_temperature_R is not None:
        check_row_values(inverse_temperature_R, [logits_RV.shape[0]], logits_RV, "inverse_temperature")


def check_device(tensor: Tensor, logits_RV: Tensor, name: str) -> None:
    if tensor.device != logits_RV.device:
        raise ValueError(f"{name} must be on logits' device {logits_RV.device}, got {tensor.device}")
