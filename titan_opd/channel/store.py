"""The payload store: what a producer has made and its consumers fetch, straight from it."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
from msgspec import Struct

from titan_opd.channel.addresses import Address
from titan_opd.channel.errors import ChannelError
from titan_opd.channel.messages import PROTOCOL_VERSION, Count, LeaseId, Name, Text
from titan_opd.channel.tensors import DEFAULT_LIMITS, RecordLimits, decode_record, encode_record, num_bytes
from titan_opd.channel.transport import Dialer, Frame, Received, Transport

logger = logging.getLogger(__name__)

R = TypeVar("R")
_MAX_REQUEST_BYTES = 1024
_POLL_SECONDS = 0.1


class Fetch(Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """A request: the payload under `key`, for `by`."""

    protocol: Count
    request: Count
    key: LeaseId
    by: Name


class Payload(Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """An answer: the record's frames follow."""

    request: Count


class NotHere(Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """An answer: there is no such payload."""

    request: Count
    reason: Text


_fetch_decoder = msgspec.msgpack.Decoder(Fetch)
_answer_decoder = msgspec.msgpack.Decoder(Payload | NotHere)


@dataclass
class _Stored:
    frames: list[Frame]
    num_bytes: int
    since: float
    fetched_by: str = ""


class PayloadStore:
    """A producer's payloads, bounded in bytes. A thread serves them; `put` and `release` may come from any thread.

    Args:
        transport: how.
        name: of the producer, for errors.
        capacity_bytes: most bytes that wait here; when they are there `put` waits, so the producer writes no more.
        consumer: who is to fetch from here, for errors: "the teacher workers".
        limits: of one record.

    Attributes:
        address: where to fetch.
        counters: fetches, payloads not here, refused requests.
    """

    def __init__(
        self,
        transport: Transport,
        *,
        name: str,
        capacity_bytes: int,
        consumer: str,
        limits: RecordLimits = DEFAULT_LIMITS,
    ) -> None:
        if capacity_bytes <= 0:
            raise ValueError(f"a payload store of {capacity_bytes} bytes holds nothing; give it more than one payload")
        self._name = name
        self._capacity = capacity_bytes
        self._consumer = consumer
        self._limits = limits
        self._payloads: dict[str, _Stored] = {}
        self._num_bytes = 0
        self._changed = threading.Condition()
        self.counters: Counter[str] = Counter()
        self._listener = transport.listen_anywhere(name, max_frame_bytes=_MAX_REQUEST_BYTES)
        self.address: Address = self._listener.address
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._serve, name=f"store-{name}", daemon=True)
        self._thread.start()

    @property
    def num_bytes(self) -> int:
        """Bytes that lie here."""
        return self._num_bytes

    @property
    def keys(self) -> list[str]:
        """What lies here, oldest first."""
        with self._changed:
            return list(self._payloads)

    def put(self, key: str, record: Any, *, timeout: float) -> int:
        """Keep a record until it is released; waits while there is no room.

        Args:
            key: the id of the lease it was made for.
            record: its tensors must not change any more: on the CPU they are kept as they are, not copied.
            timeout: seconds to wait for room.

        Returns:
            Its size in bytes.

        Raises:
            ValueError: the key is taken, the record cannot travel, or is larger than the whole store.
            ChannelError: no room in time; the text says who does not consume.
        """
        frames, size = self._encoded(key, record)
        with self._changed:
            self._check_key(key)
            if not self._changed.wait_for(lambda: self._fits(size), timeout):
                raise ChannelError(self._why_full(size, timeout), sender=self._name)
            self._keep(key, frames, size)
        return size

    def offer(self, key: str, record: Any) -> int | None:
        """Keep a record as `put` does if there is room now; its size in bytes, or None where there is none.

        Raises:
            ValueError: as `put`.
        """
        frames, size = self._encoded(key, record)
        with self._changed:
            self._check_key(key)
            if not self._fits(size):
                return None
            self._keep(key, frames, size)
        return size

    def _encoded(self, key: str, record: Any) -> tuple[list[Frame], int]:
        frames = encode_record(record, self._limits)
        size = num_bytes(frames)
        if size > self._capacity:
            raise ValueError(
                f"payload {key!r} of {size} bytes is larger than the whole store of {self._name} ({self._capacity} "
                "bytes); give the store room for several payloads"
            )
        return frames, size

    def _check_key(self, key: str) -> None:
        if key in self._payloads:
            raise ValueError(f"the store of {self._name} has a payload {key!r} already; a lease has one payload")

    def _fits(self, size: int) -> bool:
        return self._num_bytes + size <= self._capacity

    def _keep(self, key: str, frames: list[Frame], size: int) -> None:
        self._payloads[key] = _Stored(frames, size, time.monotonic())
        self._num_bytes += size

    def release(self, keys: Iterable[str]) -> None:
        """Forget payloads; keys that are not here are passed over, for a cancelled lease may have led to none."""
        with self._changed:
            for key in keys:
                stored = self._payloads.pop(key, None)
                if stored is not None:
                    self._num_bytes -= stored.num_bytes
            self._changed.notify_all()

    def close(self) -> None:
        """Stop serving."""
        self._closing.set()
        self._thread.join()
        self._listener.close()

    def _why_full(self, size: int, timeout: float) -> str:
        oldest, stored = next(iter(self._payloads.items()))
        age = time.monotonic() - stored.since
        if stored.fetched_by:
            blame = f"fetched by {stored.fetched_by} and not released: the trainer or the conductor is behind"
        else:
            blame = f"never fetched: {self._consumer} do not consume"
        return (
            f"no room for a payload of {size} bytes within {timeout:g} s: {len(self._payloads)} payloads take "
            f"{self._num_bytes} of {self._capacity} bytes. The oldest, {oldest!r}, has been here for {age:.1f} s, "
            f"{blame}"
        )

    # ---- The thread --------------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        while not self._closing.is_set():
            received = self._listener.receive(_POLL_SECONDS)
            if received is not None:
                self._answer(received)

    def _answer(self, received: Received) -> None:
        try:
            fetch = self._read(received)
        except ChannelError as error:
            self.counters["refused"] += 1
            if self.counters["refused"] <= 100:
                logger.warning("store of %s refused (%d so far): %s", self._name, self.counters["refused"], error)
            return
        answer: Payload | NotHere
        frames: list[Frame] = []
        with self._changed:
            stored = self._payloads.get(fetch.key)
            if fetch.protocol != PROTOCOL_VERSION:
                answer = NotHere(
                    fetch.request, f"it speaks protocol {PROTOCOL_VERSION}, {fetch.by} speaks {fetch.protocol}"
                )
            elif stored is None:
                answer = NotHere(fetch.request, f"it has no payload {fetch.key!r}: released, or of an earlier process")
            else:
                answer, frames = Payload(fetch.request), stored.frames
                stored.fetched_by = fetch.by
        self.counters["fetched" if frames else "not_here"] += 1
        try:
            sent = self._listener.send(received.route, [msgspec.msgpack.encode(answer), *frames])
        except ChannelError:
            sent = False
        if not sent:  # it has gone, or does not read and will find its deadline passed
            self.counters["unsent"] += 1

    def _read(self, received: Received) -> Fetch:
        if len(received.frames) != 1 or len(received.frames[0]) > _MAX_REQUEST_BYTES:
            raise ChannelError("no request: its frames are too many or too long", sender=received.origin)
        try:
            return _fetch_decoder.decode(received.frames[0])
        except (msgspec.DecodeError, RecursionError) as error:
            raise ChannelError(f"no request that can be read ({error})", sender=received.origin) from None


class PayloadFetcher:
    """Fetches from the stores of others; keeps the connections. For one thread.

    Args:
        transport: how.
        name: who fetches.
        limits: of one record.
    """

    def __init__(self, transport: Transport, *, name: str, limits: RecordLimits = DEFAULT_LIMITS) -> None:
        self._transport = transport
        self._name = name
        self._limits = limits
        self._dialers: dict[Address, Dialer] = {}
        self._requests = 0

    def fetch(
        self, address: Address, key: str, record_type: type[R], *, timeout: float, connect_timeout: float = 5.0
    ) -> R:
        """The record under `key` at a store.

        Args:
            address: the store's.
            key: the payload's.
            record_type: what it must be.
            timeout: seconds for all of it.
            connect_timeout: of those, most seconds until the connection stands. A store listens before anybody hears of
                its address, so one that cannot be reached is dead.

        Raises:
            ChannelError: the producer is dead, silent or does not have it, or sent something else. The payload is lost
                to this consumer: tell the conductor.
        """
        end = time.monotonic() + timeout
        try:
            frames = self._ask(address, key, end, min(timeout, connect_timeout))
            return decode_record(record_type, frames, sender=f"store at {address.endpoint}", limits=self._limits)
        except ChannelError as error:
            if not isinstance(error, _NotHereError):
                self._forget(address)
            raise ChannelError(f"payload {key!r} cannot be fetched: {error}", sender=self._name) from error

    def close(self) -> None:
        """Drop all connections."""
        for address in list(self._dialers):
            self._forget(address)

    def _ask(self, address: Address, key: str, end: float, connect_timeout: float) -> list[Frame]:
        dialer = self._dialers.get(address)
        if dialer is None:
            dialer = self._transport.dial(address, max_frame_bytes=max(self._limits.frame_bytes, 1 << 20))
            self._dialers[address] = dialer
            dialer.wait_connected(connect_timeout)
        self._requests += 1
        fetch = Fetch(PROTOCOL_VERSION, self._requests, key, self._name)
        dialer.send([msgspec.msgpack.encode(fetch)])  # never full: one request at a time
        while True:
            frames = dialer.receive(max(0.0, end - time.monotonic()))
            if frames is not None:
                answer = _read_answer(frames, address)
                if answer.request == self._requests:
                    break
            elif time.monotonic() >= end:
                raise ChannelError("no answer in time: the producer hangs", sender=f"store at {address.endpoint}")
        if isinstance(answer, NotHere):
            raise _NotHereError(answer.reason, sender=f"store at {address.endpoint}")
        return frames[1:]

    def _forget(self, address: Address) -> None:
        dialer = self._dialers.pop(address, None)
        if dialer is not None:
            dialer.close()


class _NotHereError(ChannelError):
    """The store answered, so the connection is good."""


def _read_answer(frames: list[Frame], address: Address) -> Payload | NotHere:
    try:
        return _answer_decoder.decode(frames[0])
    except (msgspec.DecodeError, RecursionError) as error:
        raise ChannelError(f"no answer that can be read ({error})", sender=f"store at {address.endpoint}") from None
