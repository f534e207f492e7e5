"""The journal: which samples each step has trained, one JSON object a line."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from titan_opd.data.records import Trajectory
from titan_opd.observe.lines import LineFile

JOURNAL_FILE = "journal.jsonl"


@dataclass(frozen=True)
class TrainedSample:
    """One trained answer: which sample, and what is needed to recognise it.

    Attributes:
        number, epoch, repeat: of the `Sample`.
        prompt: its prompt's id.
        tokens: of the response, those of weight 0 included.
    """

    number: int
    epoch: int
    repeat: int
    prompt: str
    tokens: int

    @classmethod
    def of(cls, trajectory: Trajectory) -> TrainedSample:
        """What the journal keeps of an answer."""
        sample = trajectory.sample
        return cls(sample.number, sample.epoch, sample.repeat, sample.prompt.id, len(trajectory.response_ids))


class Journal(LineFile):
    """`journal.jsonl`: `{"step": 3, "version": 2, "samples": [{"number": 128, "epoch": 0, ...}, ...]}`."""

    def append(self, step: int, version: int, samples: Sequence[TrainedSample]) -> None:
        """Record that `step` trained `samples` from policy version `version`."""
        ordered = sorted(samples, key=lambda sample: sample.number)
        self.write_line({"step": step, "version": version, "samples": [asdict(sample) for sample in ordered]})
