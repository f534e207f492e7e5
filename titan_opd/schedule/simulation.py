"""The real Conductor on a virtual clock: what a schedule would make of a cluster, before it is rented.

The roles are reduced to speeds. A rollout device writes n answers at the same time, one token of each in
`decode_seconds + n * decode_seconds_per_row`; a scorer reads and a trainer trains at so many tokens a second and
device; new weights take a while to arrive and stop an engine while they are written. Lengths are lognormal with a
limit. Prompts, networks and failures cost nothing here.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from titan_opd.data.records import Prompt, Sample
from titan_opd.schedule.conductor import Conductor
from titan_opd.schedule.headers import AnswerHeader, Batch
from titan_opd.schedule.pool import Stage
from titan_opd.schedule.rules import ScheduleRules
from titan_opd.schedule.simulated_engine import SimulatedEngine

ANSWERS_PER_SCORING = 8


@dataclass(frozen=True)
class Cluster:
    """Speeds and sizes.

    Attributes:
        num_rollout, num_trainer, num_teacher: devices of each role; 0 teachers: the trainer's devices score too, and do
            one thing at a time.
        slots: answers that a rollout device writes at the same time.
        decode_seconds, decode_seconds_per_row: of one token of every running answer.
        score_tokens_per_second, train_tokens_per_second: of one device.
        update_seconds: from a step's end until an engine has the new version.
        pause_seconds: the part of it during which the engine stands still.
        median_length, length_sigma, max_length: response tokens; exp(normal) with this median and standard deviation
            of the logarithm, cut off at the limit.
        seed: of the lengths; sample n has the same length in every schedule.
    """

    num_rollout: int = 4
    num_trainer: int = 3
    num_teacher: int = 1
    slots: int = 64
    decode_seconds: float = 0.009
    decode_seconds_per_row: float = 0.00015
    score_tokens_per_second: float = 14_000.0
    train_tokens_per_second: float = 6_000.0
    update_seconds: float = 4.0
    pause_seconds: float = 1.0
    median_length: float = 4_000.0
    length_sigma: float = 0.8
    max_length: int = 16_384
    seed: int = 0

    def length(self, number: int) -> int:
        """Response tokens of sample `number`."""
        normal = random.Random(f"{self.seed}:{number}").normalvariate(0.0, 1.0)
        tokens = self.median_length * 2.718281828459045 ** (self.length_sigma * normal)
        return max(1, min(self.max_length, round(tokens)))


@dataclass(frozen=True)
class Outcome:
    """What came of it, from the end of the warm-up steps to the end of the last.

    Attributes:
        tokens_per_second: trained response tokens over time.
        seconds_per_step: time over steps.
        rollout_busy: share of time in which an engine writes, mean over engines.
        rollout_rows: answers written at the same time by an engine, mean over time and engines.
        teacher_busy, trainer_busy: share of time in which scoring and training run, mean over devices that do it.
        staleness: {versions: share of the trained tokens}.
        mean_staleness: in versions, over tokens.
        dropped, restarted, masked: samples, of the whole run.
    """

    tokens_per_second: float
    seconds_per_step: float
    rollout_busy: float
    rollout_rows: float
    teacher_busy: float
    trainer_busy: float
    staleness: dict[int, float]
    mean_staleness: float
    dropped: int
    restarted: int
    masked: int


class _Numbers:
    """An endless stream of samples that are only numbers."""

    def __init__(self) -> None:
        self._next_number = 0
        self._prompt = Prompt("any", torch.zeros(1, dtype=torch.int64))

    def take(self, count: int) -> list[Sample]:
        first = self._next_number
        self._next_number += count
        return [Sample(number, 0, 0, self._prompt) for number in range(first, first + count)]

    def state_dict(self) -> dict[str, Any]:
        return {"next_number": self._next_number}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._next_number = state["next_number"]


def simulate(
    cluster: Cluster, rules: ScheduleRules, *, steps: int, warmup: int, phases_overlap: bool = True
) -> Outcome:
    """Run `steps` steps and report on those after the first `warmup`.

    Args:
        cluster: speeds and sizes.
        rules: the schedule.
        steps, warmup: policy versions; the warm-up is left out of the outcome.
        phases_overlap: False scores a batch only when all its answers are written, as the synchronous schedule does.
    """
    if not 0 <= warmup < steps:
        raise ValueError(f"warmup = {warmup} of steps = {steps} leaves nothing to measure; it has to be smaller")
    return _Simulation(cluster, rules, phases_overlap).run(steps, warmup)


class _Simulation:
    def __init__(self, cluster: Cluster, rules: ScheduleRules, phases_overlap: bool) -> None:
        self._cluster, self._rules, self._phases_overlap = cluster, rules, phases_overlap
        self._now = 0.0
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._serial = itertools.count()
        self._conductor = Conductor(rules, _Numbers(), lease_seconds=float("inf"), incarnation="")
        self._engines = [
            SimulatedEngine(f"rollout-{i}", cluster.slots, cluster.decode_seconds, cluster.decode_seconds_per_row)
            for i in range(cluster.num_rollout)
        ]
        for engine in self._engines:
            self._conductor.register(engine.name, "rollout", 0.0)
            self._conductor.engine_at(engine.name, 0)
        # Trainer devices score with all hands, so they are one fast teacher.
        self._teachers = {f"teacher-{i}": True for i in range(max(cluster.num_teacher, 1))}  # name -> idle
        for teacher in self._teachers:
            self._conductor.register(teacher, "teacher", 0.0)
        self._training = False
        self._news_for_trainer = False  # whether asking for a batch can lead to anything
        self._answers: dict[int, list[tuple[int, int]]] = {}  # number -> [(version, tokens)]
        self._teacher_seconds = self._trainer_seconds = 0.0
        self._tokens: Counter[int] = Counter()  # staleness -> trained tokens

    @property
    def _beside_trainer(self) -> bool:
        return self._cluster.num_teacher == 0

    def run(self, steps: int, warmup: int) -> Outcome:
        begin = 0.0
        measuring = warmup == 0
        while self._conductor.version < steps:
            self._poll()
            self._now, _, action, args = heapq.heappop(self._events)
            action(*args)
            if not measuring and self._conductor.version == warmup:
                measuring, begin = True, self._now
                self._start_measuring()
        return self._outcome(self._now - begin, steps - warmup)

    def _start_measuring(self) -> None:
        self._tokens.clear()
        self._teacher_seconds = self._trainer_seconds = 0.0
        for engine in self._engines:
            engine.start_measuring(self._now)

    def _outcome(self, seconds: float, steps: int) -> Outcome:
        cluster, counters, num_tokens = self._cluster, self._conductor.counters, sum(self._tokens.values())
        for engine in self._engines:
            engine.advance(self._now)
        return Outcome(
            tokens_per_second=num_tokens / seconds,
            seconds_per_step=seconds / steps,
            rollout_busy=sum(engine.busy_seconds for engine in self._engines) / seconds / cluster.num_rollout,
            rollout_rows=sum(engine.row_seconds for engine in self._engines) / seconds / cluster.num_rollout,
            teacher_busy=self._teacher_seconds / seconds / len(self._teachers),
            trainer_busy=self._trainer_seconds / seconds,
            staleness={stale: tokens / num_tokens for stale, tokens in sorted(self._tokens.items())},
            mean_staleness=sum(stale * tokens for stale, tokens in self._tokens.items()) / num_tokens,
            dropped=counters.dropped,
            restarted=counters.restarted,
            masked=counters.masked,
        )

    def _after(self, seconds: float, action: Callable[..., None], *args: Any) -> None:
        heapq.heappush(self._events, (self._now + seconds, next(self._serial), action, args))

    def _poll(self) -> None:
        """Let everybody who is idle ask for work."""
        scoring_there = self._beside_trainer and not all(self._teachers.values())
        if self._news_for_trainer and not self._training and not scoring_there:
            self._news_for_trainer = False
            self._start_step()
        for engine in self._engines:
            self._start_answers(engine)
        for teacher, idle in self._teachers.items():
            if idle and not (self._beside_trainer and self._training):
                self._start_scoring(teacher)

    # Rollout

    def _start_answers(self, engine: SimulatedEngine) -> None:
        leases = self._conductor.lease_rollout(engine.name, engine.num_free, self._now)
        if leases:
            engine.advance(self._now)
            for lease in leases:
                engine.start(lease.id, lease.sample.number, self._cluster.length(lease.sample.number))
            self._expect_answer(engine)

    def _expect_answer(self, engine: SimulatedEngine) -> None:
        """Foresee the engine's next finished answer; what was foreseen before no longer holds."""
        engine.plan += 1
        seconds = engine.seconds_to_next_answer(self._now)
        if seconds is not None:
            self._after(seconds, self._answer_written, engine, engine.plan)

    def _answer_written(self, engine: SimulatedEngine, plan: int) -> None:
        if plan != engine.plan:
            return
        engine.advance(self._now)
        lease_id, number, pieces = engine.finish()
        tokens = sum(count for _, count in pieces)
        header = AnswerHeader(pieces[0][0], pieces[-1][0], tokens, where=lease_id)
        if self._conductor.rollout_done(engine.name, lease_id, header, self._now):
            self._answers[number] = pieces
        if engine.num_rows == 0 and engine.version < self._conductor.version and self._rules.in_flight == "wait":
            self._after(self._cluster.update_seconds, self._weights_arrived, engine)
        self._expect_answer(engine)

    def _weights_arrived(self, engine: SimulatedEngine) -> None:
        version = self._conductor.version
        if engine.version == version or (self._rules.in_flight == "wait" and engine.num_rows):
            return
        engine.advance(self._now)
        engine.update(version, self._now + self._cluster.pause_seconds)
        self._conductor.engine_at(engine.name, version)
        self._expect_answer(engine)

    # Scoring and training

    def _start_scoring(self, teacher: str) -> None:
        if not self._phases_overlap and len(self._conductor.pool.at(Stage.WRITTEN)) < self._rules.batch:
            return
        capacity = ANSWERS_PER_SCORING if self._phases_overlap else -(-self._rules.batch // len(self._teachers))
        leases = self._conductor.lease_scoring(teacher, capacity, self._now)
        if not leases:
            return
        devices = self._cluster.num_trainer if self._beside_trainer else 1
        seconds = sum(lease.answer.num_tokens for lease in leases) / self._cluster.score_tokens_per_second / devices
        self._teachers[teacher] = False
        self._after(seconds, self._scored, teacher, [lease.id for lease in leases], seconds)

    def _scored(self, teacher: str, lease_ids: list[str], seconds: float) -> None:
        self._teachers[teacher] = self._news_for_trainer = True
        self._teacher_seconds += seconds
        for lease_id in lease_ids:
            self._conductor.scoring_done(teacher, lease_id, lease_id, self._now)

    def _start_step(self) -> None:
        batch = self._conductor.next_batch(self._conductor.version, self._now)
        for engine in self._engines:
            cancelled = self._conductor.heartbeat(engine.name, self._now).cancelled
            if cancelled:
                engine.advance(self._now)
                engine.cancel(cancelled)
                self._expect_answer(engine)
        if isinstance(batch, Batch):
            tokens = sum(entry.answer.num_tokens for entry in batch.entries)
            seconds = tokens / self._cluster.train_tokens_per_second / self._cluster.num_trainer
            self._training = True
            self._after(seconds, self._step_done, batch, seconds)

    def _step_done(self, batch: Batch, seconds: float) -> None:
        self._training, self._news_for_trainer = False, True
        self._trainer_seconds += seconds
        for entry in batch.entries:
            for version, tokens in self._answers.pop(entry.sample.number):
                if version >= batch.min_version:  # the others have weight 0
                    self._tokens[batch.version - version] += tokens
        self._conductor.batch_trained(batch.version)
        for engine in self._engines:
            self._after(self._cluster.update_seconds, self._weights_arrived, engine)
