"""Whether a run may begin in its folder, or go on there, and from where."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path

from titan_opd.checkpoint import checkpoint_steps, model_folder
from titan_opd.config import Config, changed_options, load_config

CONFIG_FILE = "config.toml"
# What may differ between a run and its continuation, because it does not touch what is trained.
FREE_OPTIONS = (
    *(
        "run.directory",
        "run.threads",
        "run.cores",
        "evaluation.",
        "checkpoint.",
        "observe.",
        "profile.",
        "channel.",
        "weights.",
        "journal.",
        "parallel.",
    ),
    *(
        f"{role}.{name}"
        for role in ("rollout", "teacher")
        for name in ("placement", "workers", "python", "cores", "devices")
    ),
)


@dataclass(frozen=True)
class Start:
    """Where a run begins.

    Attributes:
        step: steps that are done.
        checkpoint: the folder that the run goes on from; None when it begins anew.
    """

    step: int
    checkpoint: Path | None

    @classmethod
    def newest(cls, path: Path) -> Start:
        """The newest checkpoint of the run in `path`, or its beginning."""
        return cls(*max(checkpoint_steps(path).items(), default=(0, None)))


def check_directory(path: Path) -> None:
    """Raise a ValueError when `run.directory` is no folder and none can be made there; nothing is written."""
    try:
        present = next(folder for folder in (path, *path.parents) if folder.exists())
    except OSError as error:
        raise ValueError(f"run.directory = {str(path)!r} cannot be a folder ({error.strerror}); name another") from None
    if not present.is_dir():
        raise ValueError(f"run.directory = {str(path)!r} cannot be a folder: {present} is a file; name another")
    if not os.access(present, os.W_OK | os.X_OK):
        raise ValueError(f"run.directory = {str(path)!r}: you may not write to {present}; name another folder")


def pin_teacher(config: Config) -> Config:
    """The same with a teacher named by its run's folder as that run's newest checkpoint today: the run may go on."""
    if not config.teacher.path:
        return config
    return replace(config, teacher=replace(config.teacher, path=str(model_folder(config.teacher.path))))


def find_start(config: Config, *, resume: bool) -> Start:
    """A new run in `run.directory`, or the one that is there from its newest checkpoint.

    A run that was stopped before its first checkpoint begins anew. Nothing is written.

    Args:
        config: with its teacher pinned.
        resume: go on with the run that is there.

    Raises:
        ValueError: another run lives there and `resume` is False, or it was started with other settings.
    """
    path = Path(config.run.directory)
    start = Start.newest(path)
    known = (path / CONFIG_FILE).exists()
    if not known and start.checkpoint is not None:
        raise ValueError(
            f"run.directory = {str(path)!r} holds checkpoints but no {CONFIG_FILE} that tells what they belong to; "
            "put it back, or name another folder (--run.directory NEW)"
        )
    if known and not resume:
        raise ValueError(
            f"run.directory = {str(path)!r} already holds a run; go on with it by --resume, name another folder "
            "(--run.directory NEW), or delete this one"
        )
    if known:
        _check_unchanged(path / CONFIG_FILE, config)
    return start


def check_start(config: Config, start: Start) -> None:
    """What `find_start` found still holds: reading models takes time, in which another process may have been here.

    Raises:
        ValueError: it has trained the run since, or begun one with other settings.
    """
    path = Path(config.run.directory)
    now = Start.newest(path)
    if now != start:
        raise ValueError(
            f"run.directory = {str(path)!r}: another process has changed the run since this one began, from step "
            f"{start.step} to step {now.step}; start again with --resume to go on from there"
        )
    if (path / CONFIG_FILE).exists():
        _check_unchanged(path / CONFIG_FILE, config)


def _check_unchanged(file: Path, config: Config) -> None:
    """Raise a ValueError when a run would go on with settings under which it could not equal the uninterrupted one."""
    changed = [name for name in changed_options(load_config(file), config) if not name.startswith(FREE_OPTIONS)]
    if changed:
        raise ValueError(
            f"cannot resume {file.parent}: {', '.join(changed)} differ from the run's {file.name}; resume with the "
            f"same settings (only {', '.join(option.rstrip('.') for option in FREE_OPTIONS)} may change), or begin a "
            f"new run with student.path = {str(file.parent)!r}"
        )
