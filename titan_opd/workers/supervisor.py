"""Starts the worker processes that a run has on this machine, and starts anew those that die."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from titan_opd.channel import ChannelError

LOG_FOLDER = "workers"  # in the run's folder
REFUSED_STATUS = 2  # a worker that was refused or misconfigured: starting it anew changes nothing
_POLL_SECONDS = 0.2
_SHORT_LIFE_SECONDS = 30.0
_SHORT_LIVES = 5  # so many in a row, and the worker is beyond help
_END_SECONDS = 10.0


@dataclass
class LocalWorker:
    """One process and its life.

    Attributes:
        name: its name on the channel, and of its log.
        arguments: of `titan-opd`.
        environment: added to this process's.
        restarts: whether it is started anew when it dies.
        python: the interpreter that runs it.
    """

    name: str
    arguments: Sequence[str]
    environment: dict[str, str] = field(default_factory=dict)
    restarts: bool = True
    python: str = sys.executable
    process: subprocess.Popen | None = None
    born: float = 0.0
    short_lives: int = 0
    num_starts: int = 0


class Supervisor:
    """Keeps worker processes alive, in a thread, until `close`.

    Args:
        folder: the run's; each worker's output goes to `workers/NAME.log` in it.
        workers: to be started.
    """

    def __init__(self, folder: Path, workers: Sequence[LocalWorker]) -> None:
        self.workers = {worker.name: worker for worker in workers}
        self._folder = folder / LOG_FOLDER
        self._folder.mkdir(parents=True, exist_ok=True)
        self._failure = ""
        self._closing = threading.Event()
        # Workers end when the thread that started them does, so one thread starts them all and stays.
        self._thread = threading.Thread(target=self._run, name="supervisor", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raise when a worker cannot be kept alive.

        Raises:
            ChannelError: with the end of its log.
        """
        if self._failure:
            raise ChannelError(self._failure)

    def close(self) -> None:
        """End all workers: those that were told to stop have a moment to do so."""
        self._closing.set()
        self._thread.join()

    def _run(self) -> None:
        for worker in self.workers.values():
            self._start(worker)
        while not self._closing.wait(_POLL_SECONDS):
            for worker in self.workers.values():
                if not self._failure and not _is_alive(worker):
                    self._mourn(worker)
        self._end_all()

    def _start(self, worker: LocalWorker) -> None:
        worker.born = time.monotonic()
        worker.num_starts += 1
        with (self._folder / f"{worker.name}.log").open("ab") as log:
            worker.process = subprocess.Popen(
                [worker.python, "-m", "titan_opd.cli", *worker.arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, "RANK": "0", "WORLD_SIZE": "1", **worker.environment},
            )

    def _mourn(self, worker: LocalWorker) -> None:
        assert worker.process is not None
        status = worker.process.returncode
        lived = time.monotonic() - worker.born
        worker.short_lives = worker.short_lives + 1 if lived < _SHORT_LIFE_SECONDS else 0
        if status == REFUSED_STATUS or not worker.restarts or worker.short_lives >= _SHORT_LIVES:
            self._failure = (
                f"{worker.name} ended with status {status} after {lived:.0f} s and is not started anew; its log, "
                f"{self._folder / worker.name}.log, ends with: {self._tail(worker)}"
            )
            return
        self._start(worker)

    def _tail(self, worker: LocalWorker, lines: int = 3) -> str:
        text = (self._folder / f"{worker.name}.log").read_text(errors="replace").strip()
        return " / ".join(text.splitlines()[-lines:]) or "(nothing)"

    def _end_all(self) -> None:
        processes = [worker.process for worker in self.workers.values() if worker.process is not None]
        for number, patience in ((None, 5.0), (signal.SIGTERM, _END_SECONDS), (signal.SIGKILL, _END_SECONDS)):
            for process in processes:
                if number is not None and process.poll() is None:
                    process.send_signal(number)
            end = time.monotonic() + patience
            while time.monotonic() < end and any(process.poll() is None for process in processes):
                time.sleep(0.02)


def _is_alive(worker: LocalWorker) -> bool:
    return worker.process is not None and worker.process.poll() is None
