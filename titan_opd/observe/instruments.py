"""What is measured of the trainer's devices while a run goes on: counters, utilization, a profile."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from titan_opd.config.observe import ObserveConfig, ProfileConfig
from titan_opd.models.config import DecoderConfig
from titan_opd.models.flops import causal_pairs
from titan_opd.models.peak_flops import peak_flops
from titan_opd.observe.gpu_counters import gpu_metrics, open_gpu_counters
from titan_opd.observe.out_of_memory import record_allocations
from titan_opd.observe.profiler import StepProfiler
from titan_opd.observe.utilization import utilization_metrics

if TYPE_CHECKING:
    from titan_opd.parallel import World


class Instruments:
    """Of one process of the trainer; all of them make the same calls in the same order.

    Args:
        observe, profile: the sections of these names.
        folder: the run's.
        world: the processes.

    Raises:
        ValueError: something is asked for that this machine does not have.
    """

    def __init__(self, observe: ObserveConfig, profile: ProfileConfig, folder: Path, world: World) -> None:
        missing = [rank for rank in profile.ranks if rank >= world.size]
        if missing:
            raise ValueError(
                f"profile.ranks = {list(profile.ranks)} names process {missing[0]}, and the trainer has {world.size}, "
                "counted from 0"
            )
        if observe.memory_history and world.device.type != "cuda":
            raise ValueError("observe.memory_history = true watches a GPU's allocator, and there is none; leave it out")
        self.notes: list[str] = []  # for the person, at the start
        self._say: Callable[[str], None] = self.notes.append
        self._world = world
        self._profiler = StepProfiler(profile, folder, world.rank, world.device)
        self._peak_flops = self._find_peak(observe)
        if observe.memory_history:
            record_allocations()
        self._counts_gpus = world.device.type == "cuda" and observe.gpu_counters != "off"
        self._counters = open_gpu_counters(observe.gpu_counters, world.device, say=lambda text: self._say(text))
        self._say = self._warn

    def _warn(self, text: str) -> None:
        """From any process and thread, at once: whatever comes next may fail."""
        print(f"trainer {self._world.rank}: {text}", file=sys.stderr, flush=True)

    def _find_peak(self, observe: ObserveConfig) -> float | None:
        if observe.peak_tflops:
            return observe.peak_tflops * 1e12
        if self._world.device.type != "cuda":
            return None
        name = torch.cuda.get_device_name(self._world.device)
        peak = peak_flops(name)
        if peak is None:
            self.notes.append(f"mfu: none, the peak of {name!r} is not known; set observe.peak_tflops")
        return peak

    def begin_step(self, step: int) -> None:
        """Step `step`, counted from 1, begins."""
        self._profiler.begin_step(step)

    def end_step(
        self, step: int, student: DecoderConfig, lengths: Sequence[int], *, num_trained: int, seconds: float
    ) -> dict[str, Any]:
        """Step `step` is done.

        Args:
            step: counted from 1.
            student: its shape.
            lengths: tokens of the sequences that this process's share trains.
            num_trained: tokens that are trained, over all processes.
            seconds: of the phase `train` in this process.

        Returns:
            Metrics over all processes; those of time are by this process's clock.

        Raises:
            StorageError: a profile cannot be written.
        """
        for path in self._profiler.end_step(step):
            print(f"trainer {self._world.rank}: wrote {path}", file=sys.stderr, flush=True)
        num_tokens, num_pairs = self._world.sum(torch.tensor([sum(lengths), causal_pairs(lengths)])).tolist()
        metrics: dict[str, Any] = utilization_metrics(
            student,
            num_tokens=num_tokens,
            num_rows=num_trained,
            num_pairs=num_pairs,
            seconds=seconds,
            num_devices=self._world.size,
            peak_flops=self._peak_flops,
        )
        if self._counts_gpus:
            summary = None if self._counters is None else self._counters.take()
            metrics |= gpu_metrics(self._world.gather(summary))
        return metrics

    def close(self) -> None:
        """End the threads and the profile."""
        self._profiler.close()
        if self._counters is not None:
            self._counters.close()
