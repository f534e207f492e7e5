"""New weights on their way to engines in other processes: published by the trainer, fetched by whoever needs them.

A version's weights are cut into parts of about `bucket_mb`, cast once, and kept in a payload store until two newer
versions exist. Engines fetch them when it suits them; the trainer goes on.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from titan_opd.channel import Address, PayloadFetcher, PayloadStore, RecordLimits

WEIGHT_LIMITS = RecordLimits(frame_bytes=1 << 36, record_bytes=1 << 36)  # one tensor can be several GiB
_ALIGNMENT = 64  # bytes; each tensor of a part begins at a multiple


@dataclass(frozen=True, eq=False)
class WeightPart:
    """Several tensors, end to end.

    Attributes:
        bytes: uint8, all tensors' bytes with gaps for alignment.
        layout: [name, dtype, shape, first byte] of each tensor.
    """

    bytes: Tensor
    layout: list[Any] = field(default_factory=list)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """The names and tensors, as views of the bytes."""
        for name, dtype_name, shape, begin in self.layout:
            dtype = getattr(torch, dtype_name)
            size = torch.Size(shape).numel() * dtype.itemsize
            yield name, self.bytes[begin : begin + size].view(dtype).view(shape)


class WeightPublisher:
    """The trainer's end.

    Args:
        store: holds two versions at a time; None in processes that only take part in gathering the weights.
        dtype: what the weights are cast to.
        bucket_mb: size of a part, MiB; a larger tensor is a part of its own.
    """

    def __init__(self, store: PayloadStore | None, *, dtype: torch.dtype, bucket_mb: float) -> None:
        self._store = store
        self._dtype = dtype
        self._bucket_bytes = int(bucket_mb * 2**20)
        self._parts: dict[int, list[str]] = {}

    def publish(self, named_tensors: Iterable[tuple[str, Tensor]], version: int) -> int:
        """Keep the weights of `version` for fetching, and forget those before the one that was newest.

        All processes that share the tensors must call it together.

        Returns:
            In how many parts.

        Raises:
            ChannelError: the store has no room.
        """
        for old in sorted(self._parts)[:-1]:
            self._release(old)
        keys: list[str] = []
        for part in self._cut(named_tensors):
            if self._store is not None:
                keys.append(part_key(version, len(keys)))
                self._store.put(keys[-1], part, timeout=0.0)
        self._parts[version] = keys
        return len(keys)

    def _release(self, version: int) -> None:
        keys = self._parts.pop(version)
        if self._store is not None:
            self._store.release(keys)

    def _cut(self, named_tensors: Iterable[tuple[str, Tensor]]) -> Iterator[WeightPart]:
        waiting: list[tuple[str, Tensor]] = []
        num_bytes = 0
        for name, tensor in named_tensors:
            if self._store is None:
                continue
            size = tensor.numel() * self._dtype.itemsize
            if waiting and num_bytes + size > self._bucket_bytes:
                yield self._pack(waiting)
                waiting, num_bytes = [], 0
            waiting.append((name, tensor.detach()))
            num_bytes += size
        if waiting:
            yield self._pack(waiting)

    def _pack(self, tensors: list[tuple[str, Tensor]]) -> WeightPart:
        layout, end = [], 0
        for name, tensor in tensors:
            begin = -(-end // _ALIGNMENT) * _ALIGNMENT
            layout.append([name, str(self._dtype).removeprefix("torch."), list(tensor.shape), begin])
            end = begin + tensor.numel() * self._dtype.itemsize
        part = WeightPart(torch.empty(end, dtype=torch.uint8), layout)
        for (_, tensor), (_, slot) in zip(tensors, part.tensors(), strict=True):
            slot.copy_(tensor)
        return part


def fetch_weights(
    fetcher: PayloadFetcher, store: Address, version: int, num_parts: int, *, timeout: float
) -> Iterator[tuple[str, Tensor]]:
    """The names and tensors of a published version, part by part.

    Args:
        fetcher: this process's.
        store: the publisher's.
        version, num_parts: as published.
        timeout: seconds for each part.

    Raises:
        ChannelError: the publisher is gone, or has two newer versions already and has forgotten this one.
    """
    for index in range(num_parts):
        yield from fetcher.fetch(store, part_key(version, index), WeightPart, timeout=timeout).tensors()


def part_key(version: int, index: int) -> str:
    """Under which key a part lies in the publisher's store."""
    return f"weights-{version}-{index}"
