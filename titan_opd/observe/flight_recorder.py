"""Which collectives a process was in when the run hung: PyTorch's flight recorder, on by default.

Gloo and NCCL remember the last collectives of each process with their shapes. They are told

- by every process of the machine after its stacks, when the watchdog asks for those (stacks.py);
- by NCCL itself, when one of its collectives has timed out, in all processes, on other machines too: in
  `RUN/flight_recorder_nccl_RANK`, for `torchfrtrace RUN -p flight_recorder_nccl_`, which compares them.
"""

from __future__ import annotations

import os
import pickle
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, MutableMapping
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch._C import _distributed_c10d

_NUM_ENTRIES = 2000  # collectives that each process remembers: some steps of a large model
_MAX_UNDER_WAY = 8  # of one group that are told

# Setting -> the names that PyTorch reads it by, the newest first.
_NAMES = {
    "entries": ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"),
    "file": ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"),
    "dump on time-out": ("TORCH_NCCL_DUMP_ON_TIMEOUT",),
    "monitoring": ("TORCH_NCCL_ENABLE_MONITORING",),
}
_RECORDERS = ("_dump_fr_trace", "_dump_nccl_trace")  # gloo's; NCCL's, where PyTorch is built with it


def set_up_flight_recorder(
    run_directory: Path | str, environment: MutableMapping[str, str] = os.environ
) -> dict[str, str]:
    """Let the process groups that are made from now on record their collectives, and NCCL's time-outs write them.

    What the environment says already, by a new name or an old one, stays.

    Returns:
        The variables that were set.
    """
    values = {
        "entries": str(_NUM_ENTRIES),
        "file": str(Path(run_directory).absolute() / "flight_recorder_nccl_"),  # PyTorch appends the rank
        "dump on time-out": "1",
        "monitoring": "1",  # the thread of NCCL's that writes
    }
    added = {
        _NAMES[setting][0]: value
        for setting, value in values.items()
        if not any(name in environment for name in _NAMES[setting])
    }
    environment.update(added)
    return added


def describe_collectives() -> str:
    """What this process's collectives were and which are under way, as lines; from any thread. Empty without any."""
    if not dist.is_initialized():
        return ""
    lines = []
    for name in _RECORDERS:
        recorder = getattr(_distributed_c10d, name, None)
        if recorder is not None:
            # Without Python's frames: the stacks have them, and to look them all up takes seconds.
            lines += _lines(pickle.loads(recorder(includeStackTraces=False)))
    return "".join(f"{line}\n" for line in lines)


def _lines(record: Mapping[str, Any]) -> Iterator[str]:
    groups: dict[tuple[str, ...], list[Mapping[str, Any]]] = defaultdict(list)
    for entry in record.get("entries", ()):
        groups[tuple(entry["process_group"])].append(entry)
    for group, entries in groups.items():
        last = entries[-1]
        under_way = [entry for entry in entries if not entry["retired"]]
        yield f"group {' '.join(group)}: the last collective is {_describe(last)}"
        for entry in under_way[:_MAX_UNDER_WAY]:
            seconds = (time.time_ns() - entry["time_created_ns"]) / 1e9
            yield f"  not done after {seconds:.0f} s: {_describe(entry)}"
        if len(under_way) > _MAX_UNDER_WAY:
            yield f"  and {len(under_way) - _MAX_UNDER_WAY} more"
        if not under_way:
            yield "  and it is done"


def _describe(entry: Mapping[str, Any]) -> str:
    number = f"point-to-point {entry['p2p_seq_id']}" if entry["is_p2p"] else f"number {entry['collective_seq_id']}"
    return f"{entry['profiling_name']}, {number}, {entry['input_dtypes']} {entry['input_sizes']}"
