"""When a GPU's memory runs out: what lay in it, and what to change.

The error is caught where it has left the run's loop; its traceback still holds the frames that failed, and with them
nearly all that was allocated. What C++ held at that moment is gone; with `observe.memory_history` the snapshot tells it
too, because it has the last allocations and frees with their stacks. Look at it on <https://pytorch.org/memory_viz>.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

_HISTORY_ENTRIES = 100_000  # allocations and frees that are remembered

# What lowers the peak of a phase, the cheapest first.
_ADVICE = {
    "train": "lower training.tokens_per_microbatch or training.logits_chunk_mb; set training.recompute_activations = "
    "'selective' or 'full'; set parallel.reduce_gradients = 'each'; spread the student over more processes "
    "(parallel.dp_shard, parallel.tp); set parallel.cpu_offload = true",
    "rollout": "lower rollout.max_concurrent or rollout.sampling.max_new_tokens (with vLLM rollout.vllm.kv_cache_mb); "
    "set rollout.dtype = 'bfloat16'; set rollout.placement = 'workers' on another device",
    "score": "lower teacher.tokens_per_forward or training.logits_chunk_mb; set teacher.dtype = 'bfloat16'; set "
    "teacher.placement = 'workers' on another device",
    "weights": "lower weights.bucket_mb; set rollout.dtype = 'bfloat16'",
    "evaluate": "lower rollout.max_concurrent or evaluation.sampling.max_new_tokens, or teacher.tokens_per_forward",
}


def record_allocations() -> None:
    """From now on the CUDA allocator remembers its last allocations and frees with their Python stacks."""
    torch.cuda.memory._record_memory_history(max_entries=_HISTORY_ENTRIES, stacks="python")


def write_snapshot(path: Path) -> None:
    """What lies in this process's GPU, and the history where it is recorded.

    Raises:
        OSError: the file cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.cuda.memory._dump_snapshot(str(path))


@contextmanager
def explain_out_of_memory(
    folder: Path,
    role: str,
    rank: int,
    *,
    phase: Callable[[], str | None],
    snapshot: Callable[[Path], None] = write_snapshot,
) -> Iterator[None]:
    """Inside, an error of the allocator writes `FOLDER/oom_ROLE_RANK.pickle` and becomes one that says what to change.

    Args:
        folder: the run's.
        role, rank: of this process.
        phase: tells which part of a step runs, or ran last.
        snapshot: writes the file; tests have another one.

    Raises:
        ValueError: the memory of a device has run out.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        path, where = folder / f"oom_{role}_{rank}.pickle", phase()
        try:
            snapshot(path)
            lay = f"what lay there: {path} (for https://pytorch.org/memory_viz)"
        except Exception as failure:  # a full disk: the person must read what was first
            lay = f"what lay there could not be written to {path} ({failure!r})"
        during = f" in the phase {where!r}" if where else ""
        advice = _ADVICE.get(where or "", _ADVICE["train"])
        raise ValueError(
            f"the memory of {role} {rank}'s device has run out{during}: {error}. Ways out, the cheapest first: "
            f"{advice}. Then go on with --resume from the newest checkpoint, or begin anew where there is none; {lay}"
        ) from error
