"""Activation checkpointing: what a layer's backward pass computes again instead of keeping it."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from titan_opd.models import Decoder

_aten, _functional = torch.ops.aten, torch.ops._c10d_functional
# Attention, whose cost grows with the square of the length while its result does not, and what crosses processes.
# Products are computed again: their results are most of what a layer would keep.
KEPT = frozenset(
    {
        _aten._scaled_dot_product_flash_attention.default,
        _aten._scaled_dot_product_flash_attention_for_cpu.default,
        _aten._scaled_dot_product_efficient_attention.default,
        _aten._scaled_dot_product_cudnn_attention.default,
        _functional.all_reduce.default,
        _functional.reduce_scatter_tensor.default,
        _functional.all_gather_into_tensor.default,
        _functional.wait_tensor.default,
    }
)


def apply_activation_checkpointing(decoder: Decoder, mode: str) -> None:
    """Keep less of each layer for the backward pass.

    Args:
        decoder: changed in place.
        mode: "none"; "full": only each layer's input is kept; "selective": the results of `KEPT` operations, too, and
            of the attention kernels of other packages.
    """
    if mode == "none":
        return
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}  # a layer draws nothing
    if mode == "selective":
        options["context_fn"] = functools.partial(create_selective_checkpoint_contexts, _policy)
    for layer in decoder.model.layers:
        layer.checkpoint = functools.partial(checkpoint, **options)


def _policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    if operation in KEPT or getattr(operation, "namespace", "") in ("flash_attn", "torch_attn"):
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE
