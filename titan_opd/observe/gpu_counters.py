"""What the driver says of this process's GPU, sampled while a step goes on: NVML through `nvidia-ml-py`.

A thread reads all counters every `SAMPLE_SECONDS`: NVML's utilization is of the last second or less, so one look at
the end of a step would show the end of the step. The calls let go of the interpreter; none of them waits for the GPU.
PCIe throughput is left out, because NVML measures it for 20 ms while the caller waits.
"""

from __future__ import annotations

import statistics
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch

SAMPLE_SECONDS = 1.0
_MIB = 2**20

# Name -> how it is read, and what of a step's samples is told.
_COUNTERS: dict[str, tuple[Callable[[Any, Any], float], Callable[[Iterable[float]], float]]] = {
    "utilization_percent": (lambda nvml, gpu: nvml.nvmlDeviceGetUtilizationRates(gpu).gpu, statistics.fmean),
    "memory_used_mb": (lambda nvml, gpu: nvml.nvmlDeviceGetMemoryInfo(gpu).used / _MIB, max),
    "memory_total_mb": (lambda nvml, gpu: nvml.nvmlDeviceGetMemoryInfo(gpu).total / _MIB, max),
    "power_watts": (lambda nvml, gpu: nvml.nvmlDeviceGetPowerUsage(gpu) / 1000, statistics.fmean),
    "power_limit_watts": (lambda nvml, gpu: nvml.nvmlDeviceGetEnforcedPowerLimit(gpu) / 1000, min),
    "sm_clock_mhz": (lambda nvml, gpu: nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_SM), statistics.fmean),
    "memory_clock_mhz": (lambda nvml, gpu: nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_MEM), statistics.fmean),
    "temperature_celsius": (lambda nvml, gpu: nvml.nvmlDeviceGetTemperature(gpu, nvml.NVML_TEMPERATURE_GPU), max),
    "ecc_corrected": (lambda nvml, gpu: _ecc(nvml, gpu, nvml.NVML_MEMORY_ERROR_TYPE_CORRECTED), max),
    "ecc_uncorrected": (lambda nvml, gpu: _ecc(nvml, gpu, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED), max),
}
# Name -> NVML's bit. That a GPU is idle or runs at clocks that somebody has set is no throttling.
_THROTTLING = {
    "power_cap": "nvmlClocksEventReasonSwPowerCap",
    "hardware_slowdown": "nvmlClocksEventReasonHwSlowdown",
    "sync_boost": "nvmlClocksEventReasonSyncBoost",
    "thermal_slowdown": "nvmlClocksEventReasonSwThermalSlowdown",
    "hardware_thermal_slowdown": "nvmlClocksEventReasonHwThermalSlowdown",
    "power_brake": "nvmlClocksEventReasonHwPowerBrakeSlowdown",
}


def _ecc(nvml: Any, gpu: Any, kind: int) -> int:
    """Errors since the driver was loaded."""
    return nvml.nvmlDeviceGetTotalEccErrors(gpu, kind, nvml.NVML_VOLATILE_ECC)


class NoGpuCountersError(RuntimeError):
    """There is nothing that could be counted; the text says why."""


@dataclass(frozen=True)
class GpuSample:
    """One reading of a GPU.

    Attributes:
        values: by counter; what the GPU does not have is missing.
        throttling: why its clocks are lower than they could be; None where it does not tell.
    """

    values: Mapping[str, float]
    throttling: frozenset[str] | None


@dataclass(frozen=True)
class GpuSummary:
    """The readings of a step.

    Attributes:
        values: by counter, and `throttled_share`, the share of the readings in which the clocks were held down.
        throttling: all the reasons.
    """

    values: dict[str, float] = field(default_factory=dict)
    throttling: frozenset[str] = frozenset()

    @classmethod
    def of(cls, samples: Sequence[GpuSample]) -> GpuSummary:
        values = {}
        for name, (_, over_samples) in _COUNTERS.items():
            readings = [sample.values[name] for sample in samples if name in sample.values]
            if readings:
                values[name] = over_samples(readings)
        reasons = [sample.throttling for sample in samples if sample.throttling is not None]
        if reasons:
            values["throttled_share"] = sum(map(bool, reasons)) / len(reasons)
        return cls(values, frozenset().union(*reasons))


class GpuCounters:
    """Reads one GPU's counters in a thread of its own, from the construction to `close`.

    A GPU that is lost, or whose counters fail, ends the reading with a line, not the run.

    Args:
        uuid: of the GPU, "GPU-...": numbers differ between CUDA, which CUDA_VISIBLE_DEVICES renumbers, and NVML.
        say: takes a line for the person, from any thread.
        nvml: the module `pynvml`, or what tests put in its place.

    Raises:
        NoGpuCountersError: no driver, or it does not know the GPU.
    """

    def __init__(self, uuid: str, *, say: Callable[[str], None], nvml: ModuleType | Any = None) -> None:
        if nvml is None:
            import pynvml as nvml
        self._nvml = nvml
        self._name = uuid
        self._say = say
        self._lock = threading.Lock()
        self._samples: list[GpuSample] = []
        self._ecc: dict[str, float] = {}
        self._closing = threading.Event()
        try:
            nvml.nvmlInit()
            self._gpu = nvml.nvmlDeviceGetHandleByUUID(uuid)
            self._name = f"{nvml.nvmlDeviceGetName(self._gpu)} ({uuid})"
        except nvml.NVMLError as error:
            raise NoGpuCountersError(f"{self._name}: {error}") from error
        self._thread = threading.Thread(target=self._read_on, name="gpu counters", daemon=True)
        self._thread.start()

    def take(self) -> GpuSummary | None:
        """What was read since the last call; None when nothing was."""
        with self._lock:
            samples, self._samples = self._samples, []
        return GpuSummary.of(samples) if samples else None

    def close(self) -> None:
        """End the thread. A call into a driver that hangs is not waited for."""
        self._closing.set()
        self._thread.join(2 * SAMPLE_SECONDS)

    # In the thread

    def _read_on(self) -> None:
        nvml = self._nvml
        try:
            while True:
                sample = self._read()
                self._watch_ecc(sample.values)
                with self._lock:
                    self._samples.append(sample)
                if self._closing.wait(SAMPLE_SECONDS):
                    return
        except nvml.NVMLError_GpuIsLost:
            self._say(
                f"the GPU {self._name} is lost: it has fallen off the bus or was reset, and whatever is computed there "
                "will fail. The kernel's log has the reason (dmesg | grep Xid); its counters end here"
            )
        except nvml.NVMLError as error:
            self._say(f"the counters of the GPU {self._name} end here: {error}")

    def _read(self) -> GpuSample:
        values = {}
        for name, (read, _) in _COUNTERS.items():
            value = self._asked(read)
            if value is not None:
                values[name] = value
        bits = self._asked(lambda nvml, gpu: nvml.nvmlDeviceGetCurrentClocksEventReasons(gpu))
        if bits is None:
            return GpuSample(values, None)
        return GpuSample(
            values, frozenset(name for name, bit in _THROTTLING.items() if bits & getattr(self._nvml, bit))
        )

    def _asked(self, read: Callable[[Any, Any], float]) -> float | None:
        """None for what this GPU, or this driver, does not have."""
        try:
            return read(self._nvml, self._gpu)
        except (self._nvml.NVMLError_NotSupported, self._nvml.NVMLError_FunctionNotFound):
            return None

    def _watch_ecc(self, values: Mapping[str, float]) -> None:
        advice = {
            "ecc_corrected": "nothing is wrong yet, but a GPU that goes on like this is a candidate for exchange",
            "ecc_uncorrected": "numbers may be wrong from here on; go on from a checkpoint before it, on another GPU",
        }
        for name, meaning in advice.items():
            before, now = self._ecc.get(name), values.get(name)
            if now is None:
                continue
            if before is not None and now > before:
                self._say(
                    f"the GPU {self._name} has had {now - before:.0f} {name.removeprefix('ecc_')} ECC errors more "
                    f"({now:.0f} since its driver was loaded): {meaning}"
                )
            self._ecc[name] = now


def open_gpu_counters(
    wanted: str, device: torch.device, *, say: Callable[[str], None], nvml: ModuleType | Any = None
) -> GpuCounters | None:
    """The counters of the device that this process computes on; None where there are none, and why is said.

    Args:
        wanted: `observe.gpu_counters`.
        device: of this process.
        say, nvml: as of `GpuCounters`.

    Raises:
        ValueError: they are asked for, and there are none.
    """
    if wanted == "off":
        return None
    try:
        if device.type != "cuda":
            raise NoGpuCountersError("this process computes on the CPU")
        return GpuCounters(f"GPU-{torch.cuda.get_device_properties(device).uuid}", say=say, nvml=nvml)
    except NoGpuCountersError as error:
        if wanted == "on":
            raise ValueError(
                f"observe.gpu_counters = 'on', and there are none: {error}; set it to 'auto' or 'off'"
            ) from error
        say(f"GPU counters: none, {error}")
        return None


def gpu_metrics(summaries: Sequence[GpuSummary | None]) -> dict[str, Any]:
    """The smallest and largest value over the trainer's GPUs: `gpu/power_watts/min` ..., and `gpu/throttling`, a text.

    Args:
        summaries: one of each process; None where nothing was read.
    """
    read = [summary for summary in summaries if summary is not None]
    metrics: dict[str, Any] = {}
    for name in (*_COUNTERS, "throttled_share"):
        values = [summary.values[name] for summary in read if name in summary.values]
        if values:
            metrics |= {f"gpu/{name}/min": min(values), f"gpu/{name}/max": max(values)}
    reasons = sorted(frozenset().union(*(summary.throttling for summary in read)))
    return metrics | ({"gpu/throttling": ", ".join(reasons)} if reasons else {})
