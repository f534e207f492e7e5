"""What several processes do together on disk: when one fails, all do, instead of waiting for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from titan_opd.errors import StorageError


class Together:
    """All processes of the trainer, which call the same methods in the same order.

    Args:
        group: through which they tell each other how it went; None: the group of all.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group = group
        self._size = dist.get_world_size(group)
        self.rank = dist.get_rank(group)

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def main_alone(self, action: Callable[[], object]) -> None:
        """Run `action` in the main process while the others wait for it; when it fails, it fails in all."""
        self.all(action if self.is_main else lambda: None)

    def all(self, action: Callable[[], object]) -> None:
        """Run `action` in all processes and wait until all have; when it fails in one, it fails in all.

        Raises:
            StorageError: with the first failure.
        """
        failure = None
        try:
            action()
        except (Exception, CheckpointException) as error:
            failure = first_failure(error, self.rank)
        failures: list[Any] = [None] * self._size
        dist.all_gather_object(failures, failure, group=self._group)
        found = [one for one in failures if one]
        if found:
            rank, text = found[0]
            raise StorageError(f"process {rank}: {text}" if self._size > 1 else text)


def first_failure(error: Exception | CheckpointException, rank: int = 0) -> tuple[int, str]:
    """In which process it failed, and the error in one line.

    torch's CheckpointException, which is no Exception, reaches all processes with the errors of those that failed. It
    wraps interrupts too: those are raised again.
    """
    cause: BaseException = error
    if isinstance(error, CheckpointException):
        rank, (cause, _) = next(iter(error.failures.items()))
        if not isinstance(cause, Exception):
            raise cause
    return rank, f"{type(cause).__name__}: {cause}"
