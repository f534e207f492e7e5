"""Within one process: the engine reads the published bytes where they are, without a copy."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor

from titan_opd.weights.errors import TransferError
from titan_opd.weights.manifest import Manifest
from titan_opd.weights.transports.base import Deadline, bucket_memory


class InProcess:
    """Both ends. The trainer's thread publishes, engines' threads read."""

    name = "in_process"

    def __init__(self) -> None:
        self._versions: dict[int, list[Tensor]] = {}
        self._newest = -1
        self._changed = threading.Condition()

    def allocate(self, version: int, index: int, num_bytes: int) -> Tensor:
        return bucket_memory(num_bytes)

    def offer(self, version: int, buckets: Sequence[Tensor]) -> Any:
        with self._changed:
            self._versions[version] = list(buckets)
            self._newest = max(self._newest, version)
            self._changed.notify_all()
        return True

    def forget(self, version: int) -> None:
        with self._changed:
            self._versions.pop(version, None)

    def published(self, version: int) -> list[Tensor]:
        """The buckets of a version that is there."""
        with self._changed:
            return self._versions[version]

    def buckets(self, manifest: Manifest, wanted: range, offer: Any, deadline: Deadline) -> Iterator[Tensor]:
        version = manifest.version
        with self._changed:
            # The trainer's main process may have announced a version that this process is about to publish.
            self._changed.wait_for(lambda: self._newest >= version, deadline.left)
            buckets = self._versions.get(version)
        if buckets is None:
            reason = "forgotten" if self._newest >= version else f"not published within {deadline.seconds:g} s"
            raise TransferError(f"it is not in this process: {reason}")
        yield from (buckets[index] for index in wanted)

    def close(self) -> None:
        with self._changed:
            self._versions.clear()
