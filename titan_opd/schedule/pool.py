"""The samples that have been taken from the stream and are not trained yet: the conductor's whole memory of samples.

    unstarted -> writing -> written -> scoring -> scored -> batched -> (trained: forgotten)
        ^___________|__________|__________|__________|         |
        a lease or a result is lost                  ^_________| the batch is given back

A sample is *open* from "writing" to "scored". Trained and dropped samples are the numbers below the stream's position
that are not here; admission keeps the rest within (s + 1) B, however long the run.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

from titan_opd.data.records import Sample
from titan_opd.schedule.headers import AnswerHeader


class Stage(str, Enum):
    UNSTARTED = "unstarted"
    WRITING = "writing"
    WRITTEN = "written"
    SCORING = "scoring"
    SCORED = "scored"
    BATCHED = "batched"


class SampleStream(Protocol):
    """Samples with consecutive numbers; `data.PromptStream` is one."""

    def take(self, count: int) -> list[Sample]: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


@dataclass(eq=False)
class Entry:
    """One untrained sample.

    Attributes:
        sample: what is asked.
        stage: how far it is.
        version: of its first token; at "writing" the version of its lease, which is not above it.
        answer: the written answer's header.
        writer, writer_lease: which lease led, or leads, to the answer.
        scorer, scorer_lease: the same of the scores.
        scores_where: where the scores can be fetched.
        restarted: whether it was written anew because of its deadline.
        answer_lost, scores_lost: the payload died with its worker while the sample was in a batch.
    """

    sample: Sample
    stage: Stage = Stage.UNSTARTED
    version: int = 0
    answer: AnswerHeader | None = None
    writer: str | None = None
    writer_lease: str | None = None
    scorer: str | None = None
    scorer_lease: str | None = None
    scores_where: str = ""
    restarted: bool = False
    answer_lost: bool = False
    scores_lost: bool = False

    @property
    def number(self) -> int:
        return self.sample.number


class SamplePool:
    """Untrained samples by number, by stage, and open ones counted by version.

    Args:
        stream: stands at sample 0, or where `restore` puts it.
    """

    def __init__(self, stream: SampleStream) -> None:
        self._stream = stream
        self._entries: dict[int, Entry] = {}
        self._unstarted: list[int] = []  # a heap
        self._next_number = 0  # of the stream
        self._stages: dict[Stage, dict[int, Entry]] = {stage: {} for stage in Stage}
        self.open_counts: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def __getitem__(self, number: int) -> Entry:
        return self._entries[number]

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._entries.values())

    def at(self, stage: Stage) -> dict[int, Entry]:
        """The samples of one stage by number, in the order in which they got there."""
        return self._stages[stage]

    def lowest_unstarted(self) -> int:
        """The number to start next. Lost samples come first: theirs are below those still in the stream."""
        return self._unstarted[0] if self._unstarted else self._next_number

    def start(self, version: int) -> Entry:
        """Start the lowest unstarted sample at `version`."""
        if not self._unstarted:
            self._put(self._take())
        entry = self._entries[heapq.heappop(self._unstarted)]
        entry.version = version
        self.move(entry, Stage.WRITING)
        return entry

    def written(self, entry: Entry, answer: AnswerHeader) -> None:
        """Its answer is there, and with it the true version of its first token."""
        self._count(entry, -1)
        entry.answer, entry.version = answer, answer.first_version
        self._count(entry, +1)
        self.move(entry, Stage.WRITTEN)

    def renew(self, entry: Entry) -> None:
        """Forget what was done for the sample; it starts anew under its number."""
        self.move(entry, Stage.UNSTARTED)
        heapq.heappush(self._unstarted, entry.number)
        entry.answer = entry.writer = entry.writer_lease = None
        self._forget_scores(entry)
        entry.answer_lost = False

    def score_anew(self, entry: Entry) -> None:
        """Forget the sample's scores and keep its answer."""
        self._forget_scores(entry)
        self.move(entry, Stage.WRITTEN)

    def _forget_scores(self, entry: Entry) -> None:
        entry.scorer = entry.scorer_lease = None
        entry.scores_where = ""
        entry.scores_lost = False

    def remove(self, entry: Entry) -> None:
        """The sample is trained or dropped."""
        self.move(entry, Stage.UNSTARTED)
        del self._stages[Stage.UNSTARTED][entry.number]
        del self._entries[entry.number]

    def move(self, entry: Entry, stage: Stage) -> None:
        """Change a sample's stage, and the count of open samples with it."""
        self._count(entry, -1)
        del self._stages[entry.stage][entry.number]
        entry.stage = stage
        self._stages[stage][entry.number] = entry
        self._count(entry, +1)

    def _count(self, entry: Entry, change: int) -> None:
        if entry.stage in (Stage.UNSTARTED, Stage.BATCHED):
            return
        count = self.open_counts.get(entry.version, 0) + change
        if count:
            self.open_counts[entry.version] = count
        else:
            del self.open_counts[entry.version]

    def _take(self) -> Entry:
        (sample,) = self._stream.take(1)
        if sample.number != self._next_number:
            raise ValueError(
                f"the stream of prompts stands at sample {sample.number} and the schedule at {self._next_number}; "
                "begin with a fresh stream, or restore the schedule from its snapshot"
            )
        self._next_number += 1
        return Entry(sample)

    def _put(self, entry: Entry) -> None:
        self._entries[entry.number] = entry
        self._stages[Stage.UNSTARTED][entry.number] = entry
        heapq.heappush(self._unstarted, entry.number)

    def stream_state(self) -> dict[str, Any]:
        """The stream's state, behind all samples of the pool."""
        return self._stream.state_dict()

    def restore(self, stream_state: dict[str, Any], numbers: Iterable[int]) -> None:
        """Take the samples `numbers`, unstarted, and leave the stream at `stream_state`.

        A stream is its settings and the number of its next sample, so it is rewound to the lowest of `numbers`.
        """
        end = stream_state["next_number"]
        wanted = set(numbers)
        self._next_number = min(wanted, default=end)
        self._stream.load_state_dict({**stream_state, "next_number": self._next_number})
        while self._next_number < end:
            entry = self._take()
            if entry.number in wanted:
                self._put(entry)

    def keep(self, number: int, answer: AnswerHeader, scores_where: str) -> None:
        """An unstarted sample that is finished already: its answer and scores are in the checkpoint."""
        entry = self._entries[number]
        self._unstarted.remove(number)
        heapq.heapify(self._unstarted)
        entry.answer, entry.version, entry.scores_where = answer, answer.first_version, scores_where
        self.move(entry, Stage.SCORED)
