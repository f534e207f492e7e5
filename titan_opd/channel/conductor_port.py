"""The conductor's end: who is there, and what they say, one event at a time."""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from dataclasses import dataclass, field

import titan_opd
from titan_opd.channel.errors import ChannelError
from titan_opd.channel.messages import (
    FROM_ROLE,
    MAX_HEADER_BYTES,
    PROTOCOL_VERSION,
    Goodbye,
    Heartbeat,
    Hello,
    Message,
    Refused,
    Role,
    Welcome,
)
from titan_opd.channel.transport import Received, Transport
from titan_opd.channel.wire import decode, encode, protocol_of_hello

logger = logging.getLogger(__name__)
# Between this and MAX_HEADER_BYTES a message is refused politely; above, the transport cuts its sender off.
CUT_OFF_BYTES = 2 * MAX_HEADER_BYTES
BACKLOG_BYTES = 1 << 20  # of messages for one worker that its full queue has no room for
_RETRY_SECONDS = 0.01


@dataclass(frozen=True)
class RunIdentity:
    """What every worker of the run must have in common with the conductor.

    Attributes:
        vocabulary_digest: of the tokenizer's vocabulary.
        prompts_digest: of the prompts as they were read.
        model_digests: of the model that each role works with; a role that is absent is not checked.
    """

    vocabulary_digest: str
    prompts_digest: str
    model_digests: dict[Role, str] = field(default_factory=dict)


@dataclass(frozen=True)
class PortLimits:
    """When the conductor loses patience.

    Attributes:
        heartbeat_seconds: between signs of life, in both directions.
        silence_seconds: after which a peer is taken for dead.
        clock_skew_seconds: most difference between a worker's clock and this one's, its Hello's journey included.
        peers: most workers at a time.
    """

    heartbeat_seconds: float = 2.0
    silence_seconds: float = 30.0
    clock_skew_seconds: float = 60.0
    peers: int = 1024

    def __post_init__(self) -> None:
        if not 0 < self.heartbeat_seconds < self.silence_seconds:
            raise ValueError(
                f"heartbeat_seconds = {self.heartbeat_seconds} and silence_seconds = {self.silence_seconds}: a peer "
                "must beat several times within the silence; make the first positive and the second larger"
            )


@dataclass(frozen=True)
class Joined:
    """A worker is in."""

    name: str
    hello: Hello


@dataclass(frozen=True)
class Said:
    """A worker that is in said something that its role may say. (Heartbeats too: they tell of idle loops.)"""

    name: str
    message: Message


@dataclass(frozen=True)
class Left:
    """A worker is out: its leases and its payloads are lost."""

    name: str
    reason: str


Event = Joined | Said | Left


@dataclass
class _Peer:
    hello: Hello
    route: bytes
    last_heard: float
    leaving: str = ""  # why; it is out once its last messages are read
    backlog: deque[bytes] = field(default_factory=deque)
    backlog_bytes: int = 0


class ConductorPort:
    """Listens for workers; for one thread.

    Args:
        transport: how.
        endpoint: where.
        identity: what a worker must share.
        limits: see there.

    Attributes:
        address: where it listens, with the port that was found.
        counters: bytes and messages in and out, and refusals by kind.

    Raises:
        ValueError: the endpoint is no address, is taken, or needs keys.
    """

    def __init__(
        self, transport: Transport, endpoint: str, identity: RunIdentity, limits: PortLimits | None = None
    ) -> None:
        self._identity = identity
        self._limits = limits or PortLimits()
        self._listener = transport.listen(endpoint, max_frame_bytes=CUT_OFF_BYTES)
        self.address = self._listener.address
        self.counters: Counter[str] = Counter()
        self._names: dict[bytes, str] = {}
        self._peers: dict[str, _Peer] = {}
        self._events: deque[Event] = deque()
        self._next_sweep = time.monotonic()
        self._last_listened = time.monotonic()

    @property
    def peers(self) -> dict[str, Hello]:
        """Who is in, by name."""
        return {name: peer.hello for name, peer in self._peers.items()}

    def receive(self, timeout: float) -> Event | None:
        """The next event; None when there is none within `timeout` seconds. Call it often: it also keeps the beat."""
        self._excuse_absence()
        try:
            return self._next_event(time.monotonic() + timeout)
        finally:
            self._last_listened = time.monotonic()

    def _next_event(self, end: float) -> Event | None:
        while True:
            self._sweep()
            if self._events:
                return self._events.popleft()
            wait = max(0.0, min(end, self._next_sweep) - time.monotonic())
            received = self._listener.receive(min(wait, _RETRY_SECONDS) if self._send_backlogs() else wait)
            if received is not None:
                self._take(received)
            else:
                self._drop_leaving()
            if time.monotonic() >= end and not self._events:  # also amid a flood of what is refused
                return None

    def send(self, name: str, message: Message) -> None:
        """Queue a message for a worker. One that is gone or reads nothing leaves: a `Left` event follows."""
        peer = self._peers.get(name)
        if peer is None or peer.leaving:  # its Left is on the way, or the caller has seen it
            self.counters["undeliverable"] += 1
            return
        frame = encode(message)
        self.counters["messages_sent"] += 1
        self.counters["bytes_sent"] += len(frame)
        peer.backlog.append(frame)
        peer.backlog_bytes += len(frame)
        self._send_backlog(peer)
        if peer.backlog_bytes > BACKLOG_BYTES and not peer.leaving:
            peer.leaving = f"it does not read: its queue is full and {peer.backlog_bytes} more bytes wait"

    def close(self) -> None:
        """Stop listening. Say Stop first."""
        self._listener.close()

    # ---- What comes in -----------------------------------------------------------------------------------------------

    def _take(self, received: Received) -> None:
        self.counters["messages_received"] += 1
        self.counters["bytes_received"] += sum(len(frame) for frame in received.frames)
        name = self._names.get(received.route)
        sender = f"{name} at {received.origin}" if name else f"a stranger at {received.origin}"
        try:
            message = decode(received.frames, sender)
        except ChannelError as error:
            version = protocol_of_hello(received.frames) if name is None else None
            if version is None:
                self._refuse(received.route, "malformed", str(error))
            else:
                self._refuse(received.route, "other_version", f"{sender}: {_other_version(*version)}")
            return
        if name is None:
            self._introduce(message, received.route, sender)
            return
        peer = self._peers[name]
        peer.last_heard = time.monotonic()
        if not isinstance(message, FROM_ROLE[peer.hello.role]):
            what = type(message).__name__
            self._refuse(received.route, "unexpected", f"{sender}: a {peer.hello.role} does not say {what}")
        elif isinstance(message, Goodbye):
            self._drop(name, f"it said goodbye: {message.reason}")
        else:
            self._events.append(Said(name, message))

    def _introduce(self, message: Message, route: bytes, sender: str) -> None:
        if not isinstance(message, Hello):
            self._refuse(
                route,
                "unexpected",
                f"{sender}: {type(message).__name__} before Hello; the conductor may have restarted or have taken this "
                "worker for dead: connect anew",
            )
            return
        reason = self._objection(message)
        if reason:
            self._refuse(route, "refused_hello", f"{message.role} {message.name!r} ({sender}): {reason}")
            return
        self._names[route] = message.name
        self._peers[message.name] = _Peer(message, route, time.monotonic())
        self._events.append(Joined(message.name, message))
        self.send(message.name, Welcome(self._limits.heartbeat_seconds, self._limits.silence_seconds))

    def _objection(self, hello: Hello) -> str:
        """Why a worker is not taken; "" when it is."""
        if (hello.protocol, hello.package_version) != (PROTOCOL_VERSION, titan_opd.__version__):
            return _other_version(hello.protocol, hello.package_version)
        wanted = self._identity
        if hello.vocabulary_digest != wanted.vocabulary_digest:
            return _differs(
                "vocabulary", hello.vocabulary_digest, wanted.vocabulary_digest, "give it the run's tokenizer"
            )
        if hello.role in wanted.model_digests and hello.model_digest != wanted.model_digests[hello.role]:
            return _differs(
                "model", hello.model_digest, wanted.model_digests[hello.role], f"give it the run's {hello.role} model"
            )
        if hello.prompts_digest != wanted.prompts_digest and hello.role == "rollout":
            return _differs(
                "prompts", hello.prompts_digest, wanted.prompts_digest, "give it the run's data and template"
            )
        skew = hello.wall_time - time.time()
        if not abs(skew) <= self._limits.clock_skew_seconds:
            where = "ahead of" if skew > 0 else "behind"
            return (
                f"its clock is {abs(skew):.1f} s {where} the conductor's, the limit is "
                f"{self._limits.clock_skew_seconds:g} s; set both by NTP"
            )
        if hello.name in self._peers and self._is_there(hello.name):
            return f"the name {hello.name!r} is taken by a worker that is connected; choose another"
        if len(self._peers) >= self._limits.peers:
            return f"there are {len(self._peers)} workers, the most this conductor takes; start fewer"
        return ""

    def _is_there(self, name: str) -> bool:
        self.send(name, Heartbeat(0.0))  # a broken connection shows now, not at the next sweep
        if self._peers[name].leaving:
            self._drop(name, self._peers[name].leaving)
        return name in self._peers

    # ---- What goes out -----------------------------------------------------------------------------------------------

    def _refuse(self, route: bytes, kind: str, reason: str) -> None:
        self.counters[f"refused.{kind}"] += 1
        count = self.counters[f"refused.{kind}"]
        if count <= 100 or count & (count - 1) == 0:  # a flood is told by powers of two
            logger.warning("refused, %s (%d so far): %s", kind, count, reason)
        try:
            self._listener.send(route, [encode(Refused(reason[:2000]))])
        except ChannelError:
            self.counters["undeliverable"] += 1

    def _send_backlog(self, peer: _Peer) -> None:
        try:
            while peer.backlog and self._listener.send(peer.route, [peer.backlog[0]]):
                peer.backlog_bytes -= len(peer.backlog.popleft())
        except ChannelError as error:
            peer.leaving = peer.leaving or str(error)

    def _send_backlogs(self) -> bool:
        """Send what waited for room; whether some still waits."""
        waiting = [peer for peer in self._peers.values() if peer.backlog and not peer.leaving]
        for peer in waiting:
            self._send_backlog(peer)
        return any(peer.backlog for peer in waiting)

    def _sweep(self) -> None:
        """Beat, and find who has gone or fallen silent."""
        now = time.monotonic()
        if now < self._next_sweep:
            return
        self._next_sweep = now + self._limits.heartbeat_seconds
        for name, peer in list(self._peers.items()):
            if now - peer.last_heard > self._limits.silence_seconds:
                self._drop(name, peer.leaving or f"silent for {now - peer.last_heard:.1f} s")
            else:
                self.send(name, Heartbeat(0.0))

    def _excuse_absence(self) -> None:
        """While nobody called `receive`, what the workers said could not be heard: it is not their silence."""
        absence = time.monotonic() - self._last_listened
        if absence > self._limits.heartbeat_seconds:
            for peer in self._peers.values():
                peer.last_heard += absence

    def _drop_leaving(self) -> None:
        for name, peer in list(self._peers.items()):
            if peer.leaving:
                self._drop(name, peer.leaving)

    def _drop(self, name: str, reason: str) -> None:
        peer = self._peers.pop(name)
        del self._names[peer.route]
        self.counters["left"] += 1
        logger.info("%s has left: %s", name, reason)
        self._events.append(Left(name, reason))


def _other_version(protocol: int, package_version: str) -> str:
    return (
        f"it has titan_opd {package_version} with protocol {protocol}, the conductor {titan_opd.__version__} with "
        f"protocol {PROTOCOL_VERSION}; install the same version everywhere"
    )


def _differs(what: str, theirs: str, ours: str, fix: str) -> str:
    return f"its {what} (digest {theirs[:12] or 'none'}) is not the run's ({ours[:12] or 'none'}); {fix}"
