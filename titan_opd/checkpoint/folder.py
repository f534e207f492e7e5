"""Checkpoints as folders: written beside, then renamed, so that a folder with its final name is always complete."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

CHECKPOINTS = "checkpoints"  # the folder of a run's checkpoints, within the run's folder
_NAME = re.compile(r"step-(\d+)")


def checkpoint_steps(directory: Path) -> dict[int, Path]:
    """The complete checkpoints under `directory`, by step, oldest first."""
    found = {}
    for path in directory.glob("step-*"):
        match = _NAME.fullmatch(path.name)
        if match:
            found[int(match[1])] = path
    return dict(sorted(found.items()))


def pick_checkpoint(run_directory: Path, step: int | None = None) -> Path:
    """The checkpoint of `step` in a run's folder, or the newest.

    Raises:
        ValueError: there is none; the message lists those that exist.
    """
    directory = run_directory / CHECKPOINTS
    found = checkpoint_steps(directory)
    if not found:
        raise ValueError(f"no complete checkpoint under {directory}; the run was stopped before its first one")
    if step is not None and step not in found:
        raise ValueError(f"no checkpoint of step {step} under {directory}; there are {', '.join(map(str, found))}")
    return found[step if step is not None else max(found)]


def model_folder(path: str) -> Path:
    """The folder of a model: `path` itself or, when it is a run's folder, the run's newest checkpoint."""
    return pick_checkpoint(Path(path)) if (Path(path) / CHECKPOINTS).is_dir() else Path(path)


@contextmanager
def atomic_folder(final: Path) -> Iterator[Path]:
    """A temporary folder beside `final` that takes its name when the block ends without an error.

    What a killed predecessor left under the temporary name is removed first. On an error nothing is left behind and
    `final` is as it was.
    """
    temporary = final.with_name(final.name + ".partial")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        yield temporary
        if final.exists():
            shutil.rmtree(final)
        temporary.rename(final)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def remove_old_checkpoints(directory: Path, keep: int) -> None:
    """Delete all but the newest `keep` complete checkpoints."""
    for path in list(checkpoint_steps(directory).values())[:-keep]:
        shutil.rmtree(path)
