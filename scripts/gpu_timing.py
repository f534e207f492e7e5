"""Timing on a GPU by CUDA events, and what a report says of the machine."""

from __future__ import annotations

import datetime
import platform
import statistics
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
WARMUP = 3
COPY_BYTES = 1 << 30


@dataclass(frozen=True)
class Timing:
    """Milliseconds of the rounds after the warm-up."""

    median: float
    fastest: float
    slowest: float

    @classmethod
    def of(cls, milliseconds: list[float]) -> Timing:
        return cls(statistics.median(milliseconds), min(milliseconds), max(milliseconds))

    def __str__(self) -> str:
        return f"{self.median:.3f} ({self.fastest:.3f} - {self.slowest:.3f})"


def require_gpu() -> torch.device:
    """The current GPU, or an exit with one line that says what is missing."""
    if torch.version.cuda is None:
        sys.exit(f"this torch ({torch.__version__}) is built without CUDA: nothing can be timed on a GPU")
    if not torch.cuda.is_available():
        sys.exit(f"torch {torch.__version__} finds no CUDA device: nothing can be timed on a GPU")
    return torch.device("cuda", torch.cuda.current_device())


def time_in_turn(calls: dict[str, Callable[[], object]], rounds: int) -> dict[str, Timing]:
    """Each call's time on the GPU, the calls of a round one after the other, so that all meet the same clocks."""
    milliseconds: dict[str, list[float]] = {name: [] for name in calls}
    for round_number in range(WARMUP + rounds):
        for name, call in calls.items():
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            call()
            end.record()
            end.synchronize()
            if round_number >= WARMUP:
                milliseconds[name].append(start.elapsed_time(end))
    return {name: Timing.of(values) for name, values in milliseconds.items()}


def copy_bandwidth(device: torch.device, rounds: int) -> float:
    """Bytes a second of a copy of 1 GiB within the GPU's memory, each byte counted as read and as written."""
    source = torch.empty(COPY_BYTES, dtype=torch.uint8, device=device).fill_(1)
    target = torch.empty_like(source)
    timing = time_in_turn({"copy": lambda: target.copy_(source)}, rounds)["copy"]
    return 2 * COPY_BYTES / (timing.median * 1e-3)


def machine(device: torch.device) -> dict[str, str]:
    """What a figure depends on: device, driver, versions, commit, date."""
    facts = {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "commit": _first_line(["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12"]),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"]
        facts |= {
            "device": properties.name,
            "compute capability": f"{properties.major}.{properties.minor}",
            "memory": f"{properties.total_memory / 2**30:.0f} GiB",
            "torch's CUDA": torch.version.cuda,
            "driver": _first_line(query),
            "nvcc": _first_line(["nvcc", "--version"], line=-2),
        }
    else:
        facts["device"] = _cpu_name()
    return facts


def _first_line(command: list[str], line: int = 0) -> str:
    try:
        result = subprocess.run(command, capture_output=True, text=True)
    except FileNotFoundError:
        return f"unknown ({command[0]} is not on PATH)"
    lines = result.stdout.strip().splitlines()
    return lines[line].strip() if result.returncode == 0 and lines else f"unknown ({result.stderr.strip()[:80]})"


def _cpu_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    for line in cpuinfo.read_text().splitlines() if cpuinfo.exists() else []:
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
