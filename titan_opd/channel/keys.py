"""CURVE keys: who may talk to whom when the channel leaves the machine.

    python -m titan_opd.channel.keys FOLDER conductor worker

writes `FOLDER/NAME.key_secret` (mode 0600, stays with that member) and `FOLDER/public/NAME.key` (all members have all
of these). Whoever's public key lies in `public/` may connect; nobody else gets a byte in or out.
"""

from __future__ import annotations

import os
import re
import stat
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import zmq
import zmq.auth

CONDUCTOR = "conductor"
_COMMAND = "python -m titan_opd.channel.keys"


@dataclass(frozen=True)
class Keys:
    """One member's keys.

    Attributes:
        name: this member's.
        public, secret: its own pair (Z85).
        folder: of the members' public keys.
        members: public key by name.
    """

    name: str
    public: str
    secret: str
    folder: Path
    members: dict[str, str]

    def __repr__(self) -> str:  # a secret has no place in a log
        return f"Keys(name={self.name!r}, folder={str(self.folder)!r})"

    def member(self, public_key: str) -> str:
        """The name that a public key belongs to, or "" for a stranger's."""
        return next((name for name, key in self.members.items() if key == public_key), "")

    @property
    def conductor(self) -> str:
        """The conductor's public key.

        Raises:
            ValueError: the folder has none.
        """
        if CONDUCTOR not in self.members:
            raise ValueError(f"{self.folder} has no {CONDUCTOR}.key; copy it there from the conductor's machine")
        return self.members[CONDUCTOR]


def generate_keys(folder: Path | str, names: Sequence[str]) -> None:
    """Make a pair of keys for each member that has none yet.

    Args:
        folder: gets the secret keys, and the public ones in its folder `public`; made with mode 0700.
        names: letters, digits, dots, dashes, underscores.

    Raises:
        ValueError: a name is none, or its keys exist.
    """
    folder = Path(folder)
    public = folder / "public"
    for name in names:
        if not re.fullmatch(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,63}", name):
            raise ValueError(f"{name!r} names no member; use letters, digits, dots, dashes and underscores")
        if (folder / f"{name}.key_secret").exists() or (public / f"{name}.key").exists():
            raise ValueError(f"{folder} has keys of {name!r} already; delete both files to replace them")
    public.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder.chmod(0o700)
    before = os.umask(0o077)
    try:
        for name in names:
            public_file, _ = zmq.auth.create_certificates(folder, name)
            Path(public_file).rename(public / f"{name}.key")
    finally:
        os.umask(before)


def load_keys(folder: Path | str, name: str) -> Keys:
    """A member's secret key and everybody's public keys.

    Raises:
        ValueError: a file is missing or no key, or others may read the secret.
    """
    folder = Path(folder)
    secret_file = folder / f"{name}.key_secret"
    if not secret_file.exists():
        raise ValueError(f"{secret_file} does not exist; make it with `{_COMMAND} {folder} {name}`, or copy it there")
    mode = stat.S_IMODE(secret_file.stat().st_mode)
    if mode & 0o077:
        raise ValueError(f"others may read {secret_file} (mode {mode:o}); chmod 600 it, or make new keys")
    public, secret = _read(secret_file)
    if not secret:
        raise ValueError(f"{secret_file} has no secret key; make a new pair with `{_COMMAND}`")
    members = {path.stem: _read(path)[0] for path in sorted((folder / "public").glob("*.key"))}
    return Keys(name=name, public=public, secret=secret, folder=folder / "public", members=members)


def _read(path: Path) -> tuple[str, str]:
    try:
        public, secret = zmq.auth.load_certificate(path)
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read as a key ({error}); make a new pair with `{_COMMAND}`") from None
    return public.decode(), (secret or b"").decode()


def main(arguments: Sequence[str] | None = None) -> int:
    """`python -m titan_opd.channel.keys FOLDER NAME ...`"""
    arguments = sys.argv[1:] if arguments is None else arguments
    if len(arguments) < 2 or arguments[0].startswith("-"):
        print(f"usage: {_COMMAND} FOLDER NAME [NAME ...]", file=sys.stderr)
        return 2
    folder, *names = arguments
    try:
        generate_keys(folder, names)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    print(
        f"{folder}/NAME.key_secret goes to that member's machine and nowhere else; {folder}/public goes to all, whole."
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
