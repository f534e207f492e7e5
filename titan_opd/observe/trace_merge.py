"""One trace of a whole run, in the trace event format that Perfetto and Chrome read.

The format is described in "Trace Event Format" (Google, 2016). Spans become pairs of B and E events, which nest by
thread; counters C, instants i; names of processes and threads M. Times are microseconds since the run's first event.
"""

from __future__ import annotations

import heapq
import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from titan_opd.errors import writing
from titan_opd.observe.trace import TRACE_FOLDER
from titan_opd.observe.trace_file import (
    AnyLine,
    BeginLine,
    ClockLine,
    CloseLine,
    CounterLine,
    EndLine,
    FullLine,
    InstantLine,
    ProcessLine,
    ThreadLine,
    decode_line,
)

MERGED_FILE = "trace.json"
ROLE_ORDER = ("trainer", "conductor", "rollout", "teacher")  # from top to bottom; others follow by name


@dataclass
class _Source:
    """One events file after a first reading: all that must be known of it before its events are written.

    Attributes:
        path: the file.
        process: its first line.
        num_bytes: complete lines; a live process may append more meanwhile.
        alignment: its first ClockLine; None when it is on its own machine's clock.
        error_ns: largest bound of its alignments.
        threads: names by number.
        last_ns: of its last line.
        full: whether it reached its limit.
        closed: its last line, when the process ended in good order.
        unreadable: lines that are none of ours.
    """

    path: Path
    process: ProcessLine
    num_bytes: int = 0
    alignment: ClockLine | None = None
    error_ns: int = 0
    threads: dict[int, str] = field(default_factory=dict)
    last_ns: int = 0
    full: bool = False
    closed: CloseLine | None = None
    unreadable: int = 0

    @property
    def clock(self) -> str:
        """The machine on whose clock the events are."""
        return self.alignment.machine if self.alignment else self.process.machine

    @property
    def unix_minus_clock_ns(self) -> int:
        """The wall clock of this process's machine minus that clock."""
        offset_ns = self.alignment.offset_ns if self.alignment else 0
        return self.process.unix_ns - self.process.ns - offset_ns


def merge_trace(run_directory: Path | str, say: Callable[[str], object] = print) -> Path:
    """Merge the events files of all processes of a run into `trace.json`, also while the run goes on.

    Memory does not grow with the events: each file is read twice, line by line.

    Args:
        run_directory: the run's folder.
        say: called with each line that a person should read: what was written, and what is not as it should be.

    Returns:
        The merged file.

    Raises:
        ValueError: the run has no events files.
        StorageError: the merged file cannot be written.
    """
    folder, merged = Path(run_directory) / TRACE_FOLDER, Path(run_directory) / MERGED_FILE
    read = [_read(path) for path in sorted(folder.glob("*.jsonl"))]
    sources = sorted((source for source in read if source is not None), key=_order)
    if not sources:
        raise ValueError(
            f"{folder} has no events of any process; is this a run's folder, and did it run with a tracer?"
        )
    shifts_ns, clock_notices = _shifts(sources)
    starts = [source.process.ns + _offset(source) + shift for source, shift in zip(sources, shifts_ns, strict=True)]
    notices = clock_notices + [notice for source in sources for notice in _notices(source)]
    if len(read) > len(sources):
        notices.append(f"{len(read) - len(sources)} files of processes that were killed at once hold nothing")

    origin_ns = min(starts)
    streams = [
        _events(source, pid, shift - origin_ns)
        for pid, (source, shift) in enumerate(zip(sources, shifts_ns, strict=True), start=1)
    ]
    num_events, end_us = 0, 0.0
    unfinished = merged.with_name(MERGED_FILE + ".unfinished")
    with writing(merged):
        with unfinished.open("w") as file:
            file.write('{"displayTimeUnit": "ms",\n"otherData": ' + json.dumps({"notices": notices}))
            file.write(',\n"traceEvents": [\n')
            file.write(",\n".join(json.dumps(event) for event in _names(sources)))
            for event in heapq.merge(*streams, key=lambda event: event["ts"]):
                file.write(",\n" + json.dumps(event))
                num_events, end_us = num_events + 1, event["ts"]
            file.write("\n]}\n")
        os.replace(unfinished, merged)
    for notice in notices:
        say(f"note: {notice}")
    say(
        f"wrote {merged}: {num_events} events of {len(sources)} processes in {end_us / 1e6:.1f} s; "
        "open it at https://ui.perfetto.dev"
    )
    return merged


def _order(source: _Source) -> tuple:
    process = source.process
    place = ROLE_ORDER.index(process.role) if process.role in ROLE_ORDER else len(ROLE_ORDER)
    return place, process.role, process.rank, process.unix_ns


def _lines(path: Path, num_bytes: int | None = None) -> Iterator[tuple[int, AnyLine | None]]:
    """The complete lines of a file with the position of their end; None for one that cannot be read."""
    position = 0
    with path.open("rb") as file:
        for text in file:
            position += len(text)
            if not text.endswith(b"\n") or (num_bytes is not None and position > num_bytes):
                return
            try:
                yield position, decode_line(text)
            except msgspec.MsgspecError:
                yield position, None


def _read(path: Path) -> _Source | None:
    """The first reading; None when not even the first line is there."""
    source = None
    for position, line in _lines(path):
        if source is None:
            if not isinstance(line, ProcessLine):
                return None
            source = _Source(path, line)
        source.num_bytes = position
        if line is None:
            source.unreadable += 1
            continue
        source.last_ns = line.ns
        if isinstance(line, ThreadLine) and line.thread_name:
            source.threads[line.thread] = line.thread_name
        elif isinstance(line, ClockLine):
            source.alignment = source.alignment or line
            source.error_ns = max(source.error_ns, line.error_ns)
        elif isinstance(line, FullLine):
            source.full = True
        elif isinstance(line, CloseLine):
            source.closed = line
    return source


def _offset(source: _Source) -> int:
    return source.alignment.offset_ns if source.alignment else 0


def _shifts(sources: Sequence[_Source]) -> tuple[list[int], list[str]]:
    """What to add to each source's clock to have all on the first one's.

    Clocks of different machines, or of one before and after a boot, have nothing in common but the wall clock.
    """
    wall: dict[str, int] = {}
    for source in sorted(sources, key=lambda source: source.alignment is not None):  # best known by its own machine
        wall.setdefault(source.clock, source.unix_minus_clock_ns)
    base = wall[sources[0].clock]
    notices = []
    if len(wall) > 1:
        notices.append(
            f"the events are on {len(wall)} clocks (machines that were not aligned, or a boot between two starts); "
            "they are put together by the wall clocks, so times of different clocks can be off by seconds"
        )
    error_ns = max(source.error_ns for source in sources)
    if error_ns:
        notices.append(f"clocks of other machines are aligned within {error_ns / 1000:.0f} us")
    return [wall[source.clock] - base for source in sources], notices


def _notices(source: _Source) -> Iterator[str]:
    if source.closed is None:
        yield f"{source.path.name} has no end: its process still runs or was killed"
    left_out = source.closed.left_out if source.closed else 0
    if source.full or left_out:
        number = f"{left_out}" if left_out else "an unknown number of"
        yield f"{source.path.name} leaves out {number} events, because it reached its limit or the disk refused them"
    if source.unreadable:
        yield f"{source.path.name} has {source.unreadable} lines that cannot be read; they are left out"


def _names(sources: Sequence[_Source]) -> Iterator[dict[str, Any]]:
    """Metadata events: processes by role and rank, threads by name."""
    starts: dict[tuple[str, int], int] = {}
    for pid, source in enumerate(sources, start=1):
        process = source.process
        start = starts[process.role, process.rank] = starts.get((process.role, process.rank), 0) + 1
        name = f"{process.role} {process.rank}" + (f" (start {start})" if start > 1 else "")
        labels = ", ".join([f"process {process.pid} on {process.host}", *_notices(source)])
        yield {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": name}}
        yield {"ph": "M", "name": "process_labels", "pid": pid, "tid": 0, "args": {"labels": labels}}
        yield {"ph": "M", "name": "process_sort_index", "pid": pid, "tid": 0, "args": {"sort_index": pid}}
        for thread, thread_name in source.threads.items():
            yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": thread, "args": {"name": thread_name}}


def _events(source: _Source, pid: int, shift_ns: int) -> Iterator[dict[str, Any]]:
    """The events of one process in the order of time. Spans that have no end last to the end of the file."""
    offset_ns, newest_ns = _offset(source), 0
    open_spans: dict[int, list[str]] = {}
    for _, line in _lines(source.path, source.num_bytes):
        if line is None:
            continue
        if isinstance(line, ClockLine):
            offset_ns = line.offset_ns
        # A new alignment may set the clock back by its error; time does not go back.
        newest_ns = max(newest_ns, line.ns + offset_ns + shift_ns)
        event: dict[str, Any] = {"pid": pid, "ts": newest_ns / 1000}
        if isinstance(line, BeginLine):
            open_spans.setdefault(line.thread, []).append(line.name)
            yield event | {"ph": "B", "tid": line.thread, "name": line.name, "args": line.args}
        elif isinstance(line, EndLine):
            if open_spans.get(line.thread):  # its beginning may be a line that cannot be read
                yield event | {"ph": "E", "tid": line.thread, "name": open_spans[line.thread].pop()}
        elif isinstance(line, InstantLine):
            yield event | {"ph": "i", "s": "t", "tid": line.thread, "name": line.name, "args": line.args}
        elif isinstance(line, CounterLine):
            yield event | {"ph": "C", "tid": 0, "name": line.name, "args": line.values}
        elif isinstance(line, FullLine):
            yield event | {"ph": "i", "s": "p", "tid": 0, "name": "events file is full: from here on left out"}
    for thread, names in open_spans.items():
        for name in reversed(names):
            event = {"pid": pid, "ts": newest_ns / 1000, "ph": "E", "tid": thread, "name": name}
            yield event | {"args": {"unfinished": True}}
