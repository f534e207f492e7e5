"""Where somebody listens, and which addresses are safe without keys."""

from __future__ import annotations

import fcntl
import ipaddress
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

from msgspec import Meta, Struct

LONGEST_IPC_PATH = 107  # bytes of a Unix socket's path on Linux, without the zero at its end


class Address(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Where somebody listens.

    Attributes:
        endpoint: `tcp://HOST:PORT`, `ipc://PATH`, or `local://NAME` within one process.
        public_key: CURVE key of who listens there (Z85, 40 characters), or "" where the channel has none.
    """

    endpoint: Annotated[str, Meta(min_length=1, max_length=120)]
    public_key: Annotated[str, Meta(max_length=40)] = ""


def needs_keys(endpoint: str) -> bool:
    """Whether other machines can reach an endpoint, so that it must not be open without keys.

    Raises:
        ValueError: it is no address that the channel understands.
    """
    scheme, _, rest = endpoint.partition("://")
    if scheme == "ipc" and rest.startswith("/"):
        return False
    host, colon, port = rest.rpartition(":")
    if scheme != "tcp" or not colon or not host or not (port == "*" or (port.isdigit() and 0 < int(port) < 65536)):
        raise ValueError(
            f"{endpoint!r} is no address; write tcp://127.0.0.1:5555 (or port * for any free one), "
            "tcp://HOST:PORT with keys, or ipc:///absolute/path"
        )
    try:
        return not ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:  # a host's name: whatever it resolves to today
        return True


def check_address(endpoint: str, *, keys: bool) -> None:
    """Refuse an endpoint that other machines can reach when there are no keys.

    Raises:
        ValueError: it is no address, or one that needs keys.
    """
    if needs_keys(endpoint) and not keys:
        raise ValueError(
            f"{endpoint} can be reached from other machines, so it needs CURVE keys: make them with "
            "`python -m titan_opd.channel.keys FOLDER conductor worker` and name the folder, or use "
            "tcp://127.0.0.1:PORT or ipc:///PATH"
        )


@contextmanager
def private_socket(endpoint: str) -> Iterator[None]:
    """Hold an ipc endpoint: its folder is this user's alone, and no other process listens there.

    ZeroMQ takes over the file of a listener that still lives without a word, so a lock beside it says who has it. For
    other endpoints this does nothing.

    Raises:
        ValueError: the path is too long, others can enter its folder, or another process has it.
    """
    if not endpoint.startswith("ipc://"):
        yield
        return
    path = Path(endpoint.removeprefix("ipc://"))
    if len(os.fsencode(path)) > LONGEST_IPC_PATH:
        raise ValueError(
            f"{endpoint} has more than {LONGEST_IPC_PATH} bytes; choose a shorter folder, such as /tmp/opd-1"
        )
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = path.parent.stat()
    if status.st_uid != os.getuid() or stat.S_IMODE(status.st_mode) & 0o077:
        raise ValueError(
            f"others than this user may enter {path.parent} (mode {stat.S_IMODE(status.st_mode):o}, owner "
            f"{status.st_uid}); a socket there would be open to them: chmod 700 it, or name a new folder"
        )
    lock = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise address_taken(endpoint) from None
        yield
    finally:
        os.close(lock)


def address_taken(endpoint: str) -> ValueError:
    """The error for an endpoint that somebody else listens at."""
    return ValueError(
        f"{endpoint} is taken: another process listens there. Stop it (`ss -ltnxp` names it), choose another port or "
        "path, or let port * find a free one"
    )
