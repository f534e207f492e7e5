"""One consistent cut of a run at the end of a step: everything that the next step depends on.

A checkpoint is a folder in Hugging Face format, which any tool can load, with a folder `trainer/` in it:

    config.json, model.safetensors, tokenizer    the student, float32
    trainer/                                     the optimizer's state, sharded (torch's distributed checkpoint)
    trainer/state.json                           where the stream of prompts, the counters and the logs stand
    trainer/finished.samples                     answers that were scored and not trained yet (schedules with workers)

There is no random state to save: every draw of a run is a function of the run's seed and of what it is drawn for
(a sample's number and position, an epoch, an optimizer step), not of a generator's history.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.optim import Optimizer
from transformers import PreTrainedTokenizerBase

from titan_opd.checkpoint.folder import (
    checkpoint_folder,
    checkpoint_steps,
    discard_folder,
    finish_folder,
    flush,
    partial_folder,
    remove_old_checkpoints,
    start_folder,
)
from titan_opd.data.records import ScoredTrajectory
from titan_opd.errors import StorageError
from titan_opd.models import Decoder, save_checkpoint_files
from titan_opd.parallel import World
from titan_opd.schedule.samples_file import read_samples, write_samples
from titan_opd.weights import named_weights

TRAINER = "trainer"
STATE_FILE = "state.json"
SAMPLES_FILE = "finished.samples"
_OPTIMIZER = "optimizer"


def save_checkpoint(
    run_directory: Path,
    step: int,
    *,
    student: Decoder,
    tokenizer: PreTrainedTokenizerBase,
    model: nn.Module,
    optimizer: Optimizer,
    state: dict[str, Any],
    samples: Sequence[ScoredTrajectory],
    keep: int,
    world: World,
) -> None:
    """Write the checkpoint of `step` together with the other processes, then delete those beyond the newest `keep`.

    Args:
        run_directory: the run's folder, the same file system for all processes.
        student: the decoder in `model`.
        optimizer: of `model`'s parameters.
        state: whatever else the next step depends on, as JSON.
        samples: answers that were scored and not trained yet; the main process's count.

    Raises:
        StorageError: in all processes, when one could not write (a full disk, a lost mount).
    """
    final = checkpoint_folder(run_directory, step)
    folder = partial_folder(final)

    def finish() -> None:
        tokenizer.save_pretrained(folder)
        (folder / TRAINER / STATE_FILE).write_text(json.dumps(state))
        if samples:
            write_samples(folder / TRAINER / SAMPLES_FILE, samples)
        flush(run_directory)  # the names of the logs and of the folder of checkpoints
        finish_folder(final)

    try:
        _main_alone(world, lambda: start_folder(final))
        _together(world, lambda: _save_student(student, folder, world))
        _together(world, lambda: dcp.save(_optimizer_state(model, optimizer), checkpoint_id=folder / TRAINER))
        _main_alone(world, finish)
    except BaseException as error:
        if world.is_main:
            discard_folder(final)
        if isinstance(error, StorageError):
            raise StorageError(_not_written(run_directory, step, error)) from error
        raise
    _main_alone(world, lambda: remove_old_checkpoints(run_directory, keep))


def _not_written(run_directory: Path, step: int, error: StorageError) -> str:
    earlier = [path for earlier, path in checkpoint_steps(run_directory).items() if earlier < step]
    intact = f"{earlier[-1]} is intact" if earlier else "there is no earlier one"
    final = checkpoint_folder(run_directory, step)
    return f"{final} could not be written ({error}); {intact}. Make room, then go on with --resume"


def load_trainer(checkpoint: Path, *, model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """Put the optimizer's state back, in place, whatever the number of processes then and now; returns `state`.

    Raises:
        ValueError: the checkpoint has no trainer state, a damaged one, or one that these processes cannot share.
    """
    try:
        state = json.loads((checkpoint / TRAINER / STATE_FILE).read_text())
        optimizer_state = _optimizer_state(model, optimizer)
        dcp.load(optimizer_state, checkpoint_id=checkpoint / TRAINER)
    except (OSError, ValueError, CheckpointException) as error:
        _, cause = _first_failure(error)
        if "aten.slice" in cause or "block boundary" in cause:  # torchao's words
            raise ValueError(
                f"cannot resume from {checkpoint}: optimizer.name = 'adamw_8bit' has a scale for each block of 256 "
                f"moments, and these processes would have to cut blocks ({cause}); start as many as saved it, with the "
                "same axes in [parallel]"
            ) from error
        raise ValueError(
            f"cannot resume from {checkpoint}: its trainer state is missing or damaged ({cause}); delete "
            "that folder to go on from the checkpoint before it, or from the beginning when there is none"
        ) from error
    set_optimizer_state_dict(model, optimizer, optim_state_dict=optimizer_state[_OPTIMIZER])
    return state


def load_samples(checkpoint: Path) -> list[ScoredTrajectory]:
    """The answers that were scored and not trained when the checkpoint was written.

    Raises:
        ValueError: their file is damaged.
    """
    path = checkpoint / TRAINER / SAMPLES_FILE
    return list(read_samples(path)) if path.exists() else []


def _optimizer_state(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    return {_OPTIMIZER: get_optimizer_state_dict(model, optimizer)}


def _save_student(student: Decoder, folder: Path, world: World) -> None:
    weights = named_weights(student)
    try:
        if world.is_main:
            save_checkpoint_files(weights, student.config, folder)
    finally:
        for _ in weights:  # the other processes' part, and the main one's after an error: gathering the rest
            pass


def _main_alone(world: World, action: Callable[[], object]) -> None:
    """Run `action` in the main process while the others wait for it; when it fails, it fails in all."""
    _together(world, action if world.is_main else lambda: None)


def _together(world: World, action: Callable[[], object]) -> None:
    """Run `action` in all processes; when it fails in one, it fails in all, instead of leaving the others waiting.

    Raises:
        StorageError: with the first failure.
    """
    failure = None
    try:
        action()
    except (Exception, CheckpointException) as error:
        failure = _first_failure(error, world.rank)
    failures = [one for one in world.gather(failure) if one]
    if failures:
        rank, text = failures[0]
        raise StorageError(f"process {rank}: {text}" if world.size > 1 else text)


def _first_failure(error: Exception | CheckpointException, rank: int = 0) -> tuple[int, str]:
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
