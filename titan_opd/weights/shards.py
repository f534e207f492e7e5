"""Which part of a parameter each process holds, when FSDP and tensor parallelism have cut it."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset


@dataclass(frozen=True)
class Part:
    """What one process holds.

    Attributes:
        first_row, num_rows: of the whole parameter's rows.
        columns: [begin, end) of its columns; None: all, or it has none.
        row_shape: of one of these rows.
    """

    first_row: int
    num_rows: int
    columns: tuple[int, int] | None
    row_shape: tuple[int, ...]


def split_axes(parameter: Tensor) -> tuple[int, ...]:
    """The axes of the parameter's mesh over which it is cut; empty where this process holds all of it."""
    if not isinstance(parameter, DTensor):
        return ()
    placements, mesh = parameter.placements, parameter.device_mesh
    return tuple(
        axis for axis, placement in enumerate(placements) if not placement.is_replicate() and mesh.size(axis) > 1
    )


def parts_of(parameter: DTensor, axes: tuple[int, ...]) -> tuple[Part, ...]:
    """The part of each process along `axes`, in the order of their ranks.

    Args:
        parameter: cut along its first two dimensions at most.
        axes: from `split_axes`.
    """
    mesh, shape = parameter.device_mesh, parameter.shape
    parts = []
    for place in itertools.product(*(range(mesh.size(axis)) for axis in axes)):
        coordinate = [0] * mesh.ndim
        for axis, index in zip(axes, place, strict=True):
            coordinate[axis] = index
        size, offset = _compute_local_shape_and_global_offset(shape, mesh.shape, coordinate, parameter.placements)
        columns = None
        if len(size) > 1 and size[1] != shape[1]:
            columns = (offset[1], offset[1] + size[1])
        parts.append(Part(offset[0], size[0], columns, tuple(size[1:])))
    return tuple(parts)
