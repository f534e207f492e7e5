"""How the roles of a run reach each other: addresses and transports from the configuration."""

from __future__ import annotations

import hashlib
import os
import socket
import tempfile
from pathlib import Path

from titan_opd.channel import Address, PortLimits, Transport, ZmqTransport, load_keys
from titan_opd.channel.keys import CONDUCTOR
from titan_opd.config import Config

WORKER = "worker"  # the name of the workers' pair of keys


def conductor_endpoint(config: Config) -> str:
    """Where the conductor listens: `channel.address`, or a socket in a folder that follows from `run.directory`."""
    if config.channel.address:
        return config.channel.address
    return f"ipc://{tempfile.gettempdir()}/{local_name(config)}/conductor"


def local_name(config: Config) -> str:
    """Of the folders that this user's processes of the run share on one machine; it follows from `run.directory`."""
    run = hashlib.sha256(str(Path(config.run.directory).resolve()).encode()).hexdigest()[:16]
    return f"titan-opd-{os.getuid()}-{run}"


def conductor_address(config: Config, endpoint: str, *, member: str = WORKER) -> Address:
    """The endpoint with the conductor's public key, where there are keys; `member` is whose keys this process has."""
    if not config.channel.keys:
        return Address(endpoint)
    return Address(endpoint, load_keys(config.channel.keys, member).conductor)


def open_transport(config: Config, endpoint: str, *, member: str = WORKER) -> Transport:
    """The transport between processes, whose stores lie beside the conductor's socket, or at this machine's address.

    Args:
        config: its `channel.keys`.
        endpoint: the conductor's.
        member: whose keys; `CONDUCTOR` for the conductor.

    Raises:
        ValueError: keys are needed and there are none.
    """
    keys = load_keys(config.channel.keys, member) if config.channel.keys else None
    if endpoint.startswith("ipc://"):
        return ZmqTransport(keys=keys, stores=endpoint.rpartition("/")[0])
    host = endpoint.removeprefix("tcp://").rpartition(":")[0]
    own = host if member == CONDUCTOR else _own_address_towards(host)
    return ZmqTransport(keys=keys, stores=f"tcp://{own}:*")


def port_limits(config: Config) -> PortLimits:
    """When the conductor loses patience."""
    channel = config.channel
    return PortLimits(
        heartbeat_seconds=channel.heartbeat_seconds,
        silence_seconds=channel.silence_seconds,
        clock_skew_seconds=channel.clock_skew_seconds,
    )


def _own_address_towards(host: str) -> str:
    """This machine's address on the way to `host`; sends nothing."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host.strip("[]"), 9))
        except OSError as error:
            raise ValueError(f"channel.address names the host {host!r}, which cannot be reached ({error})") from None
        return probe.getsockname()[0]
