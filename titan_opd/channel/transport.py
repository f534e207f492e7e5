"""How frames get from one end to another: the interface, and the one that stays within the process.

A *listener* has an address and talks with many; each of its peers has a route, which is new for each connection. A
*dialer* talks with one listener. Both are the business of one thread; only `wake` may be called from others. Queues are
bounded: a send says whether there was room, and nothing is thrown away in silence.
"""

from __future__ import annotations

import itertools
import queue
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from titan_opd.channel.addresses import Address, address_taken
from titan_opd.channel.errors import ChannelError

Frame = Any  # bytes, or whatever has a buffer
QUEUE_LENGTH = 128  # messages on their way from one end to another, each way


@dataclass(frozen=True)
class Received:
    """What a listener got.

    Attributes:
        route: of the connection it came by.
        frames: what came.
        origin: where the sender is, for logs: a host's address, and the name of its key where there are keys.
    """

    route: bytes
    frames: list[Frame]
    origin: str


class Listener(Protocol):
    """The end with the address."""

    address: Address

    def receive(self, timeout: float) -> Received | None:
        """The next message, or None when none comes within `timeout` seconds."""

    def send(self, route: bytes, frames: Sequence[Frame]) -> bool:
        """Queue a message for a peer; False when its queue is full, because it does not read.

        Raises:
            ChannelError: the peer is gone.
        """

    def close(self) -> None: ...


class Dialer(Protocol):
    """The end that connects."""

    def wait_connected(self, timeout: float) -> None:
        """Returns once the listener has taken the connection.

        Raises:
            ChannelError: it refused this end's key, or nobody listened within `timeout` seconds.
        """

    def receive(self, timeout: float) -> list[Frame] | None:
        """The next message; None when none comes within `timeout` seconds, or on `wake`.

        Raises:
            ChannelError: the listener is gone. A connection that broke stays broken: dial anew.
        """

    def send(self, frames: Sequence[Frame]) -> bool:
        """Queue a message for the listener; False when the queue is full."""

    def wake(self) -> None:
        """End a `receive` that waits in another thread."""

    def close(self) -> None: ...


class Transport(Protocol):
    """Makes both."""

    def listen(self, endpoint: str, *, max_frame_bytes: int) -> Listener:
        """Listen at an endpoint.

        Args:
            endpoint: an address, see `addresses.py`; `tcp://HOST:*` takes a free port.
            max_frame_bytes: a peer that sends a longer frame is cut off.

        Raises:
            ValueError: it is no address, taken, or needs keys.
        """

    def listen_anywhere(self, name: str, *, max_frame_bytes: int) -> Listener:
        """Listen at an address of the transport's choice, for a store called `name`."""

    def dial(self, address: Address, *, max_frame_bytes: int) -> Dialer:
        """Begin to connect; somebody need not listen there yet."""


# ---- Within one process ----------------------------------------------------------------------------------------------


class _Queue:
    """Messages to one end, by sender: at most QUEUE_LENGTH of each."""

    def __init__(self) -> None:
        self._items: deque[Any] = deque()
        self._changed = threading.Condition()
        self._lengths: dict[bytes, int] = {}
        self._woken = False

    def put(self, sender: bytes, item: Any) -> bool:
        with self._changed:
            if self._lengths.get(sender, 0) >= QUEUE_LENGTH:
                return False
            self._lengths[sender] = self._lengths.get(sender, 0) + 1
            self._items.append((sender, item))
            self._changed.notify()
        return True

    def wake(self) -> None:
        with self._changed:
            self._woken = True
            self._changed.notify()

    def get(self, timeout: float) -> Any:
        end = time.monotonic() + timeout
        with self._changed:
            while not self._items:
                left = end - time.monotonic()
                if self._woken or left <= 0 or not self._changed.wait(left):
                    self._woken = False
                    if not self._items:
                        raise queue.Empty
            sender, item = self._items.popleft()
            self._lengths[sender] -= 1
            if not self._lengths[sender]:
                del self._lengths[sender]
        return item


class InProcessTransport:
    """Queues between the threads of one process. Frames travel as they are, without a copy."""

    def __init__(self) -> None:
        self._listeners: dict[str, _InProcessListener] = {}
        self._numbers = itertools.count()

    def listen(self, endpoint: str, *, max_frame_bytes: int) -> Listener:
        if endpoint in self._listeners:
            raise address_taken(endpoint)
        listener = _InProcessListener(self._listeners, Address(endpoint), max_frame_bytes)
        self._listeners[endpoint] = listener
        return listener

    def listen_anywhere(self, name: str, *, max_frame_bytes: int) -> Listener:
        return self.listen(f"local://{name}-{next(self._numbers)}", max_frame_bytes=max_frame_bytes)

    def dial(self, address: Address, *, max_frame_bytes: int) -> Dialer:
        route = next(self._numbers).to_bytes(8, "big")
        return _InProcessDialer(self._listeners, address.endpoint, route, max_frame_bytes)


class _InProcessListener:
    def __init__(self, listeners: dict[str, _InProcessListener], address: Address, max_frame_bytes: int) -> None:
        self.address = address
        self.peers: dict[bytes, _InProcessDialer] = {}
        self.inbox = _Queue()
        self.max_frame_bytes = max_frame_bytes
        self._listeners = listeners

    def receive(self, timeout: float) -> Received | None:
        try:
            return self.inbox.get(timeout)
        except queue.Empty:
            return None

    def send(self, route: bytes, frames: Sequence[Frame]) -> bool:
        peer = self.peers.get(route)
        if peer is None:
            raise ChannelError("the peer has left")
        return peer.inbox.put(route, list(frames))

    def close(self) -> None:
        self._listeners.pop(self.address.endpoint, None)
        for peer in list(self.peers.values()):
            peer.lost = "the listener has closed"
            peer.wake()
        self.peers.clear()


class _InProcessDialer:
    def __init__(
        self, listeners: dict[str, _InProcessListener], endpoint: str, route: bytes, max_frame_bytes: int
    ) -> None:
        self.inbox = _Queue()
        self.lost = ""
        self._listeners = listeners
        self._endpoint = endpoint
        self._route = route
        self._max_frame_bytes = max_frame_bytes
        self._listener: _InProcessListener | None = None

    def wait_connected(self, timeout: float) -> None:
        end = time.monotonic() + timeout
        while self._listener is None:
            listener = self._listeners.get(self._endpoint)
            if listener is not None:
                listener.peers[self._route] = self
                self._listener = listener
            elif time.monotonic() >= end:
                raise ChannelError(f"nobody listened within {timeout:g} s", sender=self._endpoint)
            else:
                time.sleep(0.005)

    def receive(self, timeout: float) -> list[Frame] | None:
        try:
            frames = self.inbox.get(0 if self.lost else timeout)
        except queue.Empty:
            if self.lost:
                raise ChannelError(f"the connection is lost: {self.lost}", sender=self._endpoint) from None
            return None
        if any(memoryview(frame).nbytes > self._max_frame_bytes for frame in frames):
            self.lost = f"a frame above {self._max_frame_bytes} bytes came"
            raise ChannelError(f"the connection is lost: {self.lost}", sender=self._endpoint)
        return frames

    def send(self, frames: Sequence[Frame]) -> bool:
        assert self._listener is not None, "wait_connected comes first"
        if self.lost:
            return True  # as with a socket: into the void; `receive` says so
        if any(memoryview(frame).nbytes > self._listener.max_frame_bytes for frame in frames):
            self._leave(f"a frame above {self._listener.max_frame_bytes} bytes was sent")
            return True
        return self._listener.inbox.put(self._route, Received(self._route, list(frames), "this process"))

    def wake(self) -> None:
        self.inbox.wake()

    def close(self) -> None:
        self._leave("closed")

    def _leave(self, reason: str) -> None:
        self.lost = self.lost or reason
        if self._listener is not None:
            self._listener.peers.pop(self._route, None)
