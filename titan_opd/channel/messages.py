"""The headers: everything that conductor, workers and trainer say to each other.

One tagged union of frozen structs, msgpack on the wire. Unknown fields are refused and every number, text and list has
a bound, so that whatever decodes is safe to keep. They mirror the inputs and outputs of the schedule's conductor.

A header never carries tokens or scores. A payload lies in its producer's store (see `store.py`) under the id of the
lease that it was made for, so a lease id and the store's address say where it is.

A sample is named by number, epoch, repeat and the index of its prompt. A worker has read the same prompts (their digest
is compared at Hello) and takes the prompt from there, so a lease is a few bytes however long the prompt.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, get_args

from msgspec import Meta, Struct

from titan_opd.channel.addresses import Address

PROTOCOL_VERSION = 1
MAX_HEADER_BYTES = 256 << 10  # of one message; a full list below fits
MAX_ITEMS = 4096  # of one list in a message

Role = Literal["rollout", "teacher", "trainer"]
ROLES = get_args(Role)
FinishReason = Literal["stop", "length", "expert"]

Count = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
PositiveCount = Annotated[int, Meta(ge=1, le=MAX_ITEMS)]
Name = Annotated[str, Meta(min_length=1, max_length=64, pattern=r"\A[A-Za-z0-9._-]+\Z")]
Digest = Annotated[str, Meta(max_length=64, pattern=r"\A[0-9a-f]*\Z")]
LeaseId = Annotated[str, Meta(min_length=1, max_length=32)]
LeaseIds = Annotated[list[LeaseId], Meta(max_length=MAX_ITEMS)]
Stores = Annotated[list[Address], Meta(max_length=256)]
Text = Annotated[str, Meta(max_length=2000)]
Seconds = Annotated[float, Meta(ge=0)]
Nats = Annotated[float, Meta(ge=0)]


class Message(Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Base of all headers; the class's name is its tag."""


class Item(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Base of what stands in a list: fields by position, for they are many."""


# ---- Coming and going ------------------------------------------------------------------------------------------------


class Hello(Message):
    """A worker or the trainer introduces itself; the first message of a connection.

    Attributes:
        protocol, package_version: of the sender; both must be the conductor's.
        role: what it does.
        name: unique among those connected.
        vocabulary_digest, model_digest, prompts_digest: what it has loaded, in hexadecimal; "" for what its role lacks.
        teachers: the routes (`Prompt.teacher`) that a teacher serves; empty for other roles.
        store: where its payloads are fetched; None when it produces none.
        wall_time: its clock when it wrote this, in seconds since 1970.
    """

    protocol: Count
    package_version: Annotated[str, Meta(max_length=64)]
    role: Role
    name: Name
    vocabulary_digest: Digest
    model_digest: Digest
    prompts_digest: Digest
    teachers: Annotated[list[Name], Meta(max_length=64)]
    store: Address | None
    wall_time: float


class Welcome(Message):
    """The worker is in.

    Attributes:
        heartbeat_seconds: it says Heartbeat this often.
        silence_seconds: whoever says nothing for so long is taken for dead, on both sides.
    """

    heartbeat_seconds: Seconds
    silence_seconds: Seconds


class Refused(Message):
    """The conductor does not take the sender (before Welcome), or not what it sent."""

    reason: Text


class Heartbeat(Message):
    """A sign of life.

    Attributes:
        idle_seconds: since the sender's own loop last did something. The process beats in a thread, so a loop that
            hangs shows here, not in silence.
    """

    idle_seconds: Seconds


class Goodbye(Message):
    """The sender leaves; its leases are free."""

    reason: Text


class Stop(Message):
    """From the conductor: finish and leave."""

    reason: Text


# ---- Answers ---------------------------------------------------------------------------------------------------------


class EngineVersion(Message):
    """A rollout worker's engine holds complete, verified weights of this policy version.

    Attributes:
        probe_gap: mean difference of its log-probabilities of a fixed text from the trainer's, in nats a token; None
            where `weights.verify` asks for no probe.
    """

    version: Count
    probe_gap: Nats | None = None


class EngineFailed(Message):
    """An update of the engine broke off half-way; it serves nothing until its next EngineVersion."""

    reason: Text


class WantSamples(Message):
    """Room for so many more answers. Nothing else brings leases: who is full does not ask."""

    capacity: PositiveCount


class SampleLease(Item):
    """An answer to be written.

    Attributes:
        lease: names this attempt; another attempt at the same sample has another.
        number, epoch, repeat: the sample.
        prompt: index of its prompt among the prompts as they were read.
        version: the engine's when the lease was given; no token may be of an older one.
    """

    lease: LeaseId
    number: Count
    epoch: Count
    repeat: Count
    prompt: Count
    version: Count


class SampleLeases(Message):
    """The answer to WantSamples, in one message or several."""

    leases: Annotated[list[SampleLease], Meta(max_length=MAX_ITEMS)]


class RolloutDone(Message):
    """An answer is written; the Trajectory lies in the worker's store under `lease`.

    Attributes:
        first_version, last_version: policy versions of its first and last token.
        num_bytes: of the payload.
    """

    lease: LeaseId
    first_version: Count
    last_version: Count
    num_tokens: Count
    finish_reason: FinishReason
    num_bytes: Count


class LeasesReturned(Message):
    """The worker will not do these, samples or scorings, and says why."""

    leases: LeaseIds
    reason: Text


class LeasesCancelled(Message):
    """From the conductor: these no longer count. Stop working on them, and forget what they led to."""

    leases: LeaseIds


# ---- Scores ----------------------------------------------------------------------------------------------------------


class WantScoring(Message):
    """A teacher worker has room for so many more answers."""

    capacity: PositiveCount


class ScoringLease(Item):
    """An answer to be scored: `stores[store]` of the message has it under `answer`."""

    lease: LeaseId
    number: Count
    store: Count
    answer: LeaseId
    num_tokens: Count


class ScoringLeases(Message):
    """The answer to WantScoring, in one message or several."""

    stores: Stores
    leases: Annotated[list[ScoringLease], Meta(max_length=MAX_ITEMS)]


class ScoringDone(Message):
    """An answer is scored; the scores lie in the teacher worker's store under `lease`."""

    lease: LeaseId
    num_bytes: Count


class PayloadLost(Message):
    """A payload could not be fetched: its producer is dead or does not have it.

    Attributes:
        lease: the payload's.
    """

    lease: LeaseId
    reason: Text


class Release(Message):
    """From the conductor to a producer: nobody needs the payloads of these leases any more."""

    leases: LeaseIds


# ---- Training --------------------------------------------------------------------------------------------------------


class NextBatch(Message):
    """The trainer, at this policy version, wants its next batch."""

    version: Count


class Waiting(Message):
    """There is no batch yet.

    Attributes:
        role: who has to move.
        reason: "samples" when too few are finished, "deadline" when unfinished ones hold the step back.
        numbers: the samples waited for, or the first of them.
        finished: samples that are scored and in no batch.
        seconds: since the trainer began to wait.
    """

    role: Literal["rollout", "teacher"]
    reason: Literal["samples", "deadline"]
    numbers: Annotated[list[Count], Meta(max_length=64)]
    finished: Count
    seconds: Seconds


class BatchItem(Item):
    """A sample to be trained: its Trajectory is in `stores[answer_store]` of the message under `answer`, its scores are
    in `stores[scores_store]` under `scores`."""

    number: Count
    answer_store: Count
    answer: LeaseId
    scores_store: Count
    scores: LeaseId
    num_tokens: Count


class BatchAssignment(Message):
    """The batch of the step at `version`.

    Attributes:
        version: the policy version that the step starts from.
        min_version: tokens of an older version get weight 0.
        stores: what the items refer to.
        ranks: `ranks[r]` is what data-parallel rank r fetches, in that order.
        probe_gaps: the newest `EngineVersion.probe_gap` of each engine.
    """

    version: Count
    min_version: Count
    stores: Stores
    ranks: Annotated[list[Annotated[list[BatchItem], Meta(max_length=MAX_ITEMS)]], Meta(max_length=MAX_ITEMS)]
    probe_gaps: Annotated[list[Nats], Meta(max_length=MAX_ITEMS)] = []


class BatchTrained(Message):
    """The step at `version` is done: its samples are trained and policy version `version + 1` exists."""

    version: Count


class NewVersion(Message):
    """From the trainer, and on to every rollout worker: policy version `version` exists.

    Attributes:
        store: where its manifest is fetched (`weights/manifest.py`), which says how its weights are.
    """

    version: Count
    store: Address


class CutRequest(Message):
    """The trainer asks for the schedule's part of a checkpoint, as it was at the end of the last trained step."""


class Cut(Message):
    """The schedule's snapshot lies in the conductor's store, as JSON text, until the next cut.

    Attributes:
        store: the conductor's.
        key: of the payload.
    """

    store: Address
    key: LeaseId


class BatchReturned(Message):
    """The batch of the step at `version` could not be fetched whole; PayloadLost has told what is missing."""

    version: Count
    reason: Text


class ReportRequest(Message):
    """Asks the conductor who does what and who waits for whom."""


class Report(Message):
    """The schedule at one moment, as the conductor's report puts it in JSON values."""

    report: dict[str, Any]


AnyMessage = (
    Hello
    | Welcome
    | Refused
    | Heartbeat
    | Goodbye
    | Stop
    | EngineVersion
    | EngineFailed
    | WantSamples
    | SampleLeases
    | RolloutDone
    | LeasesReturned
    | LeasesCancelled
    | WantScoring
    | ScoringLeases
    | ScoringDone
    | PayloadLost
    | Release
    | NextBatch
    | Waiting
    | BatchAssignment
    | BatchTrained
    | NewVersion
    | CutRequest
    | Cut
    | BatchReturned
    | ReportRequest
    | Report
)

_ANYBODY = (Heartbeat, Goodbye, ReportRequest)
FROM_ROLE: dict[str, tuple[type[Message], ...]] = {
    "rollout": (*_ANYBODY, EngineVersion, EngineFailed, WantSamples, RolloutDone, LeasesReturned),
    "teacher": (*_ANYBODY, WantScoring, ScoringDone, LeasesReturned, PayloadLost),
    "trainer": (*_ANYBODY, NextBatch, BatchTrained, NewVersion, CutRequest, BatchReturned, PayloadLost),
}
_ANYONE_HEARS = (Welcome, Refused, Heartbeat, Stop, Report)
TO_ROLE: dict[str, tuple[type[Message], ...]] = {
    "rollout": (*_ANYONE_HEARS, SampleLeases, LeasesCancelled, Release, NewVersion),
    "teacher": (*_ANYONE_HEARS, ScoringLeases, LeasesCancelled, Release),
    "trainer": (*_ANYONE_HEARS, BatchAssignment, Waiting, Cut),
}
