"""Activation checkpointing: what a layer's backward pass computes again instead of keeping it."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from titan_opd.models import Decoder

_aten, _functional = torch.ops.aten, torch.ops._c10d_functional
# What costs time to compute again: products, attention, and what crosses processes. The rest is elementwise.
EXPENSIVE = frozenset(
    {
        _aten.mm.default,
        _aten.addmm.default,
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
        mode: "none"; "full": only each layer's input is kept; "selective": the results of `EXPENSIVE` operations and
            of the attention kernels of other packages, too.
    """
    if mode == "none":
        return
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}  # a layer draws nothing
    if mode == "selective":
        options["context_fn"] = functools.partial(create_selective_checkpoint_contexts, _keep_expensive)
    for layer in decoder.model.layers:
        layer.checkpoint = functools.partial(checkpoint, **options)


def _keep_expensive(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    name = operation.namespace if hasattr(operation, "namespace") else ""
    if operation in EXPENSIVE or name in ("flash_attn", "torch_attn"):
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE
