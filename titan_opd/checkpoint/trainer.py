"""One consistent cut of a run at the end of a step: everything that the next step depends on.

A checkpoint is a folder in Hugging Face format, which any tool can load, with a folder `trainer/` in it:

    config.json, *.safetensors, tokenizer        the student, float32; each process writes files of its own
    trainer/                                     the optimizer's state, sharded (torch's distributed checkpoint)
    trainer/state.json                           where the stream of prompts, the counters and the logs stand
    trainer/finished.samples                     answers that were scored and not trained yet (schedules with workers)

There is no random state to save: every draw of a run is a function of the run's seed and of what it is drawn for
(a sample's number and position, an epoch, an optimizer step), not of a generator's history.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import SavePlan, SavePlanner
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future
from torch.optim import Optimizer

from titan_opd.checkpoint.folder import cannot_resume
from titan_opd.checkpoint.together import first_failure
from titan_opd.data.records import ScoredTrajectory
from titan_opd.schedule.samples_file import read_samples

TRAINER = "trainer"
STATE_FILE = "state.json"
SAMPLES_FILE = "finished.samples"
_OPTIMIZER = "optimizer"


def load_trainer(checkpoint: Path, *, model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """Put the optimizer's state back, in place, whatever the number of processes then and now; returns `state`.

    Raises:
        ValueError: the checkpoint has no trainer state, a damaged one, or one that these processes cannot share.
    """
    try:
        state = json.loads((checkpoint / TRAINER / STATE_FILE).read_text())
        _check_metadata(checkpoint / TRAINER)
        stored = optimizer_state(model, optimizer)
        dcp.load(stored, checkpoint_id=checkpoint / TRAINER)
    except (OSError, ValueError, CheckpointException) as error:
        _, cause = first_failure(error)
        if "aten.slice" in cause or "block boundary" in cause:  # torchao's words
            raise ValueError(
                f"cannot resume from {checkpoint}: optimizer.name = 'adamw_8bit' has a scale for each block of 256 "
                f"moments, and these processes would have to cut blocks ({cause}); start as many as saved it, with the "
                "same axes in [parallel]"
            ) from error
        raise cannot_resume(checkpoint, f"its trainer state is missing or damaged ({cause})") from error
    set_optimizer_state_dict(model, optimizer, optim_state_dict=stored[_OPTIMIZER])
    return state


def save_optimizer(state: dict[str, Any], folder: Path, group: dist.ProcessGroup) -> None:
    """Write what `optimizer_state` gives, each process its shards.

    Args:
        state: the same names in all processes of `group`.
        folder: `trainer/` of the checkpoint.
        group: the processes.
    """
    dcp.save(state, storage_writer=_Writer(folder), process_group=group)


class _Writer(dcp.FileSystemWriter):
    """torch's, which says of a file that cannot be written why."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        try:
            return super().write_data(plan, planner)
        except RuntimeError as error:  # of closing the half-written file: what stopped the writing came before it
            raise _first_os_error(error) or error from error


def _first_os_error(error: BaseException | None) -> OSError | None:
    while error is not None and not isinstance(error, OSError):
        error = error.__cause__ or error.__context__
    return error


def _check_metadata(folder: Path) -> None:
    """Raise a ValueError when torch's list of the shards cannot be read, before torch logs that at length."""
    try:
        dcp.FileSystemReader(folder).read_metadata()
    except Exception as error:  # half a pickle raises anything
        raise ValueError(f"{folder / '.metadata'}: {error}") from error


def load_samples(checkpoint: Path) -> list[ScoredTrajectory]:
    """The answers that were scored and not trained when the checkpoint was written.

    Raises:
        ValueError: their file is damaged.
    """
    path = checkpoint / TRAINER / SAMPLES_FILE
    return list(read_samples(path)) if path.exists() else []


def optimizer_state(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """The optimizer's tensors under the names of `model`'s parameters, as torch's distributed checkpoint knows them."""
    return {_OPTIMIZER: get_optimizer_state_dict(model, optimizer)}
