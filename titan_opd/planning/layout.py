"""A layout of many processes tried in one: the run's own mesh and parallelisation, on shapes alone.

PyTorch's `fake` backend is a world of any size whose collectives do nothing; the model is on the meta device, which has
no storage. What is found is what each process would hold: the placement of each parameter and the shape of its shard.
No forward pass runs: activations of the wrong shape would not be found, only what `parallelize` refuses.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from titan_opd.assemble import check_world
from titan_opd.config import Config
from titan_opd.learner import DistillationModel
from titan_opd.models import Decoder, DecoderConfig
from titan_opd.parallel import World, open_world, parallelize
from titan_opd.planning.parts import Grid, divide


@dataclass(frozen=True)
class Shard:
    """What a process holds of one parameter.

    Attributes:
        name: Hugging Face's.
        shape: of the whole.
        local_shape: of the shard.
        placements: on the axes of the mesh that the parameter knows, such as "dp_shard: Shard(dim=0)".
    """

    name: str
    shape: tuple[int, ...]
    local_shape: tuple[int, ...]
    placements: str


@dataclass(frozen=True)
class RankLayout:
    """One process of the world.

    Attributes:
        rank: of the process.
        grid: the axes, and its place on them.
        shards: of all parameters, in order.
    """

    rank: int
    grid: Grid
    shards: tuple[Shard, ...]

    @property
    def num_elements(self) -> int:
        return sum(math.prod(shard.local_shape) for shard in self.shards)


def try_layout(config: Config, student: DecoderConfig, num_processes: int) -> tuple[RankLayout, RankLayout]:
    """The first and the last process of the world that `config` asks for; where rows do not divide, the last has least.

    Raises:
        ValueError: what the run would raise: axes that do not multiply to `num_processes`, answers that the processes
            cannot share, heads or units that `parallel.tp` does not divide.
    """
    first, last = (_try_rank(config, student, rank, num_processes) for rank in (0, num_processes - 1))
    return first, last


def _try_rank(config: Config, student: DecoderConfig, rank: int, num_processes: int) -> RankLayout:
    with _fake_world(rank, num_processes), open_world(config.parallel) as world:
        check_world(config, world)
        with torch.device("meta"):
            decoder = Decoder(student)
        model = DistillationModel(
            decoder, vocab_size=student.vocab_size, logits_chunk_mb=config.training.logits_chunk_mb
        )
        parallelize(model, decoder, world.mesh, config.training, config.parallel, forward_methods=("sweep",))
        shards = tuple(_shard(name, parameter) for name, parameter in decoder.named_parameters())
        grid = _grid(config, world)
    _check(shards, student, grid)
    return RankLayout(rank, grid, shards)


@contextmanager
def _fake_world(rank: int, num_processes: int) -> Iterator[None]:
    dist.init_process_group("fake", rank=rank, world_size=num_processes, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def _grid(config: Config, world: World) -> Grid:
    replicate, shard, tp = (world.mesh[axis].size() for axis in ("dp_replicate", "dp_shard", "tp"))
    return Grid(
        replicate=replicate,
        shard=shard,
        tp=tp,
        sequence_parallel=config.parallel.sequence_parallel,
        shard_rank=world.mesh["dp_shard"].get_local_rank(),
        tp_rank=world.tp_rank,
    )


def _shard(name: str, parameter: torch.Tensor) -> Shard:
    assert isinstance(parameter, DTensor), f"{name} is not spread over the processes"
    axes = parameter.device_mesh.mesh_dim_names
    placements = ", ".join(f"{axis}: {one}" for axis, one in zip(axes, parameter.placements, strict=True))
    return Shard(name, tuple(parameter.shape), tuple(parameter.to_local().shape), placements)


def _check(shards: tuple[Shard, ...], student: DecoderConfig, grid: Grid) -> None:
    """The plan's own arithmetic must say what the run's code has done."""
    planned = {part.name: part.shard_shape for part in divide(student, grid).all}
    found = {shard.name: shard.local_shape for shard in shards}
    assert planned == found, {name: (planned[name], shape) for name, shape in found.items() if planned[name] != shape}
