"""The conductor: decides who may write, score and train which sample when.

A deterministic state machine without I/O, threads or a clock: time is an argument, in seconds from any fixed origin.
It moves headers; tokens and scores go from their producers straight to the trainer.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from titan_opd.schedule import composition, cut
from titan_opd.schedule.headers import (
    AnswerHeader,
    Batch,
    Counters,
    Orders,
    Release,
    RolloutLease,
    ScoringLease,
    Waiting,
)
from titan_opd.schedule.pool import Entry, SamplePool, SampleStream, Stage
from titan_opd.schedule.report import Report, make_report
from titan_opd.schedule.rules import ScheduleRules
from titan_opd.schedule.workers import Lease, Worker, Workers


class Conductor:
    """Admission, leases, batch composition and the consistent cut.

    Args:
        rules: the schedule's settings and inequalities.
        stream: where the samples come from; at sample 0 in a new run.
        lease_seconds: a worker that is silent for longer loses its leases and whatever it holds.
        incarnation: a name that no other conductor of this run has had, for example a random one: results that were
            leased by an earlier process are told apart by it.
    """

    def __init__(self, rules: ScheduleRules, stream: SampleStream, *, lease_seconds: float, incarnation: str) -> None:
        if not lease_seconds > 0:
            raise ValueError(f"lease_seconds = {lease_seconds} leaves no time to work; set it to more than 0")
        self.rules = rules
        self.version = 0
        self.counters = Counters()
        self.pool = SamplePool(stream)
        self.workers = Workers(lease_seconds, incarnation)
        self.batch: Batch | None = None
        self.waiting_since: float | None = None

    # Workers

    def register(self, worker: str, role: str, now: float, *, teachers: Sequence[str] = ("default",)) -> None:
        """A worker begins. If one of its name was here, that one is lost: it comes back with empty hands.

        Args:
            worker: its name.
            role: "rollout" or "teacher".
            now: the time.
            teachers: the routes (`Prompt.teacher`) that a teacher scores.
        """
        self.worker_lost(worker)
        self.workers.add(worker, role, teachers, now)

    def heartbeat(self, worker: str, now: float) -> Orders:
        """A sign of life; the reply tells which leases no longer count."""
        return self.workers.heartbeat(worker, now)

    def worker_lost(self, worker: str) -> None:
        """The worker's process is gone, with its leases, the answers it wrote and the scores it holds."""
        if self.workers.remove(worker) is None:
            return
        for entry in list(self.pool):
            if entry.writer == worker:
                entry.writer = None
                self._lose_answer(entry)
            elif entry.scorer == worker:
                entry.scorer = None
                self._lose_scores(entry)

    def payload_lost(self, lease_id: str) -> None:
        """Whoever needs what this lease led to could not fetch it: it is made again. An old lease is passed over."""
        for entry in list(self.pool):
            if lease_id == entry.writer_lease and entry.answer is not None:
                self._lose_answer(entry)
            elif lease_id == entry.scorer_lease and entry.scores_where:
                self._lose_scores(entry)

    def _lose_answer(self, entry: Entry) -> None:
        if entry.stage is Stage.BATCHED:  # perhaps the trainer has it already; `return_batch` tells
            entry.answer_lost = True
        else:
            self.counters.lost += 1
            self._renew(entry)

    def _lose_scores(self, entry: Entry) -> None:
        if entry.stage is Stage.BATCHED:
            entry.scores_lost = True
        else:
            self.counters.lost += 1
            self._score_anew(entry)

    def expire(self, now: float) -> list[str]:
        """Lose the workers that have been silent for longer than `lease_seconds`, and name them."""
        silent = self.workers.silent(now)
        for worker in silent:
            self.worker_lost(worker)
        return silent

    # Engines

    def engine_at(self, worker: str, version: int) -> None:
        """Policy version `version` is complete and verified at this rollout worker's engine.

        Raises:
            ValueError: a version that does not exist yet, or one below what the engine had (it must register anew).
        """
        engine = self.workers.engine(worker)
        if not 0 <= version <= self.version:
            raise ValueError(
                f"engine {worker!r} reports policy version {version}, but the versions made so far are 0 to "
                f"{self.version}; it is not of this run, or of a later part that was lost: start it anew"
            )
        if engine.version is not None and version < engine.version:
            raise ValueError(
                f"engine {worker!r} went back from policy version {engine.version} to {version}; register it anew"
            )
        engine.version = version

    def engine_failed(self, worker: str) -> None:
        """An update broke off half-way: the engine serves nothing until its next verified version."""
        engine = self.workers.engine(worker)
        engine.version = None
        self.give_back(worker, list(engine.leases))

    # Writing and scoring

    def lease_rollout(self, worker: str, capacity: int, now: float) -> list[RolloutLease]:
        """Up to `capacity` samples that the worker's engine may start now, lowest numbers first."""
        engine = self.workers.heard(worker, "rollout", now)
        leases: list[RolloutLease] = []
        while len(leases) < capacity and engine is not None and self.may_start_at(engine):
            assert engine.version is not None
            entry = self.pool.start(engine.version)
            lease = self.workers.lease(engine, entry.number, now)
            entry.writer, entry.writer_lease = worker, lease.id
            leases.append(RolloutLease(lease.id, entry.sample, engine.version))
        return leases

    def may_start_at(self, engine: Worker) -> bool:
        """Whether the next sample may start at this engine."""
        if engine.version is None or (self.rules.in_flight == "wait" and engine.version < self.version):
            return False
        version = self._admission_version(engine.version)
        limit = self.rules.admission_limit(version, self.counters.dropped)
        return self.pool.lowest_unstarted() < limit and self.rules.has_room(
            self.pool.open_counts, version, self.next_step
        )

    def _admission_version(self, engine_version: int) -> int:
        """The version that admission counts with: the one verified at the engine."""
        return engine_version

    @property
    def next_step(self) -> int:
        """The next step whose batch is not composed yet."""
        return self.version + (self.batch is not None)

    def rollout_done(self, worker: str, lease_id: str, answer: AnswerHeader, now: float) -> bool:
        """An answer is written; False when its lease no longer counts: the worker forgets the answer.

        Raises:
            ValueError: versions that this engine cannot have had.
        """
        self.workers.heard(worker, "rollout", now)
        lease = self._valid_lease(worker, lease_id)
        if lease is None:
            self.counters.ignored += 1
            return False
        entry = self.pool[lease.number]
        if not entry.version <= answer.first_version <= answer.last_version <= self.version:
            raise ValueError(
                f"{worker!r} reports tokens of the versions {answer.first_version} to {answer.last_version} for a "
                f"lease at version {entry.version}, and the newest is {self.version}; its engine is not where it was "
                "verified to be"
            )
        self.workers.end(lease)
        self.pool.written(entry, answer)
        return True

    def lease_scoring(self, worker: str, capacity: int, now: float) -> list[ScoringLease]:
        """Up to `capacity` written answers of the worker's routes, earliest deadlines first."""
        teacher = self.workers.heard(worker, "teacher", now)
        if teacher is None:
            return []
        written = [e for e in self.pool.at(Stage.WRITTEN).values() if e.sample.prompt.teacher in teacher.teachers]
        leases = []
        for entry in sorted(written, key=composition.urgency)[: max(capacity, 0)]:
            assert entry.answer is not None
            lease = self.workers.lease(teacher, entry.number, now)
            entry.scorer, entry.scorer_lease = worker, lease.id
            self.pool.move(entry, Stage.SCORING)
            leases.append(ScoringLease(lease.id, entry.sample, entry.answer))
        return leases

    def scoring_done(self, worker: str, lease_id: str, where: str, now: float) -> bool:
        """An answer is scored, the scores can be fetched at `where`; False when the lease no longer counts."""
        self.workers.heard(worker, "teacher", now)
        lease = self._valid_lease(worker, lease_id)
        if lease is None:
            self.counters.ignored += 1
            return False
        entry = self.pool[lease.number]
        self.workers.end(lease)
        entry.scores_where = where
        self.pool.move(entry, Stage.SCORED)
        return True

    def give_back(self, worker: str, lease_ids: Collection[str]) -> None:
        """The worker cannot finish these leases: others may have them. Those that no longer count are passed over."""
        for lease_id in lease_ids:
            lease = self._valid_lease(worker, lease_id)
            if lease is None:
                continue
            self.counters.lost += 1
            self.workers.end(lease)
            entry = self.pool[lease.number]
            if entry.stage is Stage.WRITING:
                self.pool.renew(entry)
            else:
                self.pool.score_anew(entry)

    def _valid_lease(self, worker: str, lease_id: str) -> Lease | None:
        return self.workers.find(worker, lease_id)

    # Training

    def next_batch(self, version: int, now: float) -> Batch | Waiting:
        """The batch of the step at `version`, or what it waits for. Asked again, it hands out the same batch.

        Raises:
            ValueError: `version` is not the current policy version.
        """
        self._check_version(version)
        if self.batch is None:
            chosen = composition.choose(self.rules, self.pool, version)
            blockers: list[Entry] = []
            if len(chosen) == self.rules.batch:
                blockers = composition.blockers(self.rules, self.pool, chosen, version)
            if len(chosen) < self.rules.batch or composition.must_wait(self.rules, blockers):
                if self.waiting_since is None:
                    self.waiting_since = now
                return composition.waiting(self.rules, self.pool, chosen, blockers, version, self.waiting_since)
            self._go_on_without(blockers)
            self.waiting_since = None
            self.batch = composition.compose(self.rules, chosen, version)
            for entry in chosen:
                self.pool.move(entry, Stage.BATCHED)
        return self.batch

    def _go_on_without(self, blockers: Sequence[Entry]) -> None:
        """Write anew or drop the answers that hold the step back; with "mask", let them be late."""
        for entry in blockers:
            if composition.may_restart(self.rules, entry):
                entry.restarted = True
                self.counters.restarted += 1
                self._renew(entry)
            elif self.rules.on_limit == "drop":
                self.counters.dropped += 1
                self._cancel(entry)
                self.pool.remove(entry)

    def _renew(self, entry: Entry) -> None:
        """The sample starts anew."""
        self._cancel(entry)
        self.pool.renew(entry)

    def _score_anew(self, entry: Entry) -> None:
        """The sample keeps its answer and is scored again."""
        self.workers.cancel(entry.scorer, entry.scorer_lease)
        self.pool.score_anew(entry)

    def _cancel(self, entry: Entry) -> None:
        """Whoever works on the sample or holds a part of it is told that it no longer counts."""
        self.workers.cancel(entry.writer, entry.writer_lease)
        self.workers.cancel(entry.scorer, entry.scorer_lease)

    def batch_trained(self, version: int) -> list[Release]:
        """The step at `version` is done, and the policy version rises; returns the payloads that nobody needs anymore.

        Raises:
            ValueError: no batch of that version was handed out.
        """
        batch = self._batch_of(version)
        releases = []
        for trained in batch.entries:
            entry = self.pool[trained.sample.number]
            self.counters.masked += trained.answer.first_version < batch.min_version
            for worker, lease in ((entry.writer, entry.writer_lease), (entry.scorer, entry.scorer_lease)):
                if worker is not None and lease is not None:
                    releases.append(Release(worker, lease))
            self.pool.remove(entry)
        self.batch = None
        self.version += 1
        return releases

    def return_batch(self, version: int) -> None:
        """The trainer could not fetch the whole batch: what is still there may be chosen again, the rest starts anew.

        Raises:
            ValueError: no batch of that version was handed out.
        """
        for returned in self._batch_of(version).entries:
            entry = self.pool[returned.sample.number]
            self.counters.lost += entry.answer_lost or entry.scores_lost
            if entry.answer_lost:
                self._renew(entry)
            elif entry.scores_lost:
                self._score_anew(entry)
            else:
                self.pool.move(entry, Stage.SCORED)
        self.batch = None

    def _batch_of(self, version: int) -> Batch:
        self._check_version(version)
        if self.batch is None:
            raise ValueError(f"no batch of policy version {version} has been handed out; ask for it with next_batch")
        return self.batch

    def _check_version(self, version: int) -> None:
        if version != self.version:
            raise ValueError(
                f"the trainer is at policy version {version} and the schedule at {self.version}; resume both from one "
                "checkpoint"
            )

    # The cut and the watchdog

    def snapshot(self) -> dict[str, Any]:
        """The schedule at the end of the last trained step, ready for JSON; see `cut`."""
        return cut.snapshot(self)

    def restore(self, state: dict[str, Any], *, stored: Collection[int]) -> None:
        """Go on from a snapshot, in a fresh conductor; see `cut`."""
        cut.restore(self, state, stored)

    def report(self, now: float) -> Report:
        """Who does what, and who waits for whom."""
        return make_report(self, now)
