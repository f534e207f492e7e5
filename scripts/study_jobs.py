"""What the studies of this folder share: a folder that is theirs, and jobs whose records outlive an interruption."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import Any, TypeVar

import torch

J = TypeVar("J")


def claim_folder(output: Path, settings: dict[str, Any]) -> None:
    """Make the folder, or recognise it by the settings in its `study.json`.

    Raises:
        ValueError: it holds a study of other settings.
    """
    output.mkdir(parents=True, exist_ok=True)
    settings = json.loads(json.dumps(settings))  # as they come back from a file
    file = output / "study.json"
    if file.exists() and json.loads(file.read_text()) != settings:
        raise ValueError(
            f"{file} belongs to other models or another protocol; name another --output, or delete that folder"
        )
    file.write_text(json.dumps(settings, indent=1) + "\n")


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The objects of a file of JSON lines; none when there is no file. Half a last line is left out."""
    complete = path.read_text().rpartition("\n")[0] if path.exists() else ""
    return [json.loads(line) for line in complete.splitlines()]


def run_jobs(
    file: Path,
    jobs: Iterable[J],
    processes: int,
    *,
    run: Callable[[J], dict[str, Any]],
    job_of: Callable[[dict[str, Any]], J],
    tell: Callable[[J, dict[str, Any]], str],
) -> dict[J, dict[str, Any]]:
    """The record of each job: from `file`, or from a run that adds it there.

    Args:
        file: JSON lines, a finished job each.
        jobs: wanted; the same one may come several times.
        processes: run at the same time, one thread each.
        run: does a job, in a process of its own; can be pickled.
        job_of: the job that a record is of.
        tell: a finished job in one line, for the person who waits.
    """
    rows = read_rows(file)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))  # without half a line of a run that was killed
    records = {job_of(row): row for row in rows}
    waiting = [job for job in dict.fromkeys(jobs) if job not in records]
    with ProcessPoolExecutor(processes, get_context("spawn"), initializer=torch.set_num_threads, initargs=(1,)) as pool:
        futures = {pool.submit(run, job): job for job in waiting}
        for done, future in enumerate(as_completed(futures), start=1):
            job, record = futures[future], future.result()
            records[job] = record
            with file.open("a") as lines:
                lines.write(json.dumps(record) + "\n")
            print(f"{done}/{len(waiting)}  {tell(job, record)}", flush=True)
    return records
