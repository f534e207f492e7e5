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
