"""The interface of a transport: an outlet at the trainer, an inlet at the engine.

A version is published as a few *buckets* of bytes that do not change any more. The trainer goes on; an engine takes
them when it suits it, which can be a while later, or never when a newer version comes first.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from titan_opd.weights.errors import TransferError
from titan_opd.weights.manifest import Manifest


class Outlet(Protocol):
    """The trainer's end. For one thread."""

    name: str

    def allocate(self, version: int, index: int, num_bytes: int) -> Tensor:
        """uint8 memory for a bucket; asked of a publisher's first outlet only."""

    def offer(self, version: int, buckets: Sequence[Tensor]) -> Any:
        """Begin to serve a version. Returns what the other end must know, in JSON values."""

    def forget(self, version: int) -> None:
        """Serve it no longer, and free its memory."""

    def close(self) -> None:
        """Forget everything."""


class Inlet(Protocol):
    """The engine's end. For one thread."""

    name: str

    def buckets(self, manifest: Manifest, wanted: range, offer: Any, deadline: Deadline) -> Iterator[Tensor]:
        """The bytes of the `wanted` buckets in order; each is valid until the next one is asked for, and is read only.

        Raises:
            ChannelError, TransferError: they do not come.
        """

    def close(self) -> None:
        """Let go of connections and memory."""


class Deadline:
    """A moment by which a transfer must be over.

    Args:
        seconds: from now.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._end = time.monotonic() + seconds

    @property
    def left(self) -> float:
        """Seconds, at least 0."""
        return max(0.0, self._end - time.monotonic())

    def check(self, what: str) -> None:
        """Raise a TransferError that says what was not done in time."""
        if not self.left:
            raise TransferError(f"{what} took more than {self.seconds:g} s (weights.timeout_seconds)")


def bucket_memory(num_bytes: int) -> Tensor:
    """Plain memory of this process."""
    return torch.empty(num_bytes, dtype=torch.uint8)
