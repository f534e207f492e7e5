"""Ends a run in which nothing moves any more, and tells why.

A run that hangs costs as much as one that trains. The watchdog is told of progress; when there has been none for
`stall_seconds`, it asks who waits for whom, writes it down with the stacks of all threads, and raises StallError in the
main thread. Three lines of defence, since whatever hangs may hang anything:

1. a signal makes the main thread raise, also out of a blocking system call;
2. a main thread that has not unwound `grace_seconds` later (a collective, a lock in C) is ended with its process;
3. when a C call holds the interpreter itself, so that this thread cannot run, faulthandler's timer ends the process.
"""

from __future__ import annotations

import faulthandler
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType, TracebackType
from typing import TextIO, TypeVar

from titan_opd.errors import StallError, writing
from titan_opd.observe import trace
from titan_opd.observe.diagnosis import RunState, StallReport, diagnose
from titan_opd.observe.flight_recorder import describe_collectives
from titan_opd.observe.stacks import request_stacks
from titan_opd.observe.stall_text import print_report, report_text

REPORT_FILE = "watchdog.txt"
EXIT_STATUS = 1  # of a process whose main thread did not react
STEP_SECONDS = 10.0  # for each part of the report: whatever is asked may hang, too
_NUM_STEPS = 6  # parts that can take so long
_SIGNAL = signal.SIGUSR2

T = TypeVar("T")


class Watchdog:
    """Watches from `__enter__` to `__exit__`; a run has one, in its main process.

    Enter it in the main thread and outside of all that it has to guard: what comes after it is not watched.

        with Watchdog(run_directory, 600, collect=ask_conductor) as watchdog:
            for _ in range(steps):
                step()
                watchdog.progress("trainer step")

    Args:
        run_directory: the run's folder, where `watchdog.txt` is written.
        stall_seconds: the longest time without progress.
        collect: called once the run stalls, in a thread of its own; the state of the schedule, None where there is
            none to tell.
        grace_seconds: the time that the main thread has to leave the `with` block after the StallError.

    Raises:
        ValueError: times that are not positive.
        StorageError: `watchdog.txt` cannot be written.
        StallError: in the main thread, at any place inside, when the run stalls.
    """

    def __init__(
        self,
        run_directory: Path | str,
        stall_seconds: float,
        *,
        collect: Callable[[], RunState | None],
        grace_seconds: float = 30.0,
    ) -> None:
        for name, seconds in (("stall_seconds", stall_seconds), ("grace_seconds", grace_seconds)):
            if not seconds > 0:
                raise ValueError(f"{name} = {seconds} would end every run at once; set it above 0")
        self.path = Path(run_directory) / REPORT_FILE
        self._stall_seconds = stall_seconds
        self._grace_seconds = grace_seconds
        self._collect = collect
        self._lock = threading.Lock()
        self._pauses = 0
        self._moved = 0.0
        self._progress: dict[str, float] = {}
        self._closing = threading.Event()
        self._error: StallError | None = None
        self._file: TextIO | None = None
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def progress(self, what: str) -> None:
        """Something has moved; from any thread, as often as you like."""
        self._moved = self._progress[what] = time.monotonic()

    @contextmanager
    def paused(self, reason: str) -> Iterator[None]:
        """Inside, nothing has to move: an evaluation, a checkpoint. From any thread; its end is progress."""
        with self._lock:
            self._pauses += 1
            faulthandler.cancel_dump_traceback_later()
        try:
            yield
        finally:
            with self._lock:
                self.progress(reason)
                self._pauses -= 1
                if not self._pauses:
                    self._arm_for_stall()

    def __enter__(self) -> Watchdog:
        assert threading.current_thread() is threading.main_thread(), "only the main thread can receive the StallError"
        with writing(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self.path.open("a")
        self._previous = signal.signal(_SIGNAL, self._raise)
        self.progress("start")
        self._thread.start()
        with self._lock:
            self._arm_for_stall()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with self._lock:
            self._closing.set()  # from here on the watchdog ends nothing
        self._thread.join(_NUM_STEPS * STEP_SECONDS)
        faulthandler.cancel_dump_traceback_later()
        signal.signal(_SIGNAL, self._previous)
        if self._error is not None:  # the process ends; closing a file on a disk that hangs would hang, too
            return
        self._file.close()
        with suppress(OSError):  # the run has ended well or says itself why not
            if self.path.stat().st_size == 0:
                self.path.unlink()

    def _raise(self, number: int, frame: FrameType | None) -> None:
        if self._error is not None:
            raise self._error
        if callable(self._previous):  # somebody else's signal
            self._previous(number, frame)

    def _arm_for_stall(self) -> None:
        if self._thread.is_alive() and not self._closing.is_set():  # a pause may begin earlier or end later
            self._arm(self._stall_seconds + self._grace_seconds)

    def _arm(self, seconds: float) -> None:
        """Let faulthandler end the process unless it is armed anew within this time."""
        faulthandler.dump_traceback_later(seconds, file=self._file, exit=True)

    # In the watchdog's thread

    def _watch(self) -> None:
        interval = min(1.0, self._stall_seconds / 4)
        while not self._closing.wait(interval):
            with self._lock:
                if self._pauses:
                    continue
                self._arm_for_stall()
                quiet_seconds = time.monotonic() - self._moved
            if quiet_seconds > self._stall_seconds:
                self._stop(quiet_seconds)
                return

    def _stop(self, quiet_seconds: float) -> None:
        self._arm(_NUM_STEPS * STEP_SECONDS + 2 * self._grace_seconds)
        try:
            cause = self._report(quiet_seconds)
        except Exception as error:  # a fault in the report must not keep the run hanging
            cause = f"the report failed: {error!r}"
        with self._lock:
            if self._closing.is_set():  # the run ended meanwhile
                return
            self._error = StallError(
                f"nothing has moved for {quiet_seconds:.0f} s (the limit is {self._stall_seconds:g}). Most likely: "
                f"{cause}. Who waits for whom, and all stacks: {self.path}"
            )
            signal.pthread_kill(threading.main_thread().ident, _SIGNAL)
        if self._closing.wait(self._grace_seconds):
            return
        last_words = f"the main thread has not reacted for {self._grace_seconds:g} s; the process ends\n"
        for say in (sys.stderr.write, self._append, lambda _: trace.flush()):
            with suppress(Exception):
                _within(STEP_SECONDS, lambda say=say: say(last_words))
        os._exit(EXIT_STATUS)

    def _report(self, quiet_seconds: float) -> str:
        """Find out, write down and print what is the matter; returns the most likely cause."""
        state, state_error, free_bytes = None, "", None
        try:
            state = _within(STEP_SECONDS, self._collect)
        except Exception as error:
            state_error = str(error) or repr(error)
        with suppress(OSError, TimeoutError):
            free_bytes = _within(STEP_SECONDS, lambda: shutil.disk_usage(self.path.parent).free)
        now = time.monotonic()
        progress = {what: now - moved for what, moved in dict(self._progress).items()}
        report = StallReport(self.path.parent, quiet_seconds, progress, free_bytes, state, state_error)
        with suppress(Exception):
            _within(STEP_SECONDS, lambda: print_report(report))
        with suppress(Exception):  # on a full disk the printed report has to do
            _within(STEP_SECONDS, lambda: self._write(report))
        trace.instant("stall", quiet_seconds=quiet_seconds)
        return diagnose(report)[0]

    def _write(self, report: StallReport) -> None:
        self._append(report_text(report))
        self._append(f"Stacks of this process ({os.getpid()}), most recent call first\n\n")
        faulthandler.dump_traceback(self._file, all_threads=True)
        for name, stacks in request_stacks(self.path.parent).items():
            self._append(f"\nStacks of {name}\n\n{stacks}")
        self._append(f"\nCollectives of this process\n{describe_collectives() or 'none'}\n")

    def _append(self, text: str) -> None:
        self._file.write(text)
        self._file.flush()


def _within(seconds: float, function: Callable[[], T]) -> T:
    """The function's result, computed in a thread that is left alone when it takes too long.

    Raises:
        TimeoutError: it did.
    """
    results: list[T] = []
    errors: list[BaseException] = []

    def call() -> None:
        try:
            results.append(function())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=call, name="watchdog report", daemon=True)
    thread.start()
    thread.join(seconds)
    if errors:
        raise errors[0]
    if not results:
        raise TimeoutError(f"no answer within {seconds:g} s")
    return results[0]
