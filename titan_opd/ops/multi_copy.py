"""Copies of many tensors into others, each cast to its destination's type, in one call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from titan_opd.ops.extension import has_kernel
from titan_opd.ops.no_derivative import refuse_to_differentiate, register_without_derivative

_NO_DERIVATIVE = "it overwrites its destinations"


def multi_copy(sources: Sequence[Tensor], destinations: Sequence[Tensor]) -> None:
    """Copy each source into its destination, rounded once to the nearest even where the destination is narrower.

    On a GPU one launch serves tens of tensors; on the CPU all tensors together are shared among the threads.

    Args:
        sources: any number of tensors on one device. float32, bfloat16 and float16 have kernels; other dtypes are
            copied one by one.
        destinations: as many, each with its source's shape, on the same device; overwritten. Both tensors of a pair
            may be views, if they are rows of adjacent elements: contiguous of any shape, or slices of such tensors in
            one dimension. No destination may share memory with another, or with a source.

    Raises:
        ValueError: the lists differ in length, or a pair in shape or device.
        RuntimeError: views are no rows of adjacent elements, memory is shared, or autograd would have to differentiate
            this; destinations are as they were.
    """
    check_pairs(sources, destinations)
    refuse_to_differentiate("multi_copy", _NO_DERIVATIVE, *sources, *destinations)
    pairs = list(zip(sources, destinations, strict=True))
    with_kernel = [pair for pair in pairs if has_kernel(pair[0]) and has_kernel(pair[1])]
    if with_kernel:
        torch.ops.titan_opd.multi_copy(*(list(side) for side in zip(*with_kernel, strict=True)))
    if len(with_kernel) < len(pairs):
        multi_copy_reference(*zip(*(pair for pair in pairs if not all(map(has_kernel, pair))), strict=True))


def check_pairs(sources: Sequence[Tensor], destinations: Sequence[Tensor]) -> None:
    """Raise a ValueError when the lists differ in length, or a pair in shape or device."""
    if len(sources) != len(destinations):
        raise ValueError(f"destinations must be as many as sources, got {len(destinations)} for {len(sources)}")
    for i, (source, destination) in enumerate(zip(sources, destinations, strict=True)):
        if source.shape != destination.shape:
            raise ValueError(
                f"destinations[{i}] must have the shape of sources[{i}], {list(source.shape)}, got "
                f"{list(destination.shape)}"
            )
        if source.device != sources[0].device or destination.device != sources[0].device:
            raise ValueError(
                f"sources[{i}] and destinations[{i}] must be on the first source's device {sources[0].device}, got "
                f"{source.device} and {destination.device}"
            )


def multi_copy_reference(sources: Sequence[Tensor], destinations: Sequence[Tensor]) -> None:
    """`multi_copy` for any device and dtype, one tensor after the other."""
    for source, destination in zip(sources, destinations, strict=True):
        destination.copy_(source)


@torch.library.register_fake("titan_opd::multi_copy")
def _multi_copy_fake(*_: Any, **__: Any) -> None:
    return None


register_without_derivative("multi_copy", _NO_DERIVATIVE)
