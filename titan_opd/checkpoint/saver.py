"""Writes a run's checkpoints, while training waits or in the background.

Everything that training goes on to change is taken at the end of a step: copied into the main memory for a save in the
background, read where it is for one that training waits for. What follows, the writing, is the same for both.

The writing's own collectives go through a group that nothing else uses: training's go on in another thread, and
collectives of two threads in one group would meet in any order.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from itertools import islice
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from transformers import PreTrainedTokenizerBase

from titan_opd.checkpoint.folder import (
    atomic_folder,
    checkpoint_folder,
    checkpoint_steps,
    flush,
    remove_old_checkpoints,
)
from titan_opd.checkpoint.together import Together
from titan_opd.checkpoint.trainer import SAMPLES_FILE, STATE_FILE, TRAINER, optimizer_state, save_optimizer
from titan_opd.config.schema import CheckpointConfig
from titan_opd.data.records import ScoredTrajectory
from titan_opd.errors import StorageError
from titan_opd.models import Decoder, ModelFiles
from titan_opd.parallel import World
from titan_opd.schedule.samples_file import write_samples
from titan_opd.weights import named_weights

WRITE_SECONDS = "seconds/checkpoint_write"  # a metric: of a save in the background


class CheckpointSaver:
    """Saves the checkpoints of one run, one at a time; all processes call its methods together.

    Args:
        run_directory: the run's folder, the same file system for all processes.
        config: how many checkpoints are kept, and whether training waits for them.
        student: the decoder in `model`, float32.
        tokenizer: the student's.
        optimizer: of `model`'s parameters.
        timeout_seconds: the longest that a process waits for the others.
    """

    def __init__(
        self,
        run_directory: Path,
        config: CheckpointConfig,
        *,
        student: Decoder,
        tokenizer: PreTrainedTokenizerBase,
        model: nn.Module,
        optimizer: Optimizer,
        world: World,
        timeout_seconds: float,
    ) -> None:
        self._run_directory = run_directory
        self._config = config
        self._student = student
        self._tokenizer = tokenizer
        self._model = model
        self._optimizer = optimizer
        self._world = world
        self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_seconds))
        self._together = Together(self._group)
        self._files = ModelFiles(student.config, next(student.parameters()).dtype, num_processes=world.size)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._under_way: Future[float] | None = None
        self._write_seconds: float | None = None

    @property
    def is_writing(self) -> bool:
        """Whether the last save has not been found complete yet, by `poll` or `wait`."""
        return self._under_way is not None

    def save(self, step: int, state: dict[str, Any], samples: Sequence[ScoredTrajectory]) -> None:
        """Save the checkpoint of `step`: write it, or copy what it needs and leave the writing to the background.

        When it is complete, those beyond the newest `keep` are deleted.

        Args:
            step: steps that are done.
            state: whatever else the next step depends on, as JSON.
            samples: answers that were scored and not trained yet; the main process's count.

        Raises:
            StorageError: in all processes, when one could not write (a full disk, a lost mount): this checkpoint, or
                the one before it in the background.
        """
        self.wait()
        text = json.dumps(state)  # now: parts of it are the run's own, and change
        optimizer = optimizer_state(self._model, self._optimizer)
        if not self._config.asynchronous:
            self._write(step, self._write_student, optimizer, text, samples)
            return
        weights = self._stage_student()
        optimizer = _on_host(optimizer)

        def write() -> float:
            start = time.perf_counter()
            self._write(step, lambda folder: self._write_staged(folder, weights), optimizer, text, samples)
            return time.perf_counter() - start

        self._under_way = self._thread.submit(write)

    def poll(self) -> dict[str, float]:
        """At each step: the metrics of a save in the background that all processes have found to be complete.

        Raises:
            StorageError: in all processes, when one could not write it.
        """
        if self._under_way is not None and all(self._world.gather(self._under_way.done())):
            self.wait()
        if self._write_seconds is None:
            return {}
        metrics = {WRITE_SECONDS: self._write_seconds}
        self._write_seconds = None
        return metrics

    def wait(self) -> None:
        """Wait for the save in the background, if there is one.

        Raises:
            StorageError: in all processes, when one could not write it.
        """
        if self._under_way is not None:
            under_way, self._under_way = self._under_way, None
            self._write_seconds = under_way.result()

    def close(self) -> None:
        """Let a save that is under way end, well or not: a run that stops leaves the newest checkpoint that it can.

        For a run that fails, whose own error is what counts.
        """
        with suppress(Exception):
            self.wait()
        self._thread.shutdown()

    # ---- What training waits for -------------------------------------------------------------------------------------

    def _stage_student(self) -> dict[str, Tensor]:
        """Copies of the weights that this process writes; all processes gather all of them."""
        own = {name for file in self._files.files_of(self._world.rank) for name in self._files.names[file]}
        return {name: self._files.cast(weight) for name, weight in named_weights(self._student) if name in own}

    # ---- Writing -----------------------------------------------------------------------------------------------------

    def _write(
        self,
        step: int,
        write_student: Callable[[Path], None],
        optimizer: dict[str, Any],
        state: str,
        samples: Sequence[ScoredTrajectory],
    ) -> None:
        final = checkpoint_folder(self._run_directory, step)
        together = self._together

        def write_the_rest(folder: Path) -> None:
            self._files.write_index(folder)
            self._tokenizer.save_pretrained(folder)  # which reads it and changes nothing: others may use it meanwhile
            (folder / TRAINER / STATE_FILE).write_text(state)
            if samples:
                write_samples(folder / TRAINER / SAMPLES_FILE, samples)
            flush(self._run_directory)  # the names of the logs and of the folder of checkpoints

        try:
            with atomic_folder(final, together) as folder:
                together.all(lambda: write_student(folder))
                together.all(lambda: save_optimizer(optimizer, folder / TRAINER, self._group))
                together.main_alone(lambda: write_the_rest(folder))
        except StorageError as error:
            raise StorageError(self._not_written(step, error)) from error
        together.main_alone(lambda: remove_old_checkpoints(self._run_directory, self._config.keep))

    def _write_student(self, folder: Path) -> None:
        """Gather and write the weights file by file, each process one at the same time."""
        weights = named_weights(self._student)
        own = self._files.files_of(self._world.rank)
        try:
            for files in self._files.rounds():
                held: dict[str, Tensor] = {}
                for file in files:
                    for name, weight in islice(weights, len(self._files.names[file])):
                        if file in own:
                            held[name] = self._files.cast(weight)
                self._write_files(folder, [file for file in files if file in own], held)
        finally:
            for _ in weights:  # after an error, for the others' sake: gathering the rest
                pass

    def _write_staged(self, folder: Path, weights: dict[str, Tensor]) -> None:
        self._write_files(folder, self._files.files_of(self._world.rank), weights)

    def _write_files(self, folder: Path, files: Iterable[int], weights: dict[str, Tensor]) -> None:
        for file in files:
            flush(self._files.write(folder, file, weights))

    def _not_written(self, step: int, error: StorageError) -> str:
        earlier = [path for earlier, path in checkpoint_steps(self._run_directory).items() if earlier < step]
        intact = f"{earlier[-1]} is intact" if earlier else "there is no earlier one"
        final = checkpoint_folder(self._run_directory, step)
        return f"{final} could not be written ({error}); {intact}. Make room, then go on with --resume"


def _on_host(state: Any) -> Any:
    """A copy of nested tables with their tensors, sharded and quantised ones too, in the main memory."""
    if isinstance(state, dict):
        return {name: _on_host(value) for name, value in state.items()}
    if isinstance(state, (list, tuple)):
        return type(state)(_on_host(value) for value in state)
    return state.detach().to("cpu", copy=True) if isinstance(state, Tensor) else state
