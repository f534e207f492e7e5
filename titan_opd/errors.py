"""Errors that are no fault of the settings. (What a user can mend in them is a ValueError.)"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class StorageError(RuntimeError):
    """Something could not be written: a full disk, a lost mount. The checkpoints that were complete still are."""


class LostProcessError(RuntimeError):
    """Another process of the trainer is gone or does not answer. The newest checkpoint is intact."""


class StallError(RuntimeError):
    """Nothing has moved for too long; the watchdog ended the run. The newest checkpoint is intact."""


class WeightError(RuntimeError):
    """An update of the weights that cannot be used; the text names the tensor, the policy version and who has it."""


class NotBuiltError(ImportError):
    """The compiled operators are missing or were built for another torch; the text has the command that builds them."""


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn an OSError of the block, which writes to `path`, into a StorageError that says so."""
    try:
        yield
    except OSError as error:
        raise StorageError(
            f"cannot write to {path} ({error}); make room or mend what is named there, then go on with --resume"
        ) from error


def one_line(error: BaseException) -> str:
    """What an error of another library says, without its line breaks."""
    return " ".join(str(error).split())
