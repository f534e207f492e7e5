"""What the conductor and the others tell each other: headers, never tokens or scores."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from titan_opd.data.records import Sample

CHECKPOINT = "checkpoint"  # where the payload of a restored sample is


@dataclass(frozen=True)
class AnswerHeader:
    """What the conductor has to know of a written answer.

    Attributes:
        first_version, last_version: policy versions of its first and its last token.
        num_tokens: tokens of the response.
        where: where the tokens can be fetched, in the words of whoever fetches them.
    """

    first_version: int
    last_version: int
    num_tokens: int
    where: str


@dataclass(frozen=True, eq=False)
class RolloutLease:
    """The right to write one answer.

    Attributes:
        id: of the lease; never used twice, also not by another process that goes on from a snapshot.
        sample: what is asked.
        version: the engine's verified version when the lease was given; no token may be of an older one.
    """

    id: str
    sample: Sample
    version: int


@dataclass(frozen=True, eq=False)
class ScoringLease:
    """The right to score one answer, which is fetched from `answer.where`."""

    id: str
    sample: Sample
    answer: AnswerHeader


@dataclass(frozen=True)
class Orders:
    """The reply to a heartbeat.

    Attributes:
        known: False tells the worker that it is not (or no longer) registered: it drops all it has and registers anew.
        cancelled: leases of this worker that no longer count: stop writing, forget what was written.
    """

    known: bool
    cancelled: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class BatchEntry:
    """One sample of a batch: what it is and where its tokens (`answer.where`) and its scores are."""

    sample: Sample
    answer: AnswerHeader
    scores_where: str


@dataclass(frozen=True, eq=False)
class Batch:
    """What one step trains.

    Attributes:
        version: w, the policy version that the step starts from.
        min_version: w - s; tokens of an older version get weight 0. There are some only with on_limit = "mask".
        entries: `batch` samples in the order of their numbers.
    """

    version: int
    min_version: int
    entries: tuple[BatchEntry, ...]

    def share(self, rank: int, size: int) -> tuple[BatchEntry, ...]:
        """What data-parallel rank `rank` of `size` trains: every `size`-th sample, as in the synchronous schedule."""
        return self.entries[rank::size]


@dataclass(frozen=True)
class Waiting:
    """Why there is no batch yet.

    Attributes:
        role: who has to move: "rollout" or "teacher".
        reason: "samples" when too few of those that the batch may take are finished, "deadline" when the look-ahead
            holds the step back.
        numbers: the samples that it waits for; none when any will do.
        finished: samples that are scored and in no batch.
        since: time of the first call that found the step waiting.
    """

    role: str
    reason: str
    numbers: tuple[int, ...]
    finished: int
    since: float


@dataclass(frozen=True)
class Release:
    """A payload that its producer may forget, since it has been trained."""

    worker: str
    lease: str


@dataclass
class Counters:
    """What happened in a run besides training; part of the snapshot.

    Attributes:
        dropped: samples given up for good (they bias the data towards short answers).
        restarted: answers written anew because they would have missed their deadline (the same bias).
        masked: trained samples with tokens that were too old and had weight 0.
        lost: leases and results that died with a worker or were given back.
        ignored: results of leases that no longer counted.
    """

    dropped: int = 0
    restarted: int = 0
    masked: int = 0
    lost: int = 0
    ignored: int = 0

    def state_dict(self) -> dict[str, Any]:
        return asdict(self)
