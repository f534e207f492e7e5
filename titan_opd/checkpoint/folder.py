"""Checkpoints as folders: written beside, then renamed, so that a folder with its final name is always complete."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from titan_opd.checkpoint.together import Together

CHECKPOINTS = "checkpoints"  # the folder of a run's checkpoints, within the run's folder
_NAME = re.compile(r"step-(\d+)")
_PARTIAL, _DELETED = ".partial", ".deleted"  # what follows the name of a folder that is not whole yet, or any more


def checkpoint_folder(run_directory: Path, step: int) -> Path:
    """Where the checkpoint of `step` is, once it is complete."""
    return run_directory / CHECKPOINTS / f"step-{step:06d}"


def checkpoint_steps(run_directory: Path) -> dict[int, Path]:
    """The complete checkpoints of a run, by step, oldest first."""
    found = {}
    for path in (run_directory / CHECKPOINTS).glob("step-*"):
        match = _NAME.fullmatch(path.name)
        if match:
            found[int(match[1])] = path
    return dict(sorted(found.items()))


def pick_checkpoint(run_directory: Path, step: int | None = None) -> Path:
    """The checkpoint of `step` in a run's folder, or the newest.

    Raises:
        ValueError: there is none; the message lists those that exist.
    """
    found = checkpoint_steps(run_directory)
    if not found:
        raise ValueError(
            f"no complete checkpoint under {run_directory / CHECKPOINTS}; the run stopped before its first"
        )
    if step is not None and step not in found:
        raise ValueError(f"no checkpoint of step {step} under {run_directory}; there are {', '.join(map(str, found))}")
    return found[step if step is not None else max(found)]


def model_folder(path: str) -> Path:
    """The folder of a model: `path` itself or, when it is a run's folder, the run's newest checkpoint."""
    return pick_checkpoint(Path(path)) if os.path.isdir(Path(path) / CHECKPOINTS) else Path(path)


def cannot_resume(checkpoint: Path, reason: object) -> ValueError:
    """That a run cannot go on from a checkpoint, why, and how it goes on without it."""
    return ValueError(
        f"cannot resume from {checkpoint}: {reason}; delete that folder to go on from the checkpoint before it, or "
        "from the beginning when there is none"
    )


@contextmanager
def resuming_from(checkpoint: Path | None) -> Iterator[None]:
    """Turn a ValueError of the block, which reads files of `checkpoint`, into `cannot_resume`; nothing for None."""
    try:
        yield
    except ValueError as error:
        if checkpoint is None:
            raise
        raise cannot_resume(checkpoint, error) from error


def partial_folder(final: Path) -> Path:
    """Where a folder is written before it takes its name."""
    return final.with_name(final.name + _PARTIAL)


def start_folder(final: Path) -> Path:
    """An empty `partial_folder(final)`; what a killed predecessor left there is removed."""
    assert not final.exists(), f"{final} exists"
    partial = partial_folder(final)
    discard_folder(final)
    partial.mkdir(parents=True)
    return partial


def finish_folder(final: Path) -> None:
    """Give a partial folder its name. By then its files are on the disk, not only in the system's cache."""
    partial = partial_folder(final)
    for path in [*partial.rglob("*"), partial]:
        flush(path)
    partial.rename(final)
    flush(final.parent)


def discard_folder(final: Path) -> None:
    """Remove a partial folder, as far as that can be done."""
    shutil.rmtree(partial_folder(final), ignore_errors=True)


@contextmanager
def atomic_folder(final: Path, together: Together) -> Iterator[Path]:
    """A temporary folder beside `final` that takes its name when the block ends; after an error nothing is left.

    Args:
        final: does not exist yet.
        together: the processes that fill it, and which all enter and leave the block. An error in one that the others
            are not told of in the block leaves them waiting.

    Raises:
        StorageError: in all processes, when the folder cannot be made or named.
    """
    try:
        together.main_alone(lambda: start_folder(final))
        yield partial_folder(final)
        together.main_alone(lambda: finish_folder(final))
    except BaseException:
        if together.is_main:
            discard_folder(final)
        raise


def write_file(path: Path, text: str) -> None:
    """Write a text file that is there whole or not at all, whenever the process is killed."""
    partial = partial_folder(path)
    partial.write_text(text)
    flush(partial)
    partial.replace(path)
    flush(path.parent)


def flush(path: Path) -> None:
    """Bring a file, or the names in a folder, onto the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove_old_checkpoints(run_directory: Path, keep: int) -> None:
    """Delete all but the newest `keep` complete checkpoints, and what killed processes left.

    A checkpoint loses its name before it loses its files: half a checkpoint never looks like a whole one.
    """
    for path in list(checkpoint_steps(run_directory).values())[:-keep]:
        path.rename(path.with_name(path.name + _DELETED))
    remove_remains(run_directory)


def remove_remains(run_directory: Path) -> None:
    """Delete what a killed save or a killed deletion left.

    A file that resists (network file systems keep those that somebody reads) is left to the next call: a run does not
    die of it.
    """
    for suffix in (_PARTIAL, _DELETED):
        for path in (run_directory / CHECKPOINTS).glob(f"step-*{suffix}"):
            shutil.rmtree(path, ignore_errors=True)
