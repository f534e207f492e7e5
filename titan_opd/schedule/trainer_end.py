"""The trainer's end of a schedule with workers: asks for batches, fetches them, publishes weights, takes the cut."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from titan_opd.channel import Address, ChannelError, PayloadFetcher, PayloadStore, WorkerPort
from titan_opd.channel import messages as wire
from titan_opd.channel.wire import decode, encode
from titan_opd.data.records import ScoredTrajectory, Trajectory
from titan_opd.losses import TeacherScores
from titan_opd.observe import PhaseClock
from titan_opd.parallel import World
from titan_opd.schedule.headers import CHECKPOINT
from titan_opd.schedule.service import JsonText, checkpoint_keys, split_payload_name
from titan_opd.weights.gap import gap_metrics
from titan_opd.weights.manifest import Probe
from titan_opd.weights.publisher import WeightPublisher

_FETCH_SECONDS = 120.0
_ANSWER_SECONDS = 120.0  # for an answer of the conductor that it gives at once


@dataclass(frozen=True)
class TrainerLink:
    """What only the trainer's main process has.

    Attributes:
        port: the connection to the conductor.
        weights: holds the published versions' manifests, and their bytes for engines without a faster way to them.
        kept: holds the finished samples of the checkpoint that the run went on from.
    """

    port: WorkerPort
    weights: PayloadStore
    kept: PayloadStore


@dataclass(frozen=True)
class ScheduleCut:
    """The schedule's part of a checkpoint.

    Attributes:
        state: of `Conductor.snapshot`.
        samples: the finished, untrained samples that could be fetched, by number.
    """

    state: dict[str, Any]
    samples: dict[int, ScoredTrajectory]


class WorkerSchedule:
    """Hands out one batch of scored answers per policy version, written and scored by workers.

    All processes of the trainer make the same calls in the same order.

    Args:
        link: in the main process; None in the others.
        fetcher: fetches this process's share of a batch from those who made it.
        publisher: keeps the new weights for the engines.
        probe: makes what the engines compare themselves with; None: they do not.
        teacher_weight: [V, H_t] the output projection that dense scores are made with; None for sparse ones.
        check: called while the trainer waits; raises when a worker process is beyond help.
        ask_report: asks the conductor who waits for whom, from any thread.
        clock, world: of the run.
    """

    def __init__(
        self,
        link: TrainerLink | None,
        fetcher: PayloadFetcher,
        publisher: WeightPublisher,
        *,
        probe: Callable[[], Probe] | None,
        teacher_weight: Tensor | None,
        check: Callable[[], None],
        ask_report: Callable[[], dict[str, Any]],
        clock: PhaseClock,
        world: World,
    ) -> None:
        self._from_checkpoint: list[str] = []  # payloads of the present batch that the checkpoint kept
        self._probe_gaps: list[float] = []  # of the engines, when the present batch was made
        self._link = link
        self._fetcher = fetcher
        self._publisher = publisher
        self._probe = probe
        self._teacher_weight = teacher_weight
        self._check = check
        self._ask_report = ask_report
        self._clock = clock
        self._world = world

    # ---- Training ----------------------------------------------------------------------------------------------------

    def next_batch(self, version: int) -> list[ScoredTrajectory]:
        """This process's share of the batch that the step at `version` trains, in the order of the samples' numbers.

        Tokens older than the bound have weight 0 (`on_limit = "mask"`). A batch of which something was lost goes back,
        and another one comes.

        Raises:
            ChannelError: the conductor is gone.
        """
        while True:
            with self._clock.phase("wait"):
                assignment = self._shared(lambda: self._ask(version))
            with self._clock.phase("fetch"):
                batch, lost = self._fetch(assignment)
                all_lost = list(dict.fromkeys(one for share in self._world.gather(lost) for one in share))
            if not all_lost:
                self._probe_gaps = assignment.probe_gaps
                self._from_checkpoint = self._keys_of_checkpoint(assignment)
                self._clock.count_tokens("rollout", sum(len(one.trajectory.response_ids) for one in batch))
                return batch
            if self._link is not None:
                for lease, reason in all_lost:
                    self._link.port.send(wire.PayloadLost(lease, reason[:2000]))
                self._link.port.send(wire.BatchReturned(version, all_lost[0][1][:2000]))

    def _ask(self, version: int) -> wire.BatchAssignment:
        assert self._link is not None
        self._link.port.send(wire.NextBatch(version))
        while True:
            self._check()
            message = self._link.port.receive(0.2)
            if isinstance(message, wire.BatchAssignment):
                return message
            self._check_stop(message)

    def _keys_of_checkpoint(self, assignment: wire.BatchAssignment) -> list[str]:
        """The payloads of the batch that the checkpoint kept, in the main process."""
        if self._link is None:
            return []
        items = [item for share in assignment.ranks for item in share]
        kept = [item for item in items if assignment.stores[item.scores_store] == self._link.kept.address]
        return [key for item in kept for key in (item.answer, item.scores)]

    def _fetch(self, assignment: wire.BatchAssignment) -> tuple[list[ScoredTrajectory], list[tuple[str, str]]]:
        """This process's share, and what is lost of it: the lease of each payload and why."""
        batch: list[ScoredTrajectory] = []
        lost: list[tuple[str, str]] = []
        for item in assignment.ranks[self._world.dp_rank]:
            try:
                answer_store, scores_store = assignment.stores[item.answer_store], assignment.stores[item.scores_store]
                one = self._fetch_sample(answer_store, item.answer, scores_store, item.scores, lost)
            except ChannelError:
                continue
            batch.append(replace(one, oldest_version=assignment.min_version))
        return batch, lost

    def _fetch_sample(
        self, answer_store: Address, answer: str, scores_store: Address, scores: str, lost: list[tuple[str, str]]
    ) -> ScoredTrajectory:
        def fetch(store: Address, key: str, record_type: type) -> Any:
            try:
                return self._fetcher.fetch(store, key, record_type, timeout=_FETCH_SECONDS)
            except ChannelError as error:
                lost.append((key, str(error)))
                raise

        trajectory = fetch(answer_store, answer, Trajectory)
        teacher = fetch(scores_store, scores, TeacherScores)
        if teacher.hidden is not None:
            teacher = replace(teacher, lm_head_weight=self._teacher_weight)
        return ScoredTrajectory(trajectory, teacher)

    def publish(self, version: int, *, trained: bool = True) -> dict[str, float]:
        """The step is done: give the engines the weights of `version`.

        Args:
            version: the new one.
            trained: False for the version that a run begins with, which no step has made.

        Returns:
            Of the main process: how much of the weights changed, where that was found out (`weights.delta`), and the
            probe's gap at the engines after the last update that each took.
        """
        self._publisher.publish(version, probe=None if self._probe is None else self._probe())
        if self._link is not None:
            if trained:
                self._link.kept.release(self._from_checkpoint)
                self._link.port.send(wire.BatchTrained(version - 1))
            self._link.port.send(wire.NewVersion(version, self._link.weights.address))
        return {**self._publisher.metrics, **gap_metrics(self._probe_gaps)}

    # ---- The cut -----------------------------------------------------------------------------------------------------

    def cut(self) -> ScheduleCut | None:
        """The schedule at the end of the last trained step, in the main process; None in the others.

        A finished sample whose payload has just been lost with its worker is left out: it starts anew.
        """
        if self._link is None:
            return None
        self._link.port.send(wire.CutRequest())
        cut = self._await(wire.Cut)
        told = self._fetcher.fetch(cut.store, cut.key, JsonText, timeout=_FETCH_SECONDS).value()
        stores = {name: Address(*address) for name, address in told["stores"].items()}
        samples = {}
        for finished in told["schedule"]["scored"]:
            number = finished["number"]
            places = self._places(number, finished["where"], finished["scores_where"], stores)
            with contextlib.suppress(ChannelError):
                samples[number] = self._fetch_sample(*places, [])
        return ScheduleCut(told["schedule"], samples)

    def _places(
        self, number: int, answer: str, scores: str, stores: dict[str, Address]
    ) -> tuple[Address, str, Address, str]:
        """The stores and keys of a finished sample's answer and scores."""
        assert self._link is not None
        if scores == CHECKPOINT:
            answer_key, scores_key = checkpoint_keys(number)
            return self._link.kept.address, answer_key, self._link.kept.address, scores_key
        (writer, answer_lease), (scorer, scores_lease) = split_payload_name(answer), split_payload_name(scores)
        return stores[writer], answer_lease, stores[scorer], scores_lease

    def _await(self, kind: type[wire.Message]) -> Any:
        assert self._link is not None
        end = time.monotonic() + _ANSWER_SECONDS
        while time.monotonic() < end:
            message = self._link.port.receive(0.2)
            if isinstance(message, kind):
                return message
            self._check_stop(message)
        raise ChannelError(f"no {kind.__name__} within {_ANSWER_SECONDS:g} s", sender="conductor")

    def report(self) -> dict[str, Any]:
        """Who does what and who waits for whom."""
        return self._ask_report()

    def _check_stop(self, message: wire.Message | None) -> None:
        """Raise when the conductor says Stop; all else that comes while something is awaited is of no use."""
        if isinstance(message, wire.Stop):
            self._check()  # why it says so
            raise ChannelError(f"it says Stop: {message.reason}", sender="conductor")

    def _shared(self, action: Callable[[], wire.Message]) -> Any:
        """What `action` returns in the main process, in all of them; an error there is one everywhere."""
        result: bytes | str = ""
        if self._link is not None:
            try:
                result = encode(action())
            except (ChannelError, ValueError) as error:
                result = str(error)
        frame = self._world.gather(result)[0]
        if isinstance(frame, str):
            raise ChannelError(frame)
        return decode([frame], "the main process")
