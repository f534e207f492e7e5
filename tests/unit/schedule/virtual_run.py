"""A run on a virtual clock that is as unkind to the real Conductor as a cluster can be.

Workers write and score with random latencies, stall, die with or without notice, and deliver late or twice; engines
get versions late, fail to get them, and report them late; the trainer cannot fetch a batch; the whole run is killed and
resumed from its last checkpoint. What is true is kept here, apart from the conductor: which versions wrote an answer's
tokens, who holds which payload, what the surviving history has trained. `Violation` tells what is not as promised.
"""

from __future__ import annotations

import heapq
import itertools
import json
import random
from collections import Counter
from dataclasses import dataclass, field

from tests.unit.data.make import make_prompt
from titan_opd.data import PromptStream
from titan_opd.schedule import AnswerHeader, Batch, Conductor, ScheduleRules

LEASE_SECONDS = 3.0
TICK = 1.0
LONGEST_ANSWER = 50.0
PATIENCE = 1000.0  # virtual seconds without a step: far above what latencies and faults add up to
PROMPTS = [make_prompt(f"p{i}", [i]) for i in range(5)]
OTHER_TEACHER = [make_prompt(f"q{i}", [i], teacher="other") for i in range(2)]


class Violation(AssertionError):
    """A promise of the schedule is broken."""


@dataclass(frozen=True)
class Scenario:
    """What a run is like; everything else is drawn from `seed`."""

    mode: str = "async"
    on_limit: str = "wait"
    in_flight: str = "keep"
    batch: int = 3
    max_staleness: int = 1
    num_engines: int = 2
    slots: int = 2
    num_teachers: int = 1
    steps: int = 8
    spread: float = 1.0  # of the log of an answer's latency
    step_time: float = 0.5
    update_lag: float = 0.5
    faults: int = 4  # deaths, stalls, failed updates, lost results, kills: all together
    seed: int = 0


@dataclass(eq=False)
class Engine:
    name: str
    slots: int
    version: int
    reported: bool = True
    alive: bool = True
    awake_at: float = 0.0
    writing: dict = field(default_factory=dict)  # lease id -> [number, version of the first token or None]
    held: dict = field(default_factory=dict)  # lease id -> (first version, last version)


@dataclass(eq=False)
class Teacher:
    name: str
    alive: bool = True
    awake_at: float = 0.0
    scoring: dict = field(default_factory=dict)  # lease id -> number
    held: set = field(default_factory=set)


def any_scenario(choose) -> Scenario:
    """A scenario; `choose` picks one of a list, at random or as hypothesis likes."""
    mode = choose(["async", "async", "async", "step_off", "sync"])
    whole_batches = mode != "async"
    return Scenario(
        mode=mode,
        on_limit=choose(["wait"] if whole_batches else ["wait", "mask", "drop"]),
        in_flight=choose(["keep", "wait"] if whole_batches else ["keep", "wait", "restart"]),
        batch=choose([1, 2, 4]),
        max_staleness=0 if mode == "sync" else choose([0, 1, 2, 4]),
        num_engines=choose([1, 2, 4]),
        slots=choose([1, 3]),
        num_teachers=choose([1, 2]),
        steps=choose([4, 8, 16]),
        spread=choose([0.3, 1.0, 3.0]),
        step_time=choose([0.05, 0.5, 2.0]),
        update_lag=choose([0.0, 0.5, 3.0]),
        faults=choose([0, 3, 8]),
        seed=choose(range(2**32)),
    )


def lease_of(scores_where: str) -> str:
    return scores_where.removeprefix("scores of ")


class VirtualRun:
    def __init__(self, scenario: Scenario, *, conductor=Conductor, rules=ScheduleRules):
        self.scenario = scenario
        self.random = random.Random(scenario.seed)
        self._make_conductor, self._make_rules = conductor, rules
        self.now = 0.0
        self._events: list = []
        self._serial = itertools.count()
        self._lives = itertools.count()
        self.faults = scenario.faults
        self.trained: dict[int, int] = {}  # number -> step, in the surviving history
        self.stored: dict[int, tuple[int, int]] = {}  # the checkpoint's payloads: number -> (first, last version)
        self.largest_pool = 0
        self.happened: Counter[str] = Counter()
        self.conductor = self._new_conductor()
        self.checkpoint = self._take_checkpoint()
        self.training: Batch | None = None
        self.last_progress = 0.0
        self.engines = [Engine(f"engine{i}", scenario.slots, 0) for i in range(scenario.num_engines)]
        self.teachers = [Teacher(f"teacher{i}") for i in range(scenario.num_teachers)]
        for worker in (*self.engines, *self.teachers):
            self._register(worker)
        self._after(TICK, self._tick)

    # The loop

    def run(self) -> VirtualRun:
        while self.conductor.version < self.scenario.steps:
            self._poll()
            self.now, _, action, args = heapq.heappop(self._events)
            action(*args)
            if self.now - self.last_progress > PATIENCE:
                raise Violation(f"stuck: {self.conductor.report(self.now)}")
        self._check_numbers()
        self._check_payloads()
        self.happened.update(name for name, count in self.conductor.counters.state_dict().items() if count)
        return self

    def _after(self, delay, action, *args):
        heapq.heappush(self._events, (self.now + delay, next(self._serial), action, args))

    def _poll(self):
        for engine in self.engines:
            if self._is_awake(engine) and len(engine.writing) < engine.slots:
                self._start_answers(engine)
        for teacher in self.teachers:
            if self._is_awake(teacher) and not teacher.scoring:
                for lease in self.conductor.lease_scoring(teacher.name, 2, self.now):
                    teacher.scoring[lease.id] = lease.sample.number
                    self._after(0.2 * self.random.random(), self._scored, teacher, lease.id)
        if self.training is None:
            self._ask_for_batch()
        self.largest_pool = max(self.largest_pool, len(self.conductor.pool))

    def _is_awake(self, worker):
        return worker.alive and worker.awake_at <= self.now

    def _fault(self, probability):
        """Whether something goes wrong now; the number of faults is limited, so that every run can finish."""
        if self.faults > 0 and self.random.random() < probability:
            self.faults -= 1
            return True
        return False

    # Workers

    def _start_answers(self, engine):
        room = engine.slots - len(engine.writing)
        for lease in self.conductor.lease_rollout(engine.name, room, self.now):
            begins_at_once = self.random.random() < 0.7
            engine.writing[lease.id] = [lease.sample.number, engine.version if begins_at_once else None]
            latency = min(self.random.lognormvariate(-0.5, self.scenario.spread), LONGEST_ANSWER)
            self._after(latency, self._written, engine, lease.id)

    def _written(self, engine, lease_id):
        if not engine.alive or lease_id not in engine.writing:
            return
        if engine.awake_at > self.now:  # it delivers when it wakes up
            self._after(engine.awake_at - self.now, self._written, engine, lease_id)
            return
        if self._fault(0.05):
            self._go_wrong(engine)
            return
        number, first = engine.writing.pop(lease_id)
        first = engine.version if first is None else first
        answer = AnswerHeader(first, engine.version, num_tokens=1 + number, where=lease_id)
        if self.conductor.rollout_done(engine.name, lease_id, answer, self.now):
            engine.held[lease_id] = (first, engine.version)
        if self.random.random() < 0.03 and self.conductor.rollout_done(engine.name, lease_id, answer, self.now):
            raise Violation(f"answer {lease_id} was accepted twice")
        self._update_when_empty(engine)

    def _scored(self, teacher, lease_id):
        if not teacher.alive or lease_id not in teacher.scoring:
            return
        if teacher.awake_at > self.now:
            self._after(teacher.awake_at - self.now, self._scored, teacher, lease_id)
            return
        if self._fault(0.05):
            self._go_wrong(teacher)
            return
        del teacher.scoring[lease_id]
        if self.conductor.scoring_done(teacher.name, lease_id, f"scores of {lease_id}", self.now):
            teacher.held.add(lease_id)
        if self.random.random() < 0.03 and self.conductor.scoring_done(teacher.name, lease_id, "again", self.now):
            raise Violation(f"scores {lease_id} were accepted twice")

    def _go_wrong(self, worker):
        kind = self.random.choice(["stall", "death", "silent death", "kill", "give back"])
        self.happened[kind] += 1
        if kind == "stall":
            worker.awake_at = self.now + 2.5 * LEASE_SECONDS * self.random.random()
            for lease_id in worker.writing if isinstance(worker, Engine) else worker.scoring:
                self._after(0.0, self._written if isinstance(worker, Engine) else self._scored, worker, lease_id)
        elif kind == "kill":
            self._kill()
        elif kind == "give back":
            work = worker.writing if isinstance(worker, Engine) else worker.scoring
            self.conductor.give_back(worker.name, list(work))
            work.clear()
            if isinstance(worker, Engine):
                self._update_when_empty(worker)
        else:
            worker.alive = False
            if kind == "death":
                self.conductor.worker_lost(worker.name)
            self._after(2 * LEASE_SECONDS * self.random.random(), self._replace, worker)

    def _replace(self, worker):
        if isinstance(worker, Engine):
            new = Engine(worker.name, worker.slots, self.conductor.version, writing=worker.writing)
            self.engines[self.engines.index(worker)] = new
        else:
            new = Teacher(worker.name)
            self.teachers[self.teachers.index(worker)] = new
        self._register(new)

    def _register(self, worker):
        """The worker begins anew, with empty hands."""
        if isinstance(worker, Teacher):
            worker.scoring, worker.held = {}, set()
            self.conductor.register(worker.name, "teacher", self.now, teachers=("default", "other"))
            return
        for lease_id in worker.writing:
            self._after(self.random.random(), self._deliver_from_former_life, worker.name, lease_id)
        worker.writing, worker.held = {}, {}
        if worker.version > self.conductor.version:  # written by a history that is no more
            worker.version = self.conductor.version
        self.conductor.register(worker.name, "rollout", self.now)
        self.conductor.engine_at(worker.name, worker.version)
        worker.reported = True
        if worker.version < self.conductor.version:
            self._after(self.random.random(), self._update, worker)

    def _deliver_from_former_life(self, name, lease_id):
        """A message that was under way when its worker, or the conductor, was replaced."""
        version = self.conductor.version
        if self.conductor.rollout_done(name, lease_id, AnswerHeader(version, version, 1, lease_id), self.now):
            raise Violation(f"{lease_id} was accepted from a former life of {name}")

    def _tick(self):
        for worker in (*self.engines, *self.teachers):
            if self._is_awake(worker):
                self._heartbeat(worker)
        self.conductor.expire(self.now)
        if self.random.random() < 0.1:
            json.dumps(self.conductor.report(self.now).as_dict())
        self._after(TICK, self._tick)

    def _heartbeat(self, worker):
        orders = self.conductor.heartbeat(worker.name, self.now)
        if not orders.known:
            self._register(worker)
        for lease_id in orders.cancelled:
            if isinstance(worker, Engine):
                worker.writing.pop(lease_id, None)
                worker.held.pop(lease_id, None)
                self._update_when_empty(worker)
            else:
                worker.scoring.pop(lease_id, None)
                worker.held.discard(lease_id)

    # Weights

    def _update(self, engine):
        """The newest version reaches the engine, or fails to."""
        version = self.conductor.version
        if engine not in self.engines or not engine.alive or engine.version >= version:
            return
        if engine.awake_at > self.now:
            self._after(engine.awake_at - self.now, self._update, engine)
            return
        if self.scenario.in_flight == "wait" and engine.writing:
            return  # `_update_when_empty` comes back to it
        if self._fault(0.05):
            self.happened["failed update"] += 1
            if self._is_known(engine):
                self.conductor.engine_failed(engine.name)
                engine.writing.clear()
            self._after(self.random.random(), self._update, engine)
            return
        for work in engine.writing.values():
            if work[1] is None and self.random.random() < 0.5:
                work[1] = engine.version
        engine.version = version
        if self.random.random() < 0.8:
            self._report_version(engine, version)
        else:  # verified a while after the first token was written with it
            self._after(self.random.random(), self._report_version, engine, version)

    def _update_when_empty(self, engine):
        if self.scenario.in_flight == "wait" and not engine.writing:
            self._update(engine)

    def _report_version(self, engine, version):
        if engine in self.engines and engine.alive and self._is_known(engine) and engine.version == version:
            self.conductor.engine_at(engine.name, version)

    def _is_known(self, engine):
        return any(worker.name == engine.name for worker in self.conductor.workers)

    # The trainer

    def _ask_for_batch(self):
        step = self.conductor.version
        batch = self.conductor.next_batch(step, self.now)
        if not isinstance(batch, Batch):
            return
        if not all(self._can_fetch(entry) for entry in batch.entries) or self._fault(0.02):
            if self.random.random() < 0.5:
                entry = self.random.choice(batch.entries)
                self.conductor.payload_lost(self.random.choice([entry.answer.where, lease_of(entry.scores_where)]))
            self.conductor.return_batch(step)
            self.happened["returned batch"] += 1
            return
        self._check_batch(batch, step)
        self.training = batch
        self._after(self.scenario.step_time * (0.5 + self.random.random()), self._step_done, batch)

    def _can_fetch(self, entry):
        where = entry.answer.where
        if where == "checkpoint":
            return entry.sample.number in self.stored
        answer_there = any(engine.alive and where in engine.held for engine in self.engines)
        scores_there = any(t.alive and lease_of(entry.scores_where) in t.held for t in self.teachers)
        return answer_there and scores_there

    def _check_batch(self, batch, step):
        numbers = [entry.sample.number for entry in batch.entries]
        rules = self.conductor.rules
        if len(set(numbers)) != rules.batch or numbers != sorted(numbers):
            raise Violation(f"step {step} has the samples {numbers}")
        if self.trained.keys() & set(numbers):
            raise Violation(f"step {step} trains {sorted(self.trained.keys() & set(numbers))} a second time")
        if rules.mode != "async" and numbers != list(range(step * rules.batch, (step + 1) * rules.batch)):
            raise Violation(f"step {step} of a schedule in whole batches has the samples {numbers}")
        if batch.version != step or batch.min_version != step - rules.max_staleness:
            raise Violation(f"step {step} has the header {batch.version}, {batch.min_version}")
        for entry in batch.entries:
            first, last = self._true_versions(entry)
            if (first, last) != (entry.answer.first_version, entry.answer.last_version):
                raise Violation(f"sample {entry.sample.number} is of {first} to {last}, its header says {entry.answer}")
            if last > step:
                raise Violation(f"sample {entry.sample.number} has a token of version {last} at step {step}")
            if first < batch.min_version and rules.on_limit != "mask":
                raise Violation(f"step {step} trains a token of version {first}")

    def _true_versions(self, entry):
        if entry.answer.where == "checkpoint":
            return self.stored[entry.sample.number]
        return next(e.held[entry.answer.where] for e in self.engines if entry.answer.where in e.held)

    def _step_done(self, batch):
        if self.training is not batch:  # the run was killed meanwhile
            return
        self.training = None
        releases = self.conductor.batch_trained(batch.version)
        for entry in batch.entries:
            self.trained[entry.sample.number] = batch.version
        for release in releases:
            self._forget(release)
        self.last_progress = self.now
        if self.random.random() < 0.4:
            self.checkpoint = self._take_checkpoint()
        for engine in self.engines:
            self._after(self.scenario.update_lag * self.random.random(), self._update, engine)

    def _forget(self, release):
        for worker in (*self.engines, *self.teachers):
            if worker.name == release.worker:
                if isinstance(worker, Engine):
                    worker.held.pop(release.lease, None)
                else:
                    worker.held.discard(release.lease)

    # The cut

    def _new_conductor(self):
        scenario = self.scenario
        rules = self._make_rules(
            batch=scenario.batch,
            max_staleness=scenario.max_staleness,
            mode=scenario.mode,
            on_limit=scenario.on_limit,
            in_flight=scenario.in_flight,
        )
        stream = PromptStream(PROMPTS + OTHER_TEACHER, shuffle=True, seed=1, samples_per_prompt=2)
        return self._make_conductor(rules, stream, lease_seconds=LEASE_SECONDS, incarnation=str(next(self._lives)))

    def _take_checkpoint(self):
        state = self.conductor.snapshot()
        stored = {}
        for finished in state["scored"]:
            number, where = finished["number"], finished["where"]
            holder = next((engine for engine in getattr(self, "engines", ()) if where in engine.held), None)
            if where == "checkpoint" and number in self.stored:
                stored[number] = self.stored[number]
            elif holder is not None and holder.alive:
                stored[number] = holder.held[where]
        return json.dumps(state), dict(self.trained), stored

    def _kill(self):
        """Kill trainer and conductor; workers live on, with results that nobody must take."""
        state, self.trained, self.stored = self.checkpoint[0], dict(self.checkpoint[1]), self.checkpoint[2]
        self.training = None
        self.conductor = self._new_conductor()
        self.conductor.restore(json.loads(state), stored=self.stored.keys())
        self.last_progress = self.now

    # What must be true in the end

    def _check_numbers(self):
        """No sample is lost: each is trained once, dropped and counted, or still to be trained."""
        pool = {entry.number for entry in self.conductor.pool}
        if pool & self.trained.keys():
            raise Violation(f"{sorted(pool & self.trained.keys())} are trained and not yet trained")
        taken = self.conductor.pool.stream_state()["next_number"]
        if len(pool) + len(self.trained) + self.conductor.counters.dropped != taken:
            raise Violation(
                f"of {taken} samples {len(self.trained)} are trained, {len(pool)} are not and "
                f"{self.conductor.counters.dropped} were dropped"
            )
        if len(self.trained) != self.scenario.batch * self.scenario.steps:
            raise Violation(f"{len(self.trained)} samples were trained")
        bound = (self.scenario.max_staleness + 1) * self.scenario.batch
        if self.largest_pool > bound:
            raise Violation(f"{self.largest_pool} samples were held, {bound} are allowed")

    def _check_payloads(self):
        """Workers hold nothing that nobody will ask for."""
        for worker in (*self.engines, *self.teachers):
            if not self._is_awake(worker):
                continue
            self._heartbeat(worker)
            wanted = {entry.writer_lease for entry in self.conductor.pool if entry.writer == worker.name}
            wanted |= {entry.scorer_lease for entry in self.conductor.pool if entry.scorer == worker.name}
            if not set(worker.held) <= wanted:
                raise Violation(f"{worker.name} holds {set(worker.held) - wanted} for nobody")
