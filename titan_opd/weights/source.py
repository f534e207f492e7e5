"""Where new weights come from: the trainer's parameters under their Hugging Face names.

A parameter that is split among processes is cast once, on the shard where its float32 master lives, and then gathered:
rounding is element by element, so the result is that of casting the whole, with less to send. One that this process
holds whole is handed out as it is: it is cast on its way, by whoever copies it, which is one pass over memory less.

Shape suffix: P processes that each hold a part.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from titan_opd.models import Decoder
from titan_opd.ops import multi_copy
from titan_opd.ops.collectives import all_gather_single
from titan_opd.parallel import whole_tensor
from titan_opd.weights.errors import TransferError
from titan_opd.weights.pieces import Piece, WeightSpec
from titan_opd.weights.shards import Part, parts_of, split_axes


def named_weights(decoder: Decoder) -> Iterator[tuple[str, Tensor]]:
    """Every parameter once and whole, in a fixed order; a tied output projection goes by its embedding's name only.

    A sharded parameter is gathered when its turn comes, so all processes must walk through the names together. No more
    than one whole tensor is held.
    """
    for name, parameter in decoder.named_parameters():
        yield name, whole_tensor(parameter)


class Source(Protocol):
    """Where weights come from, as they are to be stored: cast (`WeightSource`), and quantised (`QuantizedSource`).

    Attributes:
        specs: what is handed out, by Hugging Face name.
    """

    specs: Mapping[str, WeightSpec]

    def buckets(self) -> Iterator[list[Piece]]:
        """All rows of all parameters, each once; cast by whoever copies them where they are not of `specs`' type."""

    def take_part(self) -> None:
        """Walk through all buckets for the sake of the other processes, and use none."""


class WeightSource:
    """Hands out all weights of a decoder, bucket by bucket.

    All processes that share the decoder must walk through `buckets` together. While one bucket is in use the next is
    being gathered, and no more than these two are held.

    Args:
        decoder: the student; read, never written. Its parameters must be those that it will have for good.
        dtype: what the weights are to be stored as.
        bucket_bytes: of one bucket, with what its gathering needs; a larger row of a parameter still goes whole.
        timeout: seconds for one gathering.

    Attributes:
        dtype: what the weights are to be stored as. What it gathers is of this type, the rest of the trainer's own.
        held_bytes: of the buckets that are held now.
        peak_bytes: the most that were ever held.
    """

    def __init__(self, decoder: Decoder, *, dtype: torch.dtype, bucket_bytes: int, timeout: float) -> None:
        if bucket_bytes <= 0:
            raise ValueError(f"buckets of {bucket_bytes} bytes hold nothing; set weights.bucket_mb above 0")
        self.dtype = dtype
        self.held_bytes = self.peak_bytes = 0
        # Once: walking through a deep model's modules takes as long as copying 40 MB, and an update does little else.
        self._parameters = [(name, parameter.detach()) for name, parameter in decoder.named_parameters()]
        self._bucket_bytes = bucket_bytes
        self._timeout = timeout
        self._groups: dict[tuple[DeviceMesh, tuple[int, ...]], dist.ProcessGroup] = {}

    @property
    def specs(self) -> dict[str, WeightSpec]:
        """What is handed out, in this order."""
        return {name: WeightSpec(tuple(parameter.shape), self.dtype) for name, parameter in self._parameters}

    @torch.no_grad()
    def buckets(self) -> Iterator[list[Piece]]:
        """All rows of all parameters, each once. A bucket's tensors are valid until the next one is asked for, and must
        not be written: some are the trainer's own.

        Raises:
            TransferError: a gathering failed or took too long; it names this rank, the tensors and the collective.
        """
        self.held_bytes = 0
        waiting: _Gathering | None = None
        for blocks in self._plan():
            following = self._start(blocks)
            if waiting is not None:
                yield self._finish(waiting)
                self.held_bytes -= waiting.num_bytes
            waiting = following
        if waiting is not None:
            yield self._finish(waiting)
            self.held_bytes -= waiting.num_bytes

    def take_part(self) -> None:
        """Walk through all buckets for the sake of the other processes, and use none."""
        for _ in self.buckets():
            pass

    # ---- What goes into which bucket ---------------------------------------------------------------------------------

    def _plan(self) -> Iterator[list[_Block]]:
        """The same on every process: it depends on shapes and placements alone."""
        bucket: list[_Block] = []
        num_bytes = 0
        for name, parameter in self._parameters:
            for block in self._blocks(name, parameter):
                if bucket and (num_bytes + block.num_bytes > self._bucket_bytes or block.group != bucket[0].group):
                    yield bucket
                    bucket, num_bytes = [], 0
                bucket.append(block)
                num_bytes += block.num_bytes
        if bucket:
            yield bucket

    def _blocks(self, name: str, parameter: Tensor) -> Iterator[_Block]:
        axes = split_axes(parameter)
        if not axes:
            whole = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            yield _Block(name, whole, 0, len(whole), 0)
            return
        parts, local = parts_of(parameter, axes), parameter.to_local()
        group = self._group(parameter.device_mesh, axes)
        row_bytes = max(math.prod(part.row_shape) for part in parts) * self.dtype.itemsize
        copies = len(parts) + 1  # everybody's rows, and what this process sends
        if any(part.columns is not None for part in parts):
            copies += len(parts)  # and the rows that are put together
        rows_a_block = max(1, self._bucket_bytes // max(1, row_bytes * copies))
        num_rows = max(part.num_rows for part in parts)
        for first in range(0, num_rows, rows_a_block):
            last = min(num_rows, first + rows_a_block)
            num_bytes = (last - first) * row_bytes * copies
            yield _Block(name, local, first, last, num_bytes, group, parts, parameter.shape)

    def _group(self, mesh: DeviceMesh, axes: tuple[int, ...]) -> dist.ProcessGroup:
        """All processes along some axes; made when it is first needed, which all processes do in one order."""
        if len(axes) == 1:
            return mesh.get_group(axes[0])
        key = (mesh, axes)
        if key not in self._groups:
            assert mesh.mesh_dim_names is not None
            names = tuple(mesh.mesh_dim_names[axis] for axis in axes)
            self._groups[key] = mesh[names]._flatten().get_group()
        return self._groups[key]

    # ---- Gathering ---------------------------------------------------------------------------------------------------

    def _start(self, blocks: list[_Block]) -> _Gathering:
        gathering = _Gathering(blocks, num_bytes=sum(block.num_bytes for block in blocks))
        self.held_bytes += gathering.num_bytes
        self.peak_bytes = max(self.peak_bytes, self.held_bytes)
        group = blocks[0].group
        if group is None:
            return gathering
        sizes = [block.num_elements for block in blocks]
        local = torch.empty(sum(sizes), dtype=self.dtype, device=blocks[0].local.device)
        sources = [block.rows().contiguous().view(-1) for block in blocks]
        slots = local.split(sizes)
        multi_copy(sources, [slot[: len(rows)] for slot, rows in zip(slots, sources, strict=True)])
        gathering.local = local
        gathering.gathered = torch.empty(group.size(), len(local), dtype=self.dtype, device=local.device)
        try:
            gathering.work = all_gather_single(gathering.gathered.view(-1), local, group=group, async_op=True)
        except RuntimeError as error:
            raise self._error(gathering, error) from error
        return gathering

    def _finish(self, gathering: _Gathering) -> list[Piece]:
        if gathering.work is not None:
            try:
                gathering.work.wait(timedelta(seconds=self._timeout))
            except RuntimeError as error:
                raise self._error(gathering, error) from error
            gathering.local = None
        pieces = []
        begin = 0
        for block in gathering.blocks:
            if block.group is None:
                pieces.append(Piece(block.name, 0, block.local, stays=True))
                continue
            assert gathering.gathered is not None
            pieces += block.pieces(gathering.gathered[:, begin : begin + block.num_elements])
            begin += block.num_elements
        return pieces

    def _error(self, gathering: _Gathering, error: RuntimeError) -> TransferError:
        names = [block.name for block in gathering.blocks]
        shown = repr(names[0]) if len(names) == 1 else f"{names[0]!r} to {names[-1]!r}"
        return TransferError(
            f"rank {dist.get_rank()}: all_gather of {shown} ({gathering.num_bytes} bytes) failed within "
            f"{self._timeout:g} s; other ranks are dead, late, or walk through the weights in another order ({error})"
        )


@dataclass(frozen=True, eq=False)
class _Block:
    """Rows [first, last) of what each process holds of a parameter.

    Attributes:
        local: what this process holds.
        num_bytes: that its gathering takes; 0 for what this process holds whole.
        group: of the processes that hold a part; None where this one holds all.
        parts: theirs, by rank.
        whole: the parameter's shape.
    """

    name: str
    local: Tensor
    first: int
    last: int
    num_bytes: int
    group: dist.ProcessGroup | None = None
    parts: tuple[Part, ...] = ()
    whole: torch.Size = torch.Size()

    @property
    def num_elements(self) -> int:
        """Of the process that has most."""
        return (self.last - self.first) * max(math.prod(part.row_shape) for part in self.parts)

    def rows(self) -> Tensor:
        """Those of this process; some have fewer, or none."""
        return self.local[self.first : self.last]

    def pieces(self, slots: Tensor) -> list[Piece]:
        """The rows that all processes sent, [P, elements]; what several have of the same rows is put together."""
        pieces = []
        begun: dict[tuple[int, int], Tensor] = {}
        for part, slot in zip(self.parts, slots, strict=True):
            num_rows = min(self.last, part.num_rows) - self.first
            if num_rows <= 0:
                continue
            shape = (num_rows, *part.row_shape)
            rows, first_row = slot[: math.prod(shape)].view(shape), part.first_row + self.first
            if part.columns is None:
                pieces.append(Piece(self.name, first_row, rows))
                continue
            key = (first_row, num_rows)
            if key not in begun:
                begun[key] = rows.new_empty(num_rows, *self.whole[1:])
                pieces.append(Piece(self.name, first_row, begun[key]))
            begun[key][:, slice(*part.columns)] = rows
        return pieces


@dataclass(eq=False)
class _Gathering:
    """A bucket on its way: `gathered` is [P, elements] once `work` is done."""

    blocks: list[_Block]
    num_bytes: int
    local: Tensor | None = None
    gathered: Tensor | None = None
    work: dist.Work | None = field(default=None)
