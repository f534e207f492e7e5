"""By the payload channel: ZeroMQ between machines, keys and all."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from titan_opd.channel import Address, PayloadFetcher, PayloadStore, RecordLimits
from titan_opd.weights.manifest import Manifest
from titan_opd.weights.transports.base import Deadline, bucket_memory

WEIGHT_LIMITS = RecordLimits(frame_bytes=1 << 36, record_bytes=1 << 36)  # one tensor can be several GiB


@dataclass(frozen=True, eq=False)
class BucketRecord:
    """A bucket as a payload.

    Attributes:
        version: the policy version.
        bytes: [bytes] uint8.
    """

    version: int
    bytes: Tensor


class ChannelOutlet:
    """Serves buckets from a payload store, which keeps them as they are, without a copy."""

    name = "channel"

    def __init__(self, store: PayloadStore) -> None:
        self._store = store
        self._keys: dict[int, list[str]] = {}

    def allocate(self, version: int, index: int, num_bytes: int) -> Tensor:
        return bucket_memory(num_bytes)

    def offer(self, version: int, buckets: Sequence[Tensor]) -> Any:
        self._keys[version] = [_key(version, index) for index in range(len(buckets))]
        for key, bucket in zip(self._keys[version], buckets, strict=True):
            self._store.put(key, BucketRecord(version, bucket), timeout=0.0)
        return [self._store.address.endpoint, self._store.address.public_key]

    def forget(self, version: int) -> None:
        self._store.release(self._keys.pop(version, []))

    def close(self) -> None:
        for version in list(self._keys):
            self.forget(version)


class ChannelInlet:
    """Fetches buckets, one at a time."""

    name = "channel"

    def __init__(self, fetcher: PayloadFetcher) -> None:
        self._fetcher = fetcher

    def buckets(self, manifest: Manifest, wanted: range, offer: Any, deadline: Deadline) -> Iterator[Tensor]:
        store = Address(*offer)
        for index in wanted:
            deadline.check("fetching by the channel")
            key = _key(manifest.version, index)
            yield self._fetcher.fetch(store, key, BucketRecord, timeout=deadline.left).bytes

    def close(self) -> None:
        """The fetcher is the worker's."""


def _key(version: int, index: int) -> str:
    return f"weights-{version}-{index}"
