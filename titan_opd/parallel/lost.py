"""When another process of the trainer is gone or does not answer: which one, in which collective, in one line.

A collective that fails knows an address at best. So every process leaves a note in the store through which they found
each other before it ends: that it lost somebody, or its own error. Who leaves none within a moment is the one.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch.distributed as dist

from titan_opd.errors import LostProcessError

_SECONDS_FOR_NOTES = 2.0  # the end of one process is noticed by all others in a fraction of it
_LOST = "lost another process"
_PACKAGE = Path(__file__).parents[1]


@contextmanager
def naming_lost_processes(store: dist.Store, rank: int, size: int, timeout_seconds: float) -> Iterator[None]:
    """Turn the failure of a collective in the block into a LostProcessError, and leave a note of any other end.

    Args:
        store: of all processes.
        rank: of this process, of `size`.
        timeout_seconds: after which collectives fail.
    """
    try:
        yield
    except BaseException as error:
        if not _is_of_a_collective(error):
            _leave_note(store, rank, f"{type(error).__name__}: {error}")
            raise
        raise LostProcessError(
            f"process {rank} waited for others in {_collective(error)}, and {_who(store, rank, size)} "
            f"({_how(error, timeout_seconds)}). The checkpoints are intact: find out what ended it (its own output, "
            "the kernel's log when it was killed), then go on with --resume"
        ) from error


def _is_of_a_collective(error: BaseException) -> bool:
    # Gloo's errors are plain RuntimeErrors that begin with the place in its sources.
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo/transport/" in str(error))


def _leave_note(store: dist.Store, rank: int, text: str) -> None:
    with suppress(dist.DistError):  # who kept the store is gone: nobody could read it
        store.set(_key(rank), text)


def _key(rank: int) -> str:
    return f"end of {rank}"


def _who(store: dist.Store, rank: int, size: int) -> str:
    """The processes that did not lose anybody themselves."""
    notes: dict[int, str] = {}
    try:
        store.set(_key(rank), _LOST)
        end = time.monotonic() + _SECONDS_FOR_NOTES
        while len(notes) < size - 1 and time.monotonic() < end:
            others = (other for other in range(size) if other != rank and other not in notes)
            notes |= {other: store.get(_key(other)).decode() for other in others if store.check([_key(other)])}
            time.sleep(0.05)
    except dist.DistError:
        return "process 0 is gone, or torchrun, with the store by which the processes find each other"
    silent = [other for other in range(size) if other != rank and other not in notes]
    ended = [f"process {other} ended with {note}" for other, note in notes.items() if note != _LOST]
    if silent:
        names = ", ".join(map(str, silent))
        ended.append(f"process{'es' if len(silent) > 1 else ''} {names} gave no sign of life")
    return " and ".join(ended) or "all are there: the network between them failed"


def _how(error: BaseException, timeout_seconds: float) -> str:
    text = str(error)
    if "timed out" in text.lower() or "timeout" in text.lower():
        return f"no answer within parallel.timeout_seconds = {timeout_seconds:g}"
    return "its connection was closed" if "Connection" in text else text.splitlines()[0]


def _collective(error: BaseException) -> str:
    """What was called, and the line of this package that called for it."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename != __file__]
    called = [frame.name for frame in frames if "/torch/distributed/" in frame.filename and frame.name != "wrapper"]
    own = [frame for frame in frames if Path(frame.filename).is_relative_to(_PACKAGE)]
    place = f" ({Path(own[-1].filename).relative_to(_PACKAGE)}:{own[-1].lineno})" if own else ""
    return f"{called[-1] if called else 'a collective'}{place}"
