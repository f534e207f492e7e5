"""Checkpoints as folders: written beside, then renamed, so that a folder with its final name is always complete."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

CHECKPOINTS = "checkpoints"  # the folder of a run's checkpoints, within the run's folder
_NAME = re.compile(r"step-(\d+)")


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
    return pick_checkpoint(Path(path)) if (Path(path) / CHECKPOINTS).is_dir() else Path(path)


def partial_folder(final: Path) -> Path:
    """Where a folder is written before it takes its name."""
    return final.with_name(final.name + ".partial")


@contextmanager
def atomic_folder(final: Path) -> Iterator[Path]:
    """A temporary folder beside `final` that takes its name when the block ends without an error.

    By then its files are on the disk, not only in the system's cache. What a killed predecessor left under the
    temporary name is removed first; on an error nothing is left behind.
    """
    assert not final.exists(), f"{final} exists"
    temporary = partial_folder(final)
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        yield temporary
        for path in [*temporary.rglob("*"), temporary]:
            _flush(path)
        temporary.rename(final)
        _flush(final.parent)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove_old_checkpoints(run_directory: Path, keep: int) -> None:
    """Delete all but the newest `keep` complete checkpoints, and what a killed deletion or save left.

    A checkpoint loses its name before it loses its files: half a checkpoint never looks like a whole one.
    """
    for path in list(checkpoint_steps(run_directory).values())[:-keep]:
        path.rename(path.with_name(path.name + ".deleted"))
    for pattern in ("*.deleted", "*.partial"):
        for path in (run_directory / CHECKPOINTS).glob(pattern):
            shutil.rmtree(path)
