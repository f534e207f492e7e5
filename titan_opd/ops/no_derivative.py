"""Operators that autograd must not pass through: an error where it would otherwise go on without a gradient."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor


def refuse_to_differentiate(name: str, reason: str, *arguments: Any) -> None:
    """Raises RuntimeError when autograd records and an argument, or a tensor in a list among them, needs a gradient."""
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in _tensors(arguments)):
        raise RuntimeError(
            f"{name} has no derivative: {reason}; call it under torch.no_grad(), or with detached tensors"
        )


def register_without_derivative(name: str, reason: str) -> None:
    """Make the compiled operator `titan_opd::<name>` refuse to be differentiated, and compute as ever otherwise."""

    def refuse_or_call(*arguments: Any, **options: Any) -> Any:
        refuse_to_differentiate(name, reason, *arguments, *options.values())
        with torch._C._AutoDispatchBelowAutograd():
            return getattr(torch.ops.titan_opd, name)(*arguments, **options)

    torch.library.impl(f"titan_opd::{name}", "Autograd")(refuse_or_call)


def _tensors(arguments: Any) -> Iterator[Tensor]:
    for one in arguments:
        if isinstance(one, Tensor):
            yield one
        elif isinstance(one, (list, tuple)):
            yield from _tensors(one)
