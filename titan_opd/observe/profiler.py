"""A few steps under torch's profiler: a Chrome trace, and a snapshot of the GPU's memory where it is asked for."""

from __future__ import annotations

from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from titan_opd.config.observe import ProfileConfig
from titan_opd.errors import writing
from titan_opd.observe import trace
from titan_opd.observe.out_of_memory import record_allocations, write_snapshot

PROFILE_FOLDER = "profile"  # in the run's folder


class StepProfiler:
    """Profiles the steps that `config` names, in the processes that it names.

    Spans of observe/trace.py, the phases among them, are ranges of the profile. `titan_opd.observe.trace_merge` makes
    another file, of all processes: the profile has kernels and operators, of one.

    Args:
        config: which steps and processes.
        folder: the run's.
        rank: of this process.
        device: where it computes.

    Raises:
        ValueError: the memory of a device that has no allocator of CUDA.
    """

    def __init__(self, config: ProfileConfig, folder: Path, rank: int, device: torch.device) -> None:
        self._steps = range(0)
        if config.first_step and rank in config.ranks:
            self._steps = range(config.first_step, config.last_step + 1)
        if config.first_step and config.memory and device.type != "cuda":
            raise ValueError("profile.memory = true takes a snapshot of a GPU's memory, and none is here; leave it out")
        self._memory = config.memory
        self._activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
        self._folder = folder / PROFILE_FOLDER
        self._rank = rank
        self._profile: profile | None = None
        self._first = 0

    def begin_step(self, step: int) -> None:
        """Step `step`, counted from 1, begins: start where the window does, or where a resumed run enters it."""
        if self._profile is not None or step not in self._steps:
            return
        if self._memory:
            record_allocations()
        self._first = step
        self._profile = profile(activities=self._activities)
        self._profile.start()
        trace.mark_spans(record_function)

    def end_step(self, step: int) -> list[Path]:
        """Step `step` is done: write what there is where the window ends.

        Returns:
            The files; none within the window and outside.

        Raises:
            StorageError: they cannot be written.
        """
        if self._profile is None or step != self._steps[-1]:
            return []
        finished = self._stop()
        name = f"trainer-{self._rank}-steps-{self._first}-{step}"
        paths = [self._folder / f"{name}.json.gz"]
        with writing(self._folder):
            self._folder.mkdir(parents=True, exist_ok=True)
            finished.export_chrome_trace(str(paths[0]))
        if self._memory:
            paths.append(self._folder / f"{name}-memory.pickle")
            write_snapshot(paths[1])
        return paths

    def close(self) -> None:
        """Leave the profiler of this process as it was: a run that ends within the window has no profile."""
        if self._profile is not None:
            self._stop()

    def _stop(self) -> profile:
        assert self._profile is not None
        finished, self._profile = self._profile, None
        trace.mark_spans(None)
        finished.stop()
        return finished
