"""What a worker has made and not announced yet: it waits here while the worker's store has no room."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator
from typing import Generic, TypeVar

from titan_opd.channel import PayloadStore

R = TypeVar("R")


class Outbox(Generic[R]):
    """Payloads on their way into a store, oldest first.

    Args:
        store: keeps them until they are released.
    """

    def __init__(self, store: PayloadStore) -> None:
        self._store = store
        self._waiting: deque[tuple[str, R]] = deque()

    def __bool__(self) -> bool:
        """Whether something waits."""
        return bool(self._waiting)

    def add(self, lease: str, payload: R) -> None:
        """A lease has led to a payload."""
        self._waiting.append((lease, payload))

    def delivered(self) -> Iterator[tuple[str, R, int]]:
        """Put into the store what it has room for: the lease, the payload and its bytes of each, to be announced."""
        while self._waiting:
            lease, payload = self._waiting[0]
            num_bytes = self._store.offer(lease, payload)
            if num_bytes is None:
                return
            self._waiting.popleft()
            yield lease, payload, num_bytes

    def forget(self, leases: Collection[str]) -> None:
        """These payloads are not wanted any more, whether they wait or lie in the store."""
        self._waiting = deque(pair for pair in self._waiting if pair[0] not in leases)
        self._store.release(leases)
