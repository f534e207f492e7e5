"""A worker's end, and the trainer's: says Hello, keeps the beat in a thread, and hands messages over."""

from __future__ import annotations

import contextlib
import queue
import threading
import time

from msgspec import structs

from titan_opd.channel.addresses import Address
from titan_opd.channel.conductor_port import CUT_OFF_BYTES
from titan_opd.channel.errors import ChannelError, RefusedError
from titan_opd.channel.messages import (
    TO_ROLE,
    Goodbye,
    Heartbeat,
    Hello,
    Message,
    Refused,
    Welcome,
)
from titan_opd.channel.transport import Dialer, Transport
from titan_opd.channel.wire import decode, encode

_QUEUE_LENGTH = 64


class WorkerPort:
    """A connection to the conductor that stands.

    A thread owns it: it beats whatever the worker's own loop does, and tells in each beat for how long that loop has
    done nothing (`send`, `receive` and `alive` are what it does). Messages wait in queues of bounded length: a worker
    that does not read stops the conductor's messages, and a conductor that does not read stops `send`.
    """

    def __init__(self, dialer: Dialer, hello: Hello, welcome: Welcome) -> None:
        """Use `connect`."""
        self._dialer = dialer
        self._role = hello.role
        self._welcome = welcome
        self._inbox: queue.Queue[Message] = queue.Queue(_QUEUE_LENGTH)
        self._outbox: queue.Queue[bytes] = queue.Queue(_QUEUE_LENGTH)
        self._failure: ChannelError | None = None
        self._unsent: bytes | None = None  # taken from the outbox, for which the transport had no room
        self._closing = threading.Event()
        self._next_beat = time.monotonic()
        self._last_active = time.monotonic()
        self._last_heard = time.monotonic()
        self._thread = threading.Thread(target=self._run, name=f"channel-{hello.name}", daemon=True)
        self._thread.start()

    @classmethod
    def connect(cls, transport: Transport, address: Address, hello: Hello, *, timeout: float = 60.0) -> WorkerPort:
        """Connect and say Hello.

        Args:
            transport: how.
            address: the conductor's.
            hello: who this is; its `wall_time` is set anew when the connection stands.
            timeout: seconds to wait for a conductor that is still starting.

        Raises:
            RefusedError: the conductor does not take this worker; the text is its reason.
            ChannelError: no conductor answered in time, or it refuses this process's key.
            ValueError: the address is none, or needs keys.
        """
        end = time.monotonic() + timeout
        dialer = transport.dial(address, max_frame_bytes=CUT_OFF_BYTES)
        try:
            dialer.wait_connected(timeout)
            dialer.send([encode(hello_now(hello))])
            while True:
                frames = dialer.receive(max(0.0, end - time.monotonic()))
                if frames is not None:
                    answer = decode(frames, f"conductor at {address.endpoint}")
                    break
                if time.monotonic() >= end:
                    raise ChannelError(f"no answer to Hello within {timeout:g} s", sender=address.endpoint)
            if isinstance(answer, Refused):
                raise RefusedError(answer.reason, sender=f"conductor at {address.endpoint}")
            if not isinstance(answer, Welcome):
                raise ChannelError(f"{type(answer).__name__} in answer to Hello", sender=address.endpoint)
        except BaseException:
            dialer.close()
            raise
        return cls(dialer, hello, answer)

    def alive(self) -> None:
        """Tell that the worker's loop goes on; to be called within long work."""
        self._last_active = time.monotonic()

    def send(self, message: Message, *, timeout: float = 60.0) -> None:
        """Queue a message for the conductor.

        Raises:
            ChannelError: the connection is lost, or the conductor reads nothing for `timeout` seconds.
        """
        self.alive()
        frame = encode(message)
        end = time.monotonic() + timeout
        while True:
            self._check()
            try:
                self._outbox.put(frame, timeout=min(0.1, max(0.0, end - time.monotonic())))
                break
            except queue.Full:
                if time.monotonic() >= end:
                    raise ChannelError(
                        f"reads nothing for {timeout:g} s: {_QUEUE_LENGTH} messages wait", sender="conductor"
                    ) from None
        self._dialer.wake()

    def receive(self, timeout: float) -> Message | None:
        """The conductor's next message (no heartbeats); None when none comes within `timeout` seconds.

        Raises:
            RefusedError: the conductor refuses what this worker sent, or does not know it any more.
            ChannelError: the connection is lost.
        """
        self.alive()
        end = time.monotonic() + timeout
        while True:
            left = end - time.monotonic()
            try:
                message = self._inbox.get(timeout=min(0.1, left)) if left > 0 else self._inbox.get_nowait()
            except queue.Empty:
                self._check()
                if left <= 0:
                    return None
                continue
            finally:
                self.alive()
            self._dialer.wake()  # there is room again
            if isinstance(message, Refused):
                raise RefusedError(message.reason, sender="conductor")
            return message

    def close(self, reason: str = "done") -> None:
        """Say goodbye and leave."""
        if self._failure is None and self._thread.is_alive():
            with contextlib.suppress(ChannelError):  # it is gone already
                self.send(Goodbye(reason), timeout=1.0)
        self._closing.set()
        self._thread.join()

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure

    # ---- The thread --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not (self._closing.is_set() and self._outbox.empty() and self._unsent is None):
                self._step()
        except ChannelError as error:
            self._failure = error
        except Exception as error:
            self._failure = ChannelError(f"the channel's own thread failed: {error!r}", sender="this process")
            raise
        finally:
            self._dialer.close()

    def _step(self) -> None:
        now = time.monotonic()
        if now >= self._next_beat:
            self._next_beat = now + self._welcome.heartbeat_seconds
            self._dialer.send([encode(Heartbeat(now - self._last_active))])  # a full queue needs no beat
        self._send_queued()
        wait = max(0.0, self._next_beat - now)
        if self._inbox.full():  # the conductor's messages wait in the transport until the worker has read some
            time.sleep(min(wait, 0.01))
            self._last_heard = time.monotonic()
            return
        silence = self._welcome.silence_seconds
        frames = self._dialer.receive(min(wait, 0.01) if self._unsent is not None else wait)
        if frames is not None:
            self._last_heard = time.monotonic()
            self._take(decode(frames, "conductor"))
        elif time.monotonic() - self._last_heard > silence:
            raise ChannelError(f"silent for {silence:g} s: it is dead, or cut off", sender="conductor")

    def _send_queued(self) -> None:
        while True:
            if self._unsent is None:
                try:
                    self._unsent = self._outbox.get_nowait()
                except queue.Empty:
                    return
            if not self._dialer.send([self._unsent]):
                return
            self._unsent = None

    def _take(self, message: Message) -> None:
        if not isinstance(message, TO_ROLE[self._role]):
            raise ChannelError(f"says {type(message).__name__} to a {self._role}", sender="conductor")
        if not isinstance(message, Heartbeat):
            self._inbox.put_nowait(message)  # there is room: only this thread puts


def hello_now(hello: Hello) -> Hello:
    """The same Hello, written now."""
    return structs.replace(hello, wall_time=time.time())
