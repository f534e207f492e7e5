"""Which part of each parameter a process holds: the shapes that tensor parallelism and FSDP leave to it.

FSDP gathers and reduces parameters in groups: one for each layer (the last with the final norm), and the root with the
embedding and the output projection.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from titan_opd.models import Decoder, DecoderConfig
from titan_opd.parallel.tensor_parallel import check_divisible, plan


@dataclass(frozen=True)
class Grid:
    """How many processes are on each axis of the mesh, and where one of them is on it.

    Attributes:
        replicate, shard, tp: sizes of the axes.
        sequence_parallel: whether the tokens of the residual stream are divided over `tp`.
        shard_rank, tp_rank: of the process; 0 has the most wherever a dimension does not divide.
    """

    replicate: int = 1
    shard: int = 1
    tp: int = 1
    sequence_parallel: bool = False
    shard_rank: int = 0
    tp_rank: int = 0

    @property
    def dp(self) -> int:
        """Shares of the samples."""
        return self.replicate * self.shard


@dataclass(frozen=True)
class Part:
    """What one process holds of a parameter.

    Attributes:
        name: Hugging Face's.
        shape: of the whole.
        tp_shape: of the process's part on the axis `tp`, which FSDP gathers.
        shard_shape: of its shard of that.
        padded_rows: of every shard; where the rows do not divide, the last shards have fewer, or none.
    """

    name: str
    shape: tuple[int, ...]
    tp_shape: tuple[int, ...]
    shard_shape: tuple[int, ...]
    padded_rows: int

    @property
    def gathered(self) -> int:
        """Elements of the gathered parameter."""
        return math.prod(self.tp_shape)

    @property
    def held(self) -> int:
        """Elements of the process's shard."""
        return math.prod(self.shard_shape)

    @property
    def padded(self) -> int:
        """Elements of a shard with its padding: what one process sends in a gather."""
        return self.padded_rows * math.prod(self.tp_shape[1:])


@dataclass(frozen=True)
class Group:
    """Parameters that are gathered and reduced together."""

    name: str
    parts: tuple[Part, ...]

    @property
    def gathered(self) -> int:
        return sum(part.gathered for part in self.parts)

    @property
    def held(self) -> int:
        return sum(part.held for part in self.parts)

    @property
    def padded(self) -> int:
        return sum(part.padded for part in self.parts)


@dataclass(frozen=True)
class Parts:
    """A decoder's parameters as a process holds them.

    Attributes:
        layers: the groups of the layers, in order.
        root: the embedding and the output projection.
    """

    layers: tuple[Group, ...]
    root: Group

    @property
    def groups(self) -> tuple[Group, ...]:
        return (*self.layers, self.root)

    @property
    def all(self) -> tuple[Part, ...]:
        return tuple(part for group in self.groups for part in group.parts)


def whole_shapes(config: DecoderConfig) -> dict[str, tuple[int, ...]]:
    """Shapes of a decoder's parameters, by name; a tied output projection is not among them."""
    with torch.device("meta"):
        decoder = Decoder(config)
    return {name: tuple(parameter.shape) for name, parameter in decoder.named_parameters()}


def divide(config: DecoderConfig, grid: Grid) -> Parts:
    """The parts of the process at `grid`'s ranks.

    Raises:
        ValueError: heads or feed-forward units cannot be shared by the axis `tp`.
    """
    check_divisible(config, grid.tp)
    styles = plan(config, sequence_parallel=grid.sequence_parallel) if grid.tp > 1 else {}
    layers: list[list[Part]] = [[] for _ in range(config.num_layers)]
    root: list[Part] = []
    for name, shape in whole_shapes(config).items():
        module = name.rpartition(".")[0]
        style = next((style for pattern, style in styles.items() if fnmatchcase(module, pattern)), None)
        tp_shape = _chunk(shape, _tp_dim(module, style), grid.tp, grid.tp_rank)
        part = Part(
            name=name,
            shape=shape,
            tp_shape=tp_shape,
            shard_shape=_chunk(tp_shape, 0, grid.shard, grid.shard_rank),
            padded_rows=-(-tp_shape[0] // grid.shard),
        )
        _group_of(module, layers, root).append(part)
    groups = tuple(Group(f"layer {index}", tuple(parts)) for index, parts in enumerate(layers))
    return Parts(groups, Group("embedding and output projection", tuple(root)))


def _group_of(module: str, layers: list[list[Part]], root: list[Part]) -> list[Part]:
    if module == "model.norm":
        return layers[-1]
    if module.startswith("model.layers."):
        return layers[int(module.split(".")[2])]
    return root


def _tp_dim(module: str, style: object) -> int | None:
    """The dimension that a style cuts; PyTorch's row-wise style cuts an embedding by its rows, the vocabulary."""
    if isinstance(style, ColwiseParallel) or module == "model.embed_tokens":
        return 0
    return 1 if isinstance(style, RowwiseParallel) else None


def _chunk(shape: Sequence[int], dim: int | None, count: int, rank: int) -> tuple[int, ...]:
    """The shape of chunk `rank` of `count`, as torch.chunk cuts; chunks beyond its last are empty."""
    if dim is None:
        return tuple(shape)
    size = -(-shape[dim] // count)
    own = max(0, min(shape[dim], (rank + 1) * size) - rank * size)
    return (*shape[:dim], own, *shape[dim + 1 :])
