"""What travels: rows of a parameter under its Hugging Face name."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from titan_opd.ops import multi_copy, multi_copy_digests, multi_digest


@dataclass(frozen=True, eq=False)
class Piece:
    """Some rows of a parameter, or all of it.

    Attributes:
        name: the parameter's, as Hugging Face has it.
        first_row: where `tensor` begins in the parameter's first dimension.
        tensor: [rows, ...] contiguous; of the type that is to be stored, or cast to it by whoever copies it.
        stays: its memory is left as it is until the update is over, so that who needs it until then need not copy it.
    """

    name: str
    first_row: int
    tensor: Tensor
    stays: bool = False

    def rows_of(self, parameter: Tensor) -> Tensor:
        """The same rows of `parameter`, as a view."""
        return parameter.detach().narrow(0, self.first_row, self.tensor.shape[0])


@dataclass(frozen=True)
class WeightSpec:
    """What a parameter must look like.

    Attributes:
        shape: whole, as Hugging Face has it.
        dtype: as stored.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_elements(self) -> int:
        """Of it."""
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """That it takes."""
        return self.num_elements * self.dtype.itemsize


def copy_all(sources: Sequence[Tensor], destinations: Sequence[Tensor]) -> None:
    """Copy each source into its destination, cast to its type, between devices too; all in one call on one device."""
    if not sources or sources[0].device == destinations[0].device:
        multi_copy(sources, destinations)
        return
    for source, destination in zip(sources, destinations, strict=True):
        destination.copy_(source)


def copy_all_digested(sources: Sequence[Tensor], destinations: Sequence[Tensor]) -> list[int]:
    """`copy_all`, and the digest (`titan_opd.ops.multi_digest`) of each source's bytes as they were cast."""
    if not sources or sources[0].device == destinations[0].device:
        return multi_copy_digests(sources, destinations)
    cast = [source.to(destination.dtype) for source, destination in zip(sources, destinations, strict=True)]
    copy_all(cast, destinations)
    return multi_digest(cast)
