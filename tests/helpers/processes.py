"""`titan-opd` in processes of its own, to be killed.

They are forked from a server that has imported everything once: a start costs a moment instead of seconds.
"""

from __future__ import annotations

import multiprocessing
import os
import resource
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

_context = multiprocessing.get_context("forkserver")
# All that `titan-opd train` imports sooner or later; torch itself imports _dynamo in the first step.
_context.set_forkserver_preload(
    ["titan_opd.train", "titan_opd.cli", "torch._dynamo", "torch.utils.tensorboard", "transformers.modeling_utils"]
)
_CHANGES = ("os.mkdir", "os.rename", "os.remove", "os.rmdir")


class CommandProcess:
    """`titan-opd ARGUMENTS`, started.

    Args:
        arguments: of the command line.
        log: file that stdout and stderr are appended to.
        environment: added to the process's.
        die_at: the process kills itself, as kill -9 does, just before its `die_at`-th change of the file system: before
            it opens, makes, renames or removes something (opening counts only in `--run.directory`).
        file_limit: most bytes of a file; writing beyond fails as on a full disk.
    """

    def __init__(
        self,
        *arguments: object,
        log: Path,
        environment: dict[str, str] | None = None,
        die_at: int | None = None,
        file_limit: int | None = None,
    ) -> None:
        texts = [str(argument) for argument in arguments]
        self.log = log
        settings = (log, environment or {}, die_at, file_limit)
        self._process = _context.Process(target=_run, args=(texts, *settings), daemon=True)
        self._process.start()

    @property
    def running(self) -> bool:
        return self._process.is_alive()

    def send(self, number: signal.Signals) -> None:
        os.kill(self._process.pid, number)

    def kill(self) -> None:
        """End it at once, as kill -9 does; nothing when it has ended already."""
        self._process.kill()
        self._process.join()

    def wait(self, timeout: float = 300) -> int:
        """Its exit status (minus the signal that ended it)."""
        self._process.join(timeout)
        if self.running:
            self.kill()
            raise TimeoutError(f"still running after {timeout} seconds; it said:\n{self.log.read_text()}")
        return self._process.exitcode

    def wait_until(self, condition: Callable[[], object], timeout: float = 300) -> bool:
        """Wait until `condition()` holds; False when the process has ended before."""
        end = time.monotonic() + timeout
        while not condition():
            if not self.running:
                return False
            if time.monotonic() > end:
                self.kill()
                raise TimeoutError(f"not within {timeout} seconds; it said:\n{self.log.read_text()}")
            time.sleep(0.001)
        return True


def start_ranks(*arguments: object, log: Path, faults: Sequence[dict[str, int]] = ({}, {})) -> list[CommandProcess]:
    """The command in processes that are one world, as torchrun starts them: one for each of `faults`.

    Args:
        arguments: of the command line.
        log: file that all append to.
        faults: `die_at` or `file_limit`, or nothing, of each process.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    world = {"WORLD_SIZE": str(len(faults)), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return [
        CommandProcess(*arguments, log=log, environment=world | {"RANK": str(rank), "LOCAL_RANK": str(rank)}, **fault)
        for rank, fault in enumerate(faults)
    ]


def _run(
    arguments: list[str], log: Path, environment: dict[str, str], die_at: int | None, file_limit: int | None
) -> None:
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, sys.stdout.fileno())
    os.dup2(output, sys.stderr.fileno())
    os.environ.update(environment)
    if die_at is not None:
        _die_at_change(die_at, arguments[arguments.index("--run.directory") + 1])
    if file_limit is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (file_limit, resource.RLIM_INFINITY))

    from titan_opd.cli import main

    sys.exit(main(arguments))


def _die_at_change(number: int, folder: str) -> None:
    changes = 0

    def hook(event: str, arguments: tuple) -> None:
        nonlocal changes
        if event in _CHANGES or (event == "open" and str(arguments[0]).startswith(folder)):
            changes += 1
            if changes == number:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)
