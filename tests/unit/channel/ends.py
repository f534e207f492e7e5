"""Both ends of a channel over each transport, and a Hello that is taken."""

from __future__ import annotations

import contextlib
import threading
import time

from msgspec import structs

import titan_opd
from titan_opd.channel import (
    ConductorPort,
    InProcessTransport,
    PortLimits,
    RunIdentity,
    Said,
    WorkerPort,
    ZmqTransport,
    generate_keys,
    load_keys,
)
from titan_opd.channel.messages import PROTOCOL_VERSION, Hello

IDENTITY = RunIdentity(vocabulary_digest="a1", prompts_digest="b2", model_digests={"rollout": "c3", "teacher": "d4"})
QUICK = PortLimits(heartbeat_seconds=0.05, silence_seconds=20.0)
TRANSPORTS = ("in_process", "tcp", "ipc", "curve")
PATIENCE = 30.0  # seconds within which what must happen happens, on a busy machine too


def make_hello(role="rollout", name="rollout-0", **changes):
    hello = Hello(
        protocol=PROTOCOL_VERSION,
        package_version=titan_opd.__version__,
        role=role,
        name=name,
        vocabulary_digest=IDENTITY.vocabulary_digest,
        model_digest=IDENTITY.model_digests.get(role, ""),
        prompts_digest=IDENTITY.prompts_digest,
        teachers=["default"] if role == "teacher" else [],
        store=None,
        wall_time=time.time(),
    )
    return structs.replace(hello, **changes)


class Ends(contextlib.ExitStack):
    """Makes conductors and workers over one transport, and closes them.

    Args:
        kind: one of TRANSPORTS.
        folder: an empty one.
    """

    def __init__(self, kind, folder):
        super().__init__()
        self.kind = kind
        self.endpoint = "tcp://127.0.0.1:*"
        if kind == "in_process":
            self.of_conductor = self.of_workers = InProcessTransport()
            self.endpoint = "local://conductor"
        elif kind == "tcp":
            self.of_conductor = self.of_workers = ZmqTransport()
        elif kind == "ipc":
            self.endpoint = f"ipc://{folder}/private/conductor"
            self.of_conductor = self.of_workers = ZmqTransport(stores=f"ipc://{folder}/private")
        else:
            generate_keys(folder / "keys", ["conductor", "worker"])
            self.of_conductor = ZmqTransport(keys=load_keys(folder / "keys", "conductor"))
            self.of_workers = ZmqTransport(keys=load_keys(folder / "keys", "worker"))

    def conductor(self, limits=QUICK, identity=IDENTITY, endpoint=None):
        port = ConductorPort(self.of_conductor, endpoint or self.endpoint, identity, limits)
        self.callback(port.close)
        return port

    def worker(self, conductor, hello=None):
        """A connected worker; the conductor is read here meanwhile, what it hears goes into `heard`."""
        result = []

        def connect():
            try:
                address = conductor.address
                result.append(WorkerPort.connect(self.of_workers, address, hello or make_hello(), timeout=PATIENCE))
            except Exception as error:
                result.append(error)

        thread = threading.Thread(target=connect)
        thread.start()
        self.heard = []
        while thread.is_alive():
            event = conductor.receive(0.01)
            if event is not None:
                self.heard.append(event)
        if isinstance(result[0], Exception):
            raise result[0]
        self.callback(result[0].close)
        return result[0]


def next_event(port, wanted):
    """The conductor's next event of a kind; others before it are passed over."""
    return _wait(port, lambda event: isinstance(event, wanted))


def next_said(port, wanted):
    """The next message of a kind that the conductor hears."""
    return _wait(port, lambda event: isinstance(event, Said) and isinstance(event.message, wanted)).message


def _wait(port, condition):
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        event = port.receive(0.05)
        if event is not None and condition(event):
            return event
    raise AssertionError(f"it did not happen within {PATIENCE} s")
