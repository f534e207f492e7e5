"""Where the threads of a run's other processes stand, on request.

Each process offers its stacks (`offer_stacks`): on SIGUSR1 it appends those of all its threads to a file of its own in
the run's folder, from C, so also while it hangs in a collective. `request_stacks` asks all of this machine.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from titan_opd.errors import writing
from titan_opd.observe.trace import machine_id

STACKS_FOLDER = "stacks"  # in the run's folder
_SETTLED_SECONDS = 0.1  # a stack dump that has not grown for so long is complete


@contextmanager
def offer_stacks(run_directory: Path | str, role: str, rank: int) -> Iterator[Path]:
    """Inside, `kill -USR1 PID` makes this process append its stacks to the file that is handed out.

    Raises:
        StorageError: the file cannot be made.
    """
    path = Path(run_directory) / STACKS_FOLDER / f"{role}-{rank}-{os.getpid()}.txt"
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("w")
        identity = {"pid": os.getpid(), "started": _start_time(os.getpid()), "machine": machine_id()}
        file.write(json.dumps(identity) + "\n")
        file.flush()
    empty = path.stat().st_size
    try:
        faulthandler.register(signal.SIGUSR1, file=file, all_threads=True)
        yield path
    finally:
        faulthandler.unregister(signal.SIGUSR1)
        file.close()
        if path.stat().st_size == empty:  # nobody asked
            path.unlink()


def request_stacks(run_directory: Path | str, *, seconds: float = 2.0) -> dict[str, str]:
    """The stacks of the run's other processes on this machine, by the name of their file.

    Args:
        run_directory: the run's folder.
        seconds: how long to wait for them; a process that does not answer (it is stopped, or waits for a disk) has a
            line that says so.
    """
    asked: dict[Path, int] = {}
    for path in sorted((Path(run_directory) / STACKS_FOLDER).glob("*.txt")):
        pid = _process_that_offers(path)
        if pid is not None and pid != os.getpid():
            asked[path] = path.stat().st_size
            os.kill(pid, signal.SIGUSR1)
    if not asked:
        return {}
    end = time.monotonic() + seconds
    sizes, before = dict(asked), {}
    while time.monotonic() < end and (sizes != before or any(sizes[path] == asked[path] for path in asked)):
        time.sleep(_SETTLED_SECONDS)
        before, sizes = sizes, {path: path.stat().st_size for path in asked}
    stacks = {}
    for path, old_size in asked.items():
        with path.open("rb") as file:
            file.seek(old_size)
            text = file.read().decode(errors="replace")
        stacks[path.stem] = text or f"did not answer within {seconds:g} s\n"
    return stacks


def _process_that_offers(path: Path) -> int | None:
    """The living process that made the file and still answers SIGUSR1: any other would die of it."""
    try:
        with path.open() as file:
            identity = json.loads(file.readline())
        pid = identity["pid"]
        if identity["machine"] != machine_id() or identity["started"] != _start_time(pid):
            return None
        return pid if _catches(pid, signal.SIGUSR1) else None
    except (OSError, ValueError, KeyError):  # no process of that number, or half a first line
        return None


def _start_time(pid: int) -> int:
    """Clock ticks from the machine's boot to the start of the process: tells apart processes that had one number."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])


def _catches(pid: int, number: signal.Signals) -> bool:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("SigCgt:"):
            return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return False
