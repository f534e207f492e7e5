"""The events file of one process: its lines, and how they get onto the disk.

One JSON object a line, appended in the order of time, so that many files can be merged without sorting. A line is
written whole or, when the process is killed in the middle of it, is the last one: whoever reads drops it.
"""

from __future__ import annotations

import os
import threading
import warnings
from pathlib import Path
from typing import Any

import msgspec

BUFFER_BYTES = 64 << 10  # a full buffer is written at once,
FLUSH_SECONDS = 1.0  # and any other after this time


class Line(msgspec.Struct, tag_field="line", omit_defaults=True):
    """What happened at `ns` of this process's CLOCK_MONOTONIC."""

    ns: int


class ProcessLine(Line, tag="process"):
    """The first line: whose file this is.

    Attributes:
        machine: names the clock that `ns` is read from; see `machine_id`.
        unix_ns: the wall clock at `ns`.
    """

    role: str
    rank: int
    pid: int
    host: str
    machine: str
    unix_ns: int


class ClockLine(Line, tag="clock"):
    """From here on the clock of `machine` shows `ns + offset_ns`, within `error_ns`."""

    machine: str
    offset_ns: int
    error_ns: int


class ThreadLine(Line):
    """What one thread does.

    Attributes:
        thread: its number in this process.
        thread_name: its name, in the first line of a thread.
    """

    thread: int
    name: str
    args: dict[str, Any] = {}
    thread_name: str = ""


class BeginLine(ThreadLine, tag="begin"):
    """A span begins inside the open spans of its thread."""


class EndLine(Line, tag="end"):
    """The innermost open span of the thread ends."""

    thread: int


class InstantLine(ThreadLine, tag="instant"):
    """Something that has no duration."""


class CounterLine(Line, tag="counter"):
    """The values of a counter's series from here on."""

    name: str
    values: dict[str, float] = {}


class FullLine(Line, tag="full"):
    """The file has reached its limit: from here on events are counted, not written."""


class CloseLine(Line, tag="close"):
    """The last line of a process that ended in good order; `left_out` events were counted, not written."""

    left_out: int = 0


AnyLine = ProcessLine | ClockLine | BeginLine | EndLine | InstantLine | CounterLine | FullLine | CloseLine

# A trace must not end a run because of an argument that JSON does not know: it is written as its text.
_encoder = msgspec.json.Encoder(enc_hook=str)
decode_line = msgspec.json.Decoder(AnyLine).decode


class EventsFile:
    """Appends lines through a buffer; a killed process loses at most `FLUSH_SECONDS` or `BUFFER_BYTES` of them.

    When the disk refuses a line, nothing more is written: the lines before it stay good. A warning says so once, since
    the run itself does not depend on its trace.

    Not safe for several threads at once, `flush_due` apart: the caller holds `lock`.

    Args:
        path: of a new file.
        max_bytes: largest size; lines beyond it are counted in `left_out`, except those that must come.

    Raises:
        OSError: the file cannot be made; FileExistsError when it is there.
    """

    def __init__(self, path: Path, max_bytes: int) -> None:
        self.path = path
        self.left_out = 0
        self.lock = threading.RLock()  # reentrant: a signal handler may write while its thread is writing
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._buffer: list[bytes] = []
        self._buffered = 0
        self._full = False
        self._pid = os.getpid()
        self._file: int | None = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o644)
        self._closing = threading.Event()
        threading.Thread(target=self._flush_now_and_then, name="trace flush", daemon=True).start()

    def write(self, line: Line, *, must: bool = False) -> bool:
        """Append a line; False when it was left out.

        Args:
            line: what to write.
            must: write it although the file is full: the end of a span that has its beginning, the closing line.
        """
        if self._file is None:
            self.left_out += 1
            return False
        text = _encoder.encode(line)
        if not must and (self._full or self._num_bytes + len(text) >= self._max_bytes):
            self.left_out += 1
            if not self._full:
                self._full = True
                self.write(FullLine(line.ns), must=True)
            return False
        self._buffer.append(text)
        self._num_bytes += len(text) + 1
        self._buffered += len(text) + 1
        if self._buffered >= BUFFER_BYTES:
            self.flush()
        return True

    def flush(self) -> None:
        """Hand the buffer to the operating system."""
        lines, self._buffer, self._buffered = self._buffer, [], 0
        if not lines or self._file is None or os.getpid() != self._pid:  # a forked child has a copy of the buffer
            return
        rest = memoryview(b"\n".join(lines) + b"\n")
        try:
            while rest:
                rest = rest[os.write(self._file, rest) :]
        except BaseException as error:  # also an interrupt: nothing may follow half a line
            os.close(self._file)
            self._file = None
            self.left_out += len(lines)
            if not isinstance(error, OSError):
                raise
            warnings.warn(
                f"the trace {self.path} ends here, it cannot be written ({error}); the run goes on", stacklevel=2
            )

    def close(self, last: CloseLine) -> None:
        """Write the last line and close the file; a warning tells of what was left out."""
        self._closing.set()
        if self._file is None:
            return
        last.left_out = self.left_out
        self.write(last, must=True)
        self.flush()
        if self._file is not None:
            os.close(self._file)
            self._file = None
        if last.left_out:
            warnings.warn(
                f"{last.left_out} events were left out of {self.path}, which may have {self._max_bytes >> 20} MiB",
                stacklevel=3,
            )

    def _flush_now_and_then(self) -> None:
        while not self._closing.wait(FLUSH_SECONDS):
            with self.lock:
                self.flush()
