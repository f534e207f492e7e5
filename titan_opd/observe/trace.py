"""What each process does when: spans, counters and instants, for one picture of the whole run.

A process opens its tracer once (`open_tracer`); code anywhere below says what it does:

    with trace.span("rollout", version=3, samples=16):
        ...
    trace.counter("queue", waiting=3, scored=12)

Without an open tracer these do nothing and cost a fraction of a microsecond. `merge_trace` (trace_merge.py) makes one
file of all processes; README.md beside this file tells how to look at it.
"""

from __future__ import annotations

import math
import os
import platform
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from titan_opd.errors import writing
from titan_opd.observe.trace_file import (
    BeginLine,
    ClockLine,
    CloseLine,
    CounterLine,
    EndLine,
    EventsFile,
    InstantLine,
    ProcessLine,
    ThreadLine,
)

TRACE_FOLDER = "trace"  # in the run's folder
DEFAULT_MAX_MB = 256


@dataclass(frozen=True)
class ClockSample:
    """One question to another machine for its clock, and the answer. Nanoseconds of CLOCK_MONOTONIC.

    Attributes:
        sent_ns: when the question left, on this machine's clock.
        remote_ns: what the other machine's clock showed when it answered.
        received_ns: when the answer was here, on this machine's clock.
    """

    sent_ns: int
    remote_ns: int
    received_ns: int


@dataclass(frozen=True)
class ClockOffset:
    """Another machine's clock minus this one's.

    Attributes:
        offset_ns: add it to this machine's CLOCK_MONOTONIC to get the other's.
        error_ns: the offset is at most this far from the truth.
    """

    offset_ns: int
    error_ns: int

    @classmethod
    def estimate(cls, samples: Iterable[ClockSample]) -> ClockOffset:
        """The offset by the sample with the shortest round trip.

        The other clock was read somewhere between `sent_ns` and `received_ns`. Taken for the middle, it is off by half
        the round trip at most, however unequal the two ways are (Cristian 1989, "Probabilistic clock synchronization").

        Raises:
            ValueError: no samples, or an answer that is older than its question.
        """
        samples = list(samples)
        if not samples:
            raise ValueError("a clock offset needs at least one exchange with the other machine; there is none")
        for sample in samples:
            if sample.received_ns < sample.sent_ns:
                raise ValueError(
                    f"{sample} has an answer before its question; both times must be of one machine's monotonic clock"
                )
        best = min(samples, key=lambda sample: sample.received_ns - sample.sent_ns)
        middle_ns = (best.sent_ns + best.received_ns) // 2
        return cls(best.remote_ns - middle_ns, (best.received_ns - best.sent_ns + 1) // 2)


def machine_id() -> str:
    """Names this machine's CLOCK_MONOTONIC: all processes of a machine share it until it boots again."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return platform.node()  # no Linux: a reboot within one run goes unseen


class Tracer:
    """Writes what one process does to `FOLDER/trace/ROLE-RANK-START.jsonl`.

    Safe to use from all threads. Spans of one thread nest; a span ends in the thread in which it began (a coroutine
    that awaits inside a span would break that).

    Args:
        folder: the run's folder.
        role: such as "trainer", "rollout", "teacher", "conductor".
        rank: tells processes of one role apart.
        max_mb: largest events file in MiB; events beyond it are counted and reported, not written.

    Raises:
        ValueError: a role that cannot be part of a file's name, a limit that holds nothing.
        StorageError: the file cannot be made.
    """

    def __init__(self, folder: Path | str, role: str, rank: int, *, max_mb: float = DEFAULT_MAX_MB) -> None:
        if not re.fullmatch(r"[A-Za-z0-9_.]+", role) or rank < 0:
            raise ValueError(
                f"role {role!r} and rank {rank} name a file: the role takes letters, digits, '_' and '.', and the rank "
                "begins at 0"
            )
        if not max_mb > 0:
            raise ValueError(f"max_mb = {max_mb} leaves no room for any event; set it above 0")
        self._file = _new_file(Path(folder) / TRACE_FOLDER, f"{role}-{rank}", int(max_mb * (1 << 20)))
        self._thread = threading.local()
        self._num_threads = 0
        self._closed = False
        with self._file.lock:
            now = time.monotonic_ns()
            process = ProcessLine(now, role, rank, os.getpid(), platform.node(), machine_id(), time.time_ns())
            self._file.write(process, must=True)
            self._file.flush()

    @property
    def path(self) -> Path:
        """The events file."""
        return self._file.path

    @property
    def left_out(self) -> int:
        """Events that were counted, not written."""
        return self._file.left_out

    def align(self, offset: ClockOffset, machine: str) -> None:
        """Put the events that follow on the clock of another machine.

        May be repeated, since clocks drift. The first alignment also holds for the events before it.

        Args:
            offset: the other machine's clock minus this one's.
            machine: `machine_id()` of the other machine, where the run's clock is.
        """
        with self._file.lock:
            if not self._closed:
                line = ClockLine(time.monotonic_ns(), machine, offset.offset_ns, offset.error_ns)
                self._file.write(line, must=True)

    def span(self, name: str, /, **args: Any) -> Span:
        """A context manager: the block is shown as a bar with these arguments."""
        return Span(self, name, args)

    def instant(self, name: str, /, **args: Any) -> None:
        """A mark at this moment."""
        with self._file.lock:
            if not self._closed:
                self._write_here(InstantLine, name, args)

    def counter(self, name: str, /, **values: float) -> None:
        """The values of a counter's series from now on. What is not finite is left out: the format cannot hold it.

        Raises:
            ValueError: a value that is no number.
        """
        numbers = {}
        for series, value in values.items():
            try:
                numbers[series] = float(value)
            except (TypeError, ValueError):
                raise ValueError(f"counter {name!r}: {series} = {value!r} is no number; use trace.instant") from None
        finite = {series: number for series, number in numbers.items() if math.isfinite(number)}
        with self._file.lock:
            if finite and not self._closed:
                self._file.write(CounterLine(time.monotonic_ns(), name, finite))

    def flush(self) -> None:
        """Hand what is buffered to the operating system: from then on it outlives the process."""
        with self._file.lock:
            self._file.flush()

    def close(self) -> None:
        """End the file; what other threads still do is not recorded any more."""
        with self._file.lock:
            if not self._closed:
                self._closed = True
                self._file.close(CloseLine(time.monotonic_ns()))

    def _begin(self, span: Span) -> bool:
        with self._file.lock:
            if self._closed or not self._write_here(BeginLine, span.name, span.args):
                return False
            self._thread.spans.append(span)
            return True

    def _end(self, span: Span) -> None:
        innermost = self._thread.spans.pop()
        assert innermost is span, f"span {span.name!r} ends inside span {innermost.name!r}"
        with self._file.lock:
            if not self._closed:
                self._file.write(EndLine(time.monotonic_ns(), self._thread.number), must=True)

    def _write_here(self, line: type[ThreadLine], name: str, args: dict[str, Any]) -> bool:
        """Write what the calling thread does; False when it was left out. The caller holds the lock."""
        thread = self._thread
        if hasattr(thread, "number"):
            return self._file.write(line(time.monotonic_ns(), thread.number, name, args))
        number, thread_name = self._num_threads + 1, threading.current_thread().name
        written = self._file.write(line(time.monotonic_ns(), number, name, args, thread_name))
        if written:
            self._num_threads = thread.number = number
            thread.spans = []
        return written


class Span:
    """One block of one thread; see `Tracer.span`. Use it once."""

    __slots__ = ("_tracer", "_written", "args", "name")

    def __init__(self, tracer: Tracer, name: str, args: dict[str, Any]) -> None:
        self.name = name
        self.args = args
        self._tracer = tracer
        self._written = False

    def __enter__(self) -> None:
        self._written = self._tracer._begin(self)

    def __exit__(self, *_: object) -> None:
        if self._written:
            self._tracer._end(self)


def _new_file(folder: Path, name: str, max_bytes: int) -> EventsFile:
    """A file of its own for each start of a process: nobody ever appends to what another process wrote."""
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        for start in count(1):
            try:
                return EventsFile(folder / f"{name}-{start}.jsonl", max_bytes)
            except FileExistsError:
                continue
    raise AssertionError("unreachable")


# The process's tracer. A forked child is another process: it opens its own or has none.
_tracer: Tracer | None = None
# What marks spans for somebody else who listens just now: a profiler.
_mark: Callable[[str], AbstractContextManager[Any]] | None = None
_NOTHING = nullcontext()


@contextmanager
def open_tracer(folder: Path | str, role: str, rank: int, *, max_mb: float = DEFAULT_MAX_MB) -> Iterator[Tracer]:
    """Open the tracer that `span`, `counter` and `instant` of this module write to; see `Tracer`.

    Raises:
        ValueError: the process has one already, or as `Tracer` does.
    """
    global _tracer
    if _tracer is not None:
        raise ValueError(f"this process already writes the trace {_tracer.path}; close it first")
    _tracer = tracer = Tracer(folder, role, rank, max_mb=max_mb)
    try:
        yield tracer
    finally:
        _tracer = None
        tracer.close()


def mark_spans(mark: Callable[[str], AbstractContextManager[Any]] | None) -> None:
    """From now on a span is also inside `mark(name)`, with or without a tracer; None ends that."""
    global _mark
    _mark = mark


def _forget() -> None:
    global _tracer, _mark
    _tracer = _mark = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)


def span(name: str, /, **args: Any) -> AbstractContextManager[None]:
    """`Tracer.span` of the process's tracer; without one, nothing."""
    tracer, mark = _tracer, _mark  # another thread may close it meanwhile
    own = _NOTHING if tracer is None else tracer.span(name, **args)
    return own if mark is None else _both(own, mark(name))


@contextmanager
def _both(outer: AbstractContextManager[Any], inner: AbstractContextManager[Any]) -> Iterator[None]:
    with outer, inner:
        yield


def instant(name: str, /, **args: Any) -> None:
    """`Tracer.instant` of the process's tracer; without one, nothing."""
    tracer = _tracer
    if tracer is not None:
        tracer.instant(name, **args)


def counter(name: str, /, **values: float) -> None:
    """`Tracer.counter` of the process's tracer; without one, nothing."""
    tracer = _tracer
    if tracer is not None:
        tracer.counter(name, **values)


def flush() -> None:
    """`Tracer.flush` of the process's tracer; without one, nothing."""
    tracer = _tracer
    if tracer is not None:
        tracer.flush()
