"""The trainer's processes: one, or those that torchrun started. The same code serves both."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.rendezvous import rendezvous

from titan_opd.config.schema import ParallelConfig
from titan_opd.parallel.lost import naming_lost_processes
from titan_opd.parallel.mesh import build_mesh, set_timeout

T = TypeVar("T")


@dataclass(frozen=True)
class World:
    """This process among the trainer's processes.

    Processes that differ only on the axis tp hold parts of the same matrices and train on the same samples; whatever
    counts samples is shared, and summed, over the others: the data-parallel ones.

    Attributes:
        rank: of this process, from 0.
        size: number of processes.
        device: where this process computes.
        mesh: [dp_replicate, dp_shard, tp], and dp.
    """

    rank: int
    size: int
    device: torch.device
    mesh: DeviceMesh

    @property
    def is_main(self) -> bool:
        """Whether this process writes files and talks to the person."""
        return self.rank == 0

    @property
    def dp_size(self) -> int:
        """Into how many shares the samples are divided."""
        return self.size // self.tp_size

    @property
    def dp_rank(self) -> int:
        """Which share this process has."""
        return self.rank // self.tp_size

    @property
    def tp_size(self) -> int:
        """How many processes have the same share."""
        return self.mesh["tp"].size()

    @property
    def tp_rank(self) -> int:
        """This process among them."""
        return self.rank % self.tp_size

    def describe_shares(self) -> str:
        """Who shares the samples, for errors."""
        if self.tp_size == 1:
            return f"{self.size} processes"
        return f"{self.dp_size} groups of parallel.tp = {self.tp_size} processes"

    def share(self, items: Sequence[T]) -> list[T]:
        """This process's items: every `dp_size`-th, so that neighbours (answers to one prompt) are spread."""
        return list(items[self.dp_rank :: self.dp_size])

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum over the shares of a CPU tensor of the same shape everywhere."""
        return self._reduce(tensor, dist.ReduceOp.SUM)

    def max(self, tensor: Tensor) -> Tensor:
        """The largest over the shares, element by element."""
        return self._reduce(tensor, dist.ReduceOp.MAX)

    def gather_shares(self, value: T) -> list[T]:
        """The values of all shares, in order, in every process."""
        values: list[Any] = [None] * self.dp_size
        dist.all_gather_object(values, value, group=self._dp_group)
        return values

    def gather(self, value: T) -> list[T]:
        """The values of all processes, by rank, in every process."""
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def agree(self, value: T) -> T:
        """The value of the first of the processes that have this one's share, in all of them."""
        if self.tp_size == 1:
            return value
        values: list[Any] = [value]
        dist.broadcast_object_list(values, group=self.mesh.get_group("tp"), group_src=0)
        return values[0]

    def barrier(self) -> None:
        """Wait until every process is here."""
        dist.barrier()

    def _reduce(self, tensor: Tensor, operation: dist.ReduceOp.RedOpType) -> Tensor:
        total = tensor.clone()
        dist.all_reduce(total, operation, group=self._dp_group)
        return total

    @property
    def _dp_group(self) -> dist.ProcessGroup:
        return self.mesh.get_group("dp")


@contextmanager
def open_world(config: ParallelConfig = ParallelConfig()) -> Iterator[World]:  # noqa: B008 (frozen)
    """Join the processes that torchrun started, or be the only one, and arrange them as `config` says.

    A lone process has a process group too, over a store in its own memory: it needs no port, and whatever follows has
    one code path. A group that exists already is used and left open.

    Raises:
        ValueError: the axes of `config` do not multiply to the number of processes.
        LostProcessError: in the block, another process ended or did not answer in time; it says which and where.
    """
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
    opened = not dist.is_initialized()
    guard: AbstractContextManager[None] = nullcontext()
    if opened:
        timeout = timedelta(seconds=config.timeout_seconds)
        store, rank, size = dist.HashStore(), 0, 1
        if "RANK" in os.environ:
            store, rank, size = next(rendezvous("env://", timeout=timeout))
        backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
        groups = dist.PrefixStore("groups", store)
        dist.init_process_group(backend, store=groups, rank=rank, world_size=size, timeout=timeout)
        guard = naming_lost_processes(dist.PrefixStore("ends", store), rank, size, config.timeout_seconds)
    size = dist.get_world_size()
    try:
        with guard:
            mesh = build_mesh(config, device.type, size)
            if opened:
                set_timeout(mesh, config.timeout_seconds)
            yield World(dist.get_rank(), size, device, mesh)
    finally:
        if opened:
            dist.destroy_process_group()
        if opened and size > 1:
            # Gloo's threads still let go of the last collective's tensors, and need the interpreter's lock for it: an
            # interpreter that began to end just now would abort the process. So they get a moment to themselves.
            time.sleep(0.1)
