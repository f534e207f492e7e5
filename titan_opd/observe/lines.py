"""A file of JSON lines that can be cut back to where a checkpoint was taken."""

from __future__ import annotations

import fcntl
import json
import os
import warnings
from pathlib import Path
from typing import Any

from titan_opd.errors import writing


class LineFile:
    """Appends JSON objects, one a line; each is flushed, so that a killed process keeps what it has written.

    The file is locked while it is open: a process that outlived its launcher must not go on writing to a run that has
    been resumed. The lock ends with its process, however that ends.

    Args:
        path: the file.
        keep_bytes: cut the file to this length first: what was written after a checkpoint is not part of it.

    Raises:
        ValueError: another process writes to the file, or no line of it ends at `keep_bytes`.
        StorageError: from here on, when the file cannot be written.
    """

    def __init__(self, path: Path, *, keep_bytes: int = 0) -> None:
        self._path = path
        with writing(path):
            self._file = path.open("a+b")
        try:
            self._lock()
            self._cut(keep_bytes)
        except BaseException:
            self._file.close()
            raise

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(
                f"another process is writing to {self._path}: the run is still going on; stop that process first "
                f"(it is named by: fuser {self._path})"
            ) from None
        except OSError as error:  # some cluster file systems have no locks
            warnings.warn(
                f"{self._path} cannot be locked ({error}); make sure that no other process writes to this run",
                stacklevel=3,
            )

    def _cut(self, keep_bytes: int) -> None:
        length = self._file.seek(0, os.SEEK_END)
        if keep_bytes > 0:
            self._file.seek(keep_bytes - 1)
            if self._file.read(1) != b"\n":
                raise ValueError(
                    f"{self._path} had {keep_bytes} bytes when the checkpoint was taken; now it has {length} and no "
                    "line ends there, so it was changed since. Put the file back, or begin a new run from the "
                    "checkpoint's folder as student.path"
                )
        with writing(self._path):
            self._file.truncate(keep_bytes)
        self._file.seek(keep_bytes)

    def sync(self) -> int:
        """Bring the file onto the disk; returns its length in bytes, which is what a checkpoint notes."""
        with writing(self._path):
            os.fsync(self._file.fileno())
        return self._file.tell()

    def write_line(self, record: dict[str, Any]) -> None:
        """Append one object."""
        with writing(self._path):
            self._file.write(json.dumps(record).encode() + b"\n")
            self._file.flush()

    def close(self) -> None:
        """Close the file, which ends its lock."""
        self._file.close()


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a file of JSON lines; half a last line, of a process that writes or was killed, is left out."""
    complete, _, _ = path.read_text().rpartition("\n")
    return [json.loads(line) for line in complete.splitlines()]
