"""Training again on recorded batches: a journal with payload in the place of engines and teachers."""

from __future__ import annotations

import re
from pathlib import Path

from titan_opd.data.records import ScoredTrajectory
from titan_opd.parallel import World
from titan_opd.schedule.samples_file import read_samples

PAYLOAD_FOLDER = "payload"  # beside the journal
_FILE = re.compile(r"step-(\d{6})-rank-\d+\.samples")


def payload_file(run_directory: Path, step: int, rank: int) -> Path:
    """Where a process keeps its share of what a step trained."""
    return run_directory / PAYLOAD_FOLDER / f"step-{step:06d}-rank-{rank}.samples"


class ReplaySchedule:
    """Hands out the batches that a journal recorded.

    Args:
        journal: the file; its payload lies in the folder `payload` beside it.
        num_steps: how many steps will be asked for.
        world: the processes, perhaps of another number than when it was recorded.

    Raises:
        ValueError: the journal or the payload of a step is missing.
    """

    def __init__(self, journal: Path, *, num_steps: int, world: World) -> None:
        if not journal.is_file():
            raise ValueError(f"--replay {journal} is no file; name a run's journal.jsonl")
        self._world = world
        self._files: dict[int, list[Path]] = {}
        folder = journal.parent / PAYLOAD_FOLDER
        for path in sorted(folder.glob("*.samples")):
            match = _FILE.fullmatch(path.name)
            if match is not None:
                self._files.setdefault(int(match[1]), []).append(path)
        missing = [step for step in range(1, num_steps + 1) if step not in self._files]
        if missing:
            raise ValueError(
                f"{folder} has no payload of step {missing[0]} ({len(self._files)} steps are recorded, training.steps "
                f"= {num_steps}); record the run with journal.payload = true, or lower training.steps"
            )

    def next_batch(self, version: int) -> list[ScoredTrajectory]:
        """This process's share of what the step at `version` trained."""
        samples = [one for path in self._files[version + 1] for one in read_samples(path)]
        return self._world.share(sorted(samples, key=lambda one: one.trajectory.sample.number))

    def publish(self, version: int) -> dict[str, float]:
        """No engine waits for the weights."""
        return {}

    def cut(self) -> None:
        """The recorded batches stay where they are."""

    def report(self) -> None:
        """Nobody else is at work."""
