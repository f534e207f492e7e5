"""The trainer's processes: one, or those that torchrun started. The same code serves both."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

T = TypeVar("T")


@dataclass(frozen=True)
class World:
    """This process among the trainer's processes.

    Attributes:
        rank: of this process, from 0.
        size: number of processes; each holds a shard of the student and takes its share of the samples.
        device: where this process computes.
        mesh: [size], axis "dp", for FSDP.
    """

    rank: int
    size: int
    device: torch.device
    mesh: DeviceMesh

    @property
    def is_main(self) -> bool:
        """Whether this process writes files and talks to the person."""
        return self.rank == 0

    def share(self, items: Sequence[T]) -> list[T]:
        """This process's items: every `size`-th, so that neighbours (answers to one prompt) are spread."""
        return list(items[self.rank :: self.size])

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum over processes of a CPU tensor of the same shape everywhere."""
        return self._reduce(tensor, dist.ReduceOp.SUM)

    def max(self, tensor: Tensor) -> Tensor:
        """The largest over processes, element by element."""
        return self._reduce(tensor, dist.ReduceOp.MAX)

    def gather(self, value: T) -> list[T]:
        """The values of all processes, by rank, in every process."""
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def barrier(self) -> None:
        """Wait until every process is here."""
        dist.barrier()

    def _reduce(self, tensor: Tensor, operation: dist.ReduceOp.RedOpType) -> Tensor:
        total = tensor.clone()
        dist.all_reduce(total, operation)
        return total


@contextmanager
def open_world() -> Iterator[World]:
    """Join the processes that torchrun started, or be the only one.

    A lone process has a process group too, over a store in its own memory: it needs no port, and whatever follows has
    one code path. A group that exists already is used and left open.
    """
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
    opened = not dist.is_initialized()
    if opened:
        backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
        lone = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
        dist.init_process_group(backend, **lone)
    size = dist.get_world_size()
    try:
        mesh = init_device_mesh(device.type, (size,), mesh_dim_names=("dp",))
        yield World(dist.get_rank(), size, device, mesh)
    finally:
        if opened:
            dist.destroy_process_group()
        if opened and size > 1:
            # Gloo's threads still let go of the last collective's tensors, and need the interpreter's lock for it: an
            # interpreter that began to end just now would abort the process. So they get a moment to themselves.
            time.sleep(0.1)
