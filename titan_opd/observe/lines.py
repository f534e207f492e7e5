"""A file of JSON lines that can be cut back to where a checkpoint was taken."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


class LineFile:
    """Appends JSON objects, one a line; each is flushed, so that a killed process keeps what it has written.

    Args:
        path: the file.
        keep_bytes: cut the file to this length first: what was written after a checkpoint is not part of it.
    """

    def __init__(self, path: Path, *, keep_bytes: int = 0) -> None:
        self._file = path.open("ab")
        length = self._file.seek(0, os.SEEK_END)
        if length < keep_bytes:
            raise ValueError(
                f"{path} has {length} bytes, but {keep_bytes} when the checkpoint was taken; it was changed since. "
                "Put the file back, or begin a new run from the checkpoint's folder as student.path"
            )
        self._file.truncate(keep_bytes)
        self._file.seek(keep_bytes)

    def sync(self) -> int:
        """Bring the file onto the disk; returns its length in bytes, which is what a checkpoint notes."""
        os.fsync(self._file.fileno())
        return self._file.tell()

    def write_line(self, record: dict[str, Any]) -> None:
        """Append one object."""
        self._file.write(json.dumps(record).encode() + b"\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a file of JSON lines."""
    return [json.loads(line) for line in path.read_text().splitlines()]
