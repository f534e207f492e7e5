"""Where the threads of a run's other processes stand, on request.

Each process offers its stacks (`offer_stacks`): on SIGUSR1 it appends those of all its threads to a file of its own in
the run's folder, from C, so also while it hangs in a collective. A thread, which can run as long as nothing holds the
interpreter, sees the file grow and appends the collectives (flight_recorder.py). `request_stacks` asks all of this
machine.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

from titan_opd.errors import writing
from titan_opd.observe.flight_recorder import describe_collectives
from titan_opd.observe.trace import machine_id

STACKS_FOLDER = "stacks"  # in the run's folder
_LOOK_SECONDS = 0.2  # between two looks at the file; stacks that have not grown in between are complete
_WAIT_SECONDS = 2.0  # for a thread that may hang in NCCL's recorder
_END = "(end of the answer)\n"


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
    closing = threading.Event()
    thread = threading.Thread(target=_add_collectives, args=(file, closing), name="stacks", daemon=True)
    thread.start()
    try:
        faulthandler.register(signal.SIGUSR1, file=file, all_threads=True)
        yield path
    finally:
        faulthandler.unregister(signal.SIGUSR1)
        closing.set()
        thread.join(_WAIT_SECONDS)
        file.close()
        if path.stat().st_size == empty:  # nobody asked
            path.unlink()


def _add_collectives(file: TextIO, closing: threading.Event) -> None:
    """Complete each answer that faulthandler has written, until `closing`."""
    known = seen = os.fstat(file.fileno()).st_size
    while not closing.wait(_LOOK_SECONDS):
        size = os.fstat(file.fileno()).st_size
        if size > known and size == seen:
            try:
                collectives = describe_collectives()
            except Exception as error:  # its format is PyTorch's own and may change
                collectives = f"cannot be told: {error!r}\n"
            with suppress(OSError):  # a full disk
                file.write(f"Collectives\n{collectives}{_END}" if collectives else _END)
                file.flush()
            known = size = os.fstat(file.fileno()).st_size
        seen = size


def request_stacks(run_directory: Path | str, *, seconds: float = 5.0) -> dict[str, str]:
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
    stacks = dict.fromkeys(asked, "")
    while time.monotonic() < end and not all(text.endswith(_END) for text in stacks.values()):
        time.sleep(_LOOK_SECONDS / 2)
        stacks = {path: _read_from(path, old_size) for path, old_size in asked.items()}
    return {
        path.stem: text.removesuffix(_END) or f"did not answer within {seconds:g} s\n" for path, text in stacks.items()
    }


def _read_from(path: Path, position: int) -> str:
    with path.open("rb") as file:
        file.seek(position)
        return file.read().decode(errors="replace")


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
