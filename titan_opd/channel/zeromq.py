"""The transport between processes: ZeroMQ ROUTER and DEALER sockets, with CURVE where there are keys."""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack

import zmq
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils.monitor import recv_monitor_message

from titan_opd.channel.addresses import Address, address_taken, check_address, private_socket
from titan_opd.channel.errors import ChannelError
from titan_opd.channel.keys import Keys
from titan_opd.channel.transport import QUEUE_LENGTH, Dialer, Frame, Listener, Received

_LINGER_MS = 1000  # what is queued when an end closes has so long to leave
# ZeroMQ's own pings find a machine that vanished without closing its connections. One frame must come within the time.
_PING_MS = 5_000
_PING_TIMEOUT_MS = 60_000
_AUTH_DOMAIN = b"titan_opd"
_HANDSHAKE_FAILED = (
    zmq.Event.HANDSHAKE_FAILED_AUTH,
    zmq.Event.HANDSHAKE_FAILED_NO_DETAIL,
    zmq.Event.HANDSHAKE_FAILED_PROTOCOL,
)


class ZmqTransport:
    """Sockets between processes.

    Args:
        keys: this member's; with them every connection is encrypted and only members connect. Without them only
            `tcp://127.0.0.1` and `ipc://` are served and dialled.
        stores: where this process's stores listen: `tcp://HOST:*`, HOST being this machine as the others reach it, or
            `ipc:///FOLDER`.

    Raises:
        ValueError: `stores` is no such address, or needs keys.
    """

    def __init__(self, *, keys: Keys | None = None, stores: str = "tcp://127.0.0.1:*") -> None:
        check_address(stores, keys=keys is not None)
        if stores.startswith("tcp://") and not stores.endswith(":*"):
            raise ValueError(f"stores at {stores}: a process may have several, so write port * for free ones")
        if stores.startswith(("tcp://0.0.0.0:", "tcp://[::]:")):
            raise ValueError(f"nobody can dial {stores}; name this machine's address as the others reach it")
        self._keys = keys
        self._stores = stores
        self._numbers = itertools.count()

    def listen(self, endpoint: str, *, max_frame_bytes: int) -> Listener:
        check_address(endpoint, keys=self._keys is not None)
        return _ZmqListener(endpoint, self._keys, max_frame_bytes)

    def listen_anywhere(self, name: str, *, max_frame_bytes: int) -> Listener:
        endpoint = self._stores
        if endpoint.startswith("ipc://"):
            endpoint = f"{endpoint}/{name}-{os.getpid()}-{next(self._numbers)}"
        return self.listen(endpoint, max_frame_bytes=max_frame_bytes)

    def dial(self, address: Address, *, max_frame_bytes: int) -> Dialer:
        check_address(address.endpoint, keys=self._keys is not None)
        if self._keys is not None and not self._keys.member(address.public_key):
            raise ValueError(
                f"{address.endpoint} has the public key {address.public_key!r}, which is not in {self._keys.folder}; "
                "copy it there if that is one of yours"
            )
        if self._keys is None and address.public_key:
            raise ValueError(
                f"{address.endpoint} wants CURVE keys and this process has none; give it the folder of keys"
            )
        return _ZmqDialer(address, self._keys, max_frame_bytes)


class _ZmqListener:
    def __init__(self, endpoint: str, keys: Keys | None, max_frame_bytes: int) -> None:
        self._keys = keys
        self._resources = ExitStack()
        try:
            self._resources.enter_context(private_socket(endpoint))
            context = _new_context(self._resources)
            if keys is not None:
                authenticator = ThreadAuthenticator(context)
                authenticator.start()
                self._resources.callback(authenticator.stop)
                authenticator.configure_curve(domain=_AUTH_DOMAIN.decode(), location=str(keys.folder))
            self._socket = _new_socket(context, zmq.ROUTER, endpoint, max_frame_bytes)
            self._socket.router_mandatory = 1  # sending to who has left is an error
            if keys is not None:
                self._socket.curve_server = 1
                self._socket.curve_publickey = keys.public.encode()
                self._socket.curve_secretkey = keys.secret.encode()
                self._socket.zap_domain = _AUTH_DOMAIN
            self._bind(endpoint)
        except BaseException:
            self._resources.close()
            raise
        bound = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self.address = Address(bound, keys.public if keys is not None else "")

    def _bind(self, endpoint: str) -> None:
        try:
            self._socket.bind(endpoint)
        except zmq.ZMQError as error:
            if error.errno == zmq.EADDRINUSE:
                raise address_taken(endpoint) from None
            raise ValueError(
                f"cannot listen at {endpoint} ({error}); name an address of this machine, and a port above 1023"
            ) from None

    def receive(self, timeout: float) -> Received | None:
        if not self._socket.poll(max(0, round(timeout * 1000))):
            return None
        route, *frames = self._socket.recv_multipart(copy=False)
        origin = _property(frames[0], "Peer-Address") or "an unknown address"
        if self._keys is not None:
            origin += f" with the key of {self._keys.member(_property(frames[0], 'User-Id'))!r}"
        return Received(route.bytes, [frame.buffer for frame in frames], origin)

    def send(self, route: bytes, frames: Sequence[Frame]) -> bool:
        try:
            self._socket.send_multipart([route, *frames], zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            if error.errno == zmq.EHOSTUNREACH:
                raise ChannelError("the peer has left") from None
            raise
        return True

    def close(self) -> None:
        self._resources.close()


class _ZmqDialer:
    def __init__(self, address: Address, keys: Keys | None, max_frame_bytes: int) -> None:
        self._endpoint = address.endpoint
        self._connected = False
        self._cut_off = False  # closed by the other side before the connection stood
        self._lost = ""
        self._resources = ExitStack()
        context = _new_context(self._resources)
        self._socket = _new_socket(context, zmq.DEALER, self._endpoint, max_frame_bytes)
        if keys is not None:
            self._socket.curve_serverkey = address.public_key.encode()
            self._socket.curve_publickey = keys.public.encode()
            self._socket.curve_secretkey = keys.secret.encode()
        self._monitor = self._socket.get_monitor_socket()
        self._wake_lock = threading.Lock()
        self._waker, self._woken = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
        self._waker.bind("inproc://wake")
        self._woken.connect("inproc://wake")
        try:
            self._socket.connect(self._endpoint)
        except zmq.ZMQError as error:
            self._resources.close()
            raise ValueError(f"cannot dial {self._endpoint} ({error}); check the host's name and the port") from None

    def wait_connected(self, timeout: float) -> None:
        end = time.monotonic() + timeout
        while not self._connected:
            self._check_lost()
            left = end - time.monotonic()
            if left <= 0:
                reason = "nobody listens"
                if self._cut_off:
                    reason = "it closes the connection: it wants a key that this process lacks, or has another key"
                raise ChannelError(f"not connected within {timeout:g} s: {reason}", sender=self._endpoint)
            if self._monitor.poll(max(1, round(left * 1000))):
                self._read_monitor()

    def receive(self, timeout: float) -> list[Frame] | None:
        self._check_lost()
        poller = zmq.Poller()
        for socket in (self._socket, self._monitor, self._woken):
            poller.register(socket, zmq.POLLIN)
        ready = dict(poller.poll(max(0, round(timeout * 1000))))
        if self._woken in ready:
            while self._woken.poll(0):
                self._woken.recv()
        if self._socket in ready:  # first: what came before the connection broke still counts
            return [frame.buffer for frame in self._socket.recv_multipart(copy=False)]
        if self._monitor in ready:
            self._read_monitor()
            if self._lost and self._socket.poll(0):  # it came between the two
                return [frame.buffer for frame in self._socket.recv_multipart(copy=False)]
            self._check_lost()
        return None

    def send(self, frames: Sequence[Frame]) -> bool:
        if self._lost:
            return True  # into the void; `receive` says so
        try:
            self._socket.send_multipart(list(frames), zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return False
        return True

    def wake(self) -> None:
        with self._wake_lock:
            if not self._waker.closed:
                with contextlib.suppress(zmq.Again):  # full of calls that have not been heard: one more adds nothing
                    self._waker.send(b"", zmq.NOBLOCK)

    def close(self) -> None:
        with self._wake_lock:
            self._socket.disable_monitor()
            self._resources.close()

    def _read_monitor(self) -> None:
        while self._monitor.poll(0):
            event = recv_monitor_message(self._monitor)["event"]
            if event == zmq.Event.HANDSHAKE_SUCCEEDED:
                # A second connection would be another one to the listener, which knows nothing of the first.
                self._lost = "it was made anew" if self._connected else self._lost
                self._connected = True
            elif event == zmq.Event.DISCONNECTED and self._connected:
                self._lost = self._lost or "the other side has gone or cut it off"
            elif event == zmq.Event.DISCONNECTED:
                self._cut_off = True
            elif event in _HANDSHAKE_FAILED and not self._connected:
                self._lost = "the key of this process is refused, or the other side does not speak this protocol"

    def _check_lost(self) -> None:
        if self._lost:
            raise ChannelError(f"the connection is lost: {self._lost}", sender=self._endpoint)


def _property(frame: zmq.Frame, name: str) -> str:
    """What ZeroMQ knows of a frame's sender; nothing of one that speaks the oldest of its protocols."""
    try:
        return frame.get(name)
    except zmq.ZMQError:
        return ""


def _new_context(resources: ExitStack) -> zmq.Context:
    """A context whose sockets close with `resources`."""
    context = zmq.Context()
    resources.callback(context.destroy, linger=_LINGER_MS)
    return context


def _new_socket(context: zmq.Context, kind: int, endpoint: str, max_frame_bytes: int) -> zmq.Socket:
    socket = context.socket(kind)
    socket.set_hwm(QUEUE_LENGTH)
    socket.maxmsgsize = max_frame_bytes
    socket.heartbeat_ivl = _PING_MS
    socket.heartbeat_timeout = _PING_TIMEOUT_MS
    socket.ipv6 = "[" in endpoint  # elsewhere it would turn 127.0.0.1 into another spelling
    return socket
