"""The conductor at work: what comes in by the channel goes to the `Conductor`, what it decides goes out.

Headers only. A payload is named by the worker that has it and the lease that it was made for.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from titan_opd.channel import Address, ChannelError, ConductorPort, Event, Joined, Left, PayloadStore, Said
from titan_opd.channel import messages as wire
from titan_opd.observe import trace
from titan_opd.schedule.conductor import Conductor
from titan_opd.schedule.headers import CHECKPOINT, AnswerHeader, Batch, BatchEntry, Waiting
from titan_opd.schedule.pool import Stage

logger = logging.getLogger(__name__)
TRAINER = "trainer"  # its name on the channel
_POLL_SECONDS = 0.05
_WAITING_SECONDS = 1.0  # between two words to a trainer that waits
_LEASES_A_MESSAGE = 512
_GOODBYE_SECONDS = 3.0  # at the end, for workers in the middle of a step
_COUNT_SECONDS = 0.1  # between two entries of the queues' lengths in the trace


@dataclass(frozen=True)
class JsonText:
    """A JSON text as a payload.

    Attributes:
        text: [bytes] uint8, UTF-8.
    """

    text: Tensor

    @classmethod
    def of(cls, value: object) -> JsonText:
        return cls(torch.tensor(list(json.dumps(value).encode()), dtype=torch.uint8))

    def value(self) -> object:
        return json.loads(bytes(self.text.tolist()))


def payload_name(worker: str, lease: str) -> str:
    """The `where` of a payload: who has it, and under which lease."""
    return f"{worker}/{lease}"


def split_payload_name(where: str) -> tuple[str, str]:
    """The worker and the lease of a payload's name."""
    worker, _, lease = where.partition("/")
    return worker, lease


def checkpoint_keys(number: int) -> tuple[str, str]:
    """Under which keys the trainer's store has the answer and the scores of a sample that a checkpoint kept."""
    return f"answer-{number}", f"scores-{number}"


class ConductorService:
    """Serves a `Conductor` to the workers and the trainer; for one thread.

    Args:
        port: where they dial in.
        conductor: decides.
        prompt_indices: of each prompt's id, its place among the prompts as they were read.
        num_ranks: data-parallel ranks of the trainer.
        lease_seconds: a worker whose loop has done nothing for longer while it holds leases loses them.
        store: for snapshots.
    """

    def __init__(
        self,
        port: ConductorPort,
        conductor: Conductor,
        *,
        prompt_indices: Mapping[str, int],
        num_ranks: int,
        lease_seconds: float,
        store: PayloadStore,
    ) -> None:
        self._port = port
        self._conductor = conductor
        self._prompt_indices = prompt_indices
        self._num_ranks = num_ranks
        self._lease_seconds = lease_seconds
        self._store = store
        self._stores: dict[str, Address] = {}
        self._room: dict[str, int] = {}  # how many leases a worker has asked for and not got yet
        self._wanted: int | None = None  # the version whose batch the trainer waits for
        self._next_word = self._next_count = 0.0
        self._newest: wire.NewVersion | None = None
        self._probe_gaps: dict[str, float] = {}  # of each engine, after its last update
        self._num_cuts = 0
        self._num_answers = 0
        self._handlers = {
            wire.Heartbeat: self._heartbeat,
            wire.WantSamples: self._want,
            wire.WantScoring: self._want,
            wire.EngineVersion: self._engine_version,
            wire.EngineFailed: self._engine_failed,
            wire.RolloutDone: self._rollout_done,
            wire.ScoringDone: self._scoring_done,
            wire.LeasesReturned: self._leases_returned,
            wire.PayloadLost: self._payload_lost,
            wire.NextBatch: self._next_batch,
            wire.BatchTrained: self._batch_trained,
            wire.BatchReturned: self._batch_returned,
            wire.NewVersion: self._new_version,
            wire.CutRequest: self._cut,
            wire.ReportRequest: self._report,
        }

    def run(self, stop: threading.Event) -> None:
        """Serve until `stop` is set or the trainer leaves; then tell all to stop."""
        reason = "the run has ended"
        try:
            while not stop.is_set():
                event = self._port.receive(_POLL_SECONDS)
                if event is not None:
                    if isinstance(event, Left) and event.name == TRAINER:
                        reason = f"the trainer has left: {event.reason}"
                        break
                    self._take(event)
                self._serve()
        except BaseException as error:
            reason = f"the conductor failed: {type(error).__name__}: {error}"
            raise
        finally:
            self._stop_all(reason)
            counters = self._port.counters
            logger.info(
                "headers of %d answers: %d bytes came in, %d went out",
                self._num_answers,
                counters["bytes_received"],
                counters["bytes_sent"],
            )
            self._port.close()
            self._store.close()

    def _stop_all(self, reason: str) -> None:
        """Tell all to stop, and stay until they have said goodbye: who is cut off before takes it for an accident."""
        for name in list(self._port.peers):
            self._port.send(name, wire.Stop(reason[:2000]))
        end = time.monotonic() + _GOODBYE_SECONDS
        while self._port.peers and time.monotonic() < end:
            self._port.receive(_POLL_SECONDS)

    def _take(self, event: Event) -> None:
        now = time.monotonic()
        match event:
            case Joined(name, hello):
                logger.info("%s (%s) has joined", name, hello.role)
                if hello.store is not None:
                    self._stores[name] = hello.store
                if hello.role != "trainer":
                    self._conductor.register(name, hello.role, now, teachers=hello.teachers or ("default",))
                if hello.role == "rollout" and self._newest is not None:
                    self._port.send(name, self._newest)
            case Left(name, reason):
                self._probe_gaps.pop(name, None)
                logger.info("%s has left (%s)", name, reason)
                self._room.pop(name, None)
                self._conductor.worker_lost(name)
            case Said(name, message):
                try:
                    self._handlers[type(message)](name, message, now)
                except ValueError as error:  # what it says cannot be: its own fault, and nobody else's
                    logger.warning("refused %s of %s: %s", type(message).__name__, name, error)
                    self._port.send(name, wire.Refused(str(error)[:2000]))

    # ---- Workers -----------------------------------------------------------------------------------------------------

    def _heartbeat(self, name: str, message: wire.Heartbeat, now: float) -> None:
        if self._port.peers[name].role == "trainer":
            return
        if message.idle_seconds > self._lease_seconds:
            held = [lease for worker in self._conductor.workers if worker.name == name for lease in worker.leases]
            if held:
                logger.warning(
                    "%s has done nothing for %.0f s: its %d leases go to others", name, message.idle_seconds, len(held)
                )
                self._conductor.give_back(name, held)
        cancelled = self._conductor.heartbeat(name, now).cancelled
        if cancelled:
            self._port.send(name, wire.LeasesCancelled(list(cancelled)))

    def _want(self, name: str, message: wire.WantSamples | wire.WantScoring, now: float) -> None:
        self._room[name] = message.capacity

    def _engine_version(self, name: str, message: wire.EngineVersion, now: float) -> None:
        self._conductor.engine_at(name, message.version)
        if message.probe_gap is not None:
            self._probe_gaps[name] = message.probe_gap

    def _engine_failed(self, name: str, message: wire.EngineFailed, now: float) -> None:
        logger.warning("%s: its weight update failed: %s", name, message.reason)
        self._conductor.engine_failed(name)

    def _rollout_done(self, name: str, message: wire.RolloutDone, now: float) -> None:
        header = AnswerHeader(
            message.first_version, message.last_version, message.num_tokens, payload_name(name, message.lease)
        )
        self._num_answers += 1
        if not self._conductor.rollout_done(name, message.lease, header, now):
            self._port.send(name, wire.Release([message.lease]))

    def _scoring_done(self, name: str, message: wire.ScoringDone, now: float) -> None:
        if not self._conductor.scoring_done(name, message.lease, payload_name(name, message.lease), now):
            self._port.send(name, wire.Release([message.lease]))

    def _leases_returned(self, name: str, message: wire.LeasesReturned, now: float) -> None:
        logger.warning("%s returns %d leases: %s", name, len(message.leases), message.reason)
        self._conductor.give_back(name, message.leases)

    def _payload_lost(self, name: str, message: wire.PayloadLost, now: float) -> None:
        logger.warning("%s could not fetch payload %s: %s", name, message.lease, message.reason)
        self._conductor.payload_lost(message.lease)

    # ---- The trainer -------------------------------------------------------------------------------------------------

    def _next_batch(self, name: str, message: wire.NextBatch, now: float) -> None:
        self._wanted, self._next_word = message.version, now + _WAITING_SECONDS

    def _batch_trained(self, name: str, message: wire.BatchTrained, now: float) -> None:
        releases: dict[str, list[str]] = {}
        for release in self._conductor.batch_trained(message.version):
            releases.setdefault(release.worker, []).append(release.lease)
        for worker, leases in releases.items():
            for first in range(0, len(leases), wire.MAX_ITEMS):
                self._port.send(worker, wire.Release(leases[first : first + wire.MAX_ITEMS]))

    def _batch_returned(self, name: str, message: wire.BatchReturned, now: float) -> None:
        logger.warning("the batch of version %d comes back: %s", message.version, message.reason)
        self._conductor.return_batch(message.version)

    def _new_version(self, name: str, message: wire.NewVersion, now: float) -> None:
        self._newest = message
        for worker, hello in self._port.peers.items():
            if hello.role == "rollout":
                self._port.send(worker, message)

    def _cut(self, name: str, message: wire.CutRequest, now: float) -> None:
        self._store.release([f"cut-{self._num_cuts}"])
        self._num_cuts += 1
        key = f"cut-{self._num_cuts}"
        stores = {worker: [address.endpoint, address.public_key] for worker, address in self._stores.items()}
        told = {"schedule": self._conductor.snapshot(), "stores": stores}
        self._store.put(key, JsonText.of(told), timeout=0.0)
        self._port.send(name, wire.Cut(self._store.address, key))

    def _report(self, name: str, message: wire.ReportRequest, now: float) -> None:
        self._port.send(name, wire.Report(self._conductor.report(now).as_dict()))

    # ---- What is due -------------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        """Hand out what can be handed out now."""
        now = time.monotonic()
        if now >= self._next_count:
            self._next_count = now + _COUNT_SECONDS
            trace.counter("queue", **{stage.value: len(self._conductor.pool.at(stage)) for stage in Stage})
        self._answer_trainer(now)  # first: a batch that goes makes room, and nobody waits any more
        for name in list(self._room):
            self._lease(name, now)

    def _answer_trainer(self, now: float) -> None:
        """The batch that the trainer waits for, or, from time to time, what it waits for."""
        if self._wanted is None:
            return
        try:
            result = self._conductor.next_batch(self._wanted, now)
        except ValueError as error:
            self._wanted = None
            self._port.send(TRAINER, wire.Refused(str(error)[:2000]))
            return
        if isinstance(result, Batch):
            self._wanted = None
            self._port.send(TRAINER, self._assignment(result))
        elif now >= self._next_word:
            self._next_word = now + _WAITING_SECONDS
            self._port.send(TRAINER, _waiting(result, now))

    def _lease(self, name: str, now: float) -> None:
        hello = self._port.peers.get(name)
        if hello is None:
            return
        room = min(self._room[name], _LEASES_A_MESSAGE)
        if hello.role == "rollout":
            samples = self._conductor.lease_rollout(name, room, now)
            message: wire.Message = wire.SampleLeases(
                [
                    wire.SampleLease(
                        lease.id,
                        lease.sample.number,
                        lease.sample.epoch,
                        lease.sample.repeat,
                        self._prompt_indices[lease.sample.prompt.id],
                        lease.version,
                    )
                    for lease in samples
                ]
            )
            num_leases = len(samples)
        else:
            if self._wanted is None and len(self._conductor.pool.at(Stage.WRITTEN)) < room:
                return  # the trainer does not wait, and scores are cheaper by the group
            answers = self._conductor.lease_scoring(name, room, now)
            stores = _StoreList(self)
            leases = []
            for lease in answers:
                store, key = stores.find(lease.answer.where)
                leases.append(wire.ScoringLease(lease.id, lease.sample.number, store, key, lease.answer.num_tokens))
            message, num_leases = wire.ScoringLeases(stores.addresses, leases), len(answers)
        if num_leases:
            self._room[name] -= num_leases
            if not self._room[name]:
                del self._room[name]
            self._port.send(name, message)

    def _assignment(self, batch: Batch) -> wire.BatchAssignment:
        stores = _StoreList(self)

        def item(entry: BatchEntry) -> wire.BatchItem:
            number = entry.sample.number
            if entry.scores_where == CHECKPOINT:
                store = stores.index(TRAINER)
                answer, scores = checkpoint_keys(number)
                return wire.BatchItem(number, store, answer, store, scores, entry.answer.num_tokens)
            answer_store, answer = stores.find(entry.answer.where)
            scores_store, scores = stores.find(entry.scores_where)
            return wire.BatchItem(number, answer_store, answer, scores_store, scores, entry.answer.num_tokens)

        shares = [batch.share(rank, self._num_ranks) for rank in range(self._num_ranks)]
        ranks = [[item(entry) for entry in share] for share in shares]
        gaps = list(self._probe_gaps.values())
        return wire.BatchAssignment(batch.version, max(0, batch.min_version), stores.addresses, ranks, gaps)

    def store_of(self, worker: str) -> Address:
        """Where a worker's payloads are fetched; its last known address if it has just left."""
        try:
            return self._stores[worker]
        except KeyError:
            raise ChannelError(f"{worker} has produced something and named no store", sender=worker) from None


class _StoreList:
    """The stores that a message refers to, each once."""

    def __init__(self, service: ConductorService) -> None:
        self.addresses: list[Address] = []
        self._service = service
        self._indices: dict[str, int] = {}

    def index(self, worker: str) -> int:
        if worker not in self._indices:
            self._indices[worker] = len(self.addresses)
            self.addresses.append(self._service.store_of(worker))
        return self._indices[worker]

    def find(self, where: str) -> tuple[int, str]:
        """The index of the store, and the key there, of a payload's name."""
        worker, lease = split_payload_name(where)
        return self.index(worker), lease


def _waiting(waiting: Waiting, now: float) -> wire.Waiting:
    return wire.Waiting(
        waiting.role, waiting.reason, list(waiting.numbers[:64]), waiting.finished, max(0.0, now - waiting.since)
    )
