"""Several real processes with a gloo group among them, for tests of what they compute together."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def run_world(
    function: Callable[..., Any], *arguments: Any, size: int, folder: Path, timeout: float = 600
) -> list[Any]:
    """What `function(*arguments)` returns in each of `size` processes, by rank.

    Args:
        function: of a module that can be imported; the process group is there when it is called.
        size: number of processes, one thread each.
        folder: an empty one, for what the processes exchange.
        timeout: seconds after which processes that wait for each other are ended and the test fails.
    """
    context = mp.spawn(_process, (size, folder, function, arguments), nprocs=size, join=False)
    end = time.monotonic() + timeout
    try:
        while not context.join(timeout=1):  # raises the error of a process that failed
            if time.monotonic() > end:
                raise TimeoutError(f"{function.__name__} in {size} processes takes more than {timeout} seconds")
    finally:
        for process in context.processes:
            if process.is_alive():
                process.kill()
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(size)]


def _process(rank: int, size: int, folder: Path, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size)
    torch.save(function(*arguments), folder / f"{rank}.pt")
    dist.destroy_process_group()
    time.sleep(0.1)  # an interpreter that ends while gloo's threads let go of their tensors aborts
