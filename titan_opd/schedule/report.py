"""Who does what and who waits for whom: what a watchdog prints when nothing moves."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from titan_opd.schedule import composition
from titan_opd.schedule.headers import Waiting
from titan_opd.schedule.pool import Stage
from titan_opd.schedule.workers import Worker

if TYPE_CHECKING:
    from titan_opd.schedule.conductor import Conductor


@dataclass(frozen=True)
class LeaseReport:
    """One lease and its age in seconds."""

    id: str
    number: int
    age: float


@dataclass(frozen=True)
class WorkerReport:
    """One worker.

    Attributes:
        name, role: as registered.
        version: verified at a rollout worker's engine; None while it serves nothing, and for teachers.
        silent: seconds since it was last heard of.
        leases: what it works on.
        waits_for: without leases, who has to move before it gets one: "trainer" (the next policy version), "weights"
            (a verified update of its engine), "rollout" (an answer to score), or "itself" (there is work; it has to
            ask). Empty with leases.
    """

    name: str
    role: str
    version: int | None
    silent: float
    leases: tuple[LeaseReport, ...]
    waits_for: str


@dataclass(frozen=True)
class Report:
    """The schedule at one moment.

    Attributes:
        version: the current policy version.
        training: whether a batch of it has been handed out.
        waiting: what the next batch waits for; None while one is out, or when one could be had.
        queues: samples by stage.
        missing_roles: roles that have work and no worker; a teacher's route follows a colon.
        workers: all that are registered.
        counters: drops, restarts, losses.
    """

    version: int
    training: bool
    waiting: Waiting | None
    queues: dict[str, int]
    missing_roles: tuple[str, ...]
    workers: tuple[WorkerReport, ...]
    counters: dict[str, Any]

    def as_dict(self) -> dict[str, Any]:
        """The report as JSON values."""
        return asdict(self)


def make_report(conductor: Conductor, now: float) -> Report:
    """The state of `conductor` at time `now`; decides nothing."""
    pool = conductor.pool
    return Report(
        version=conductor.version,
        training=conductor.batch is not None,
        waiting=_waiting(conductor, now),
        queues={stage.value: len(pool.at(stage)) for stage in Stage},
        missing_roles=_missing_roles(conductor),
        workers=tuple(_worker_report(conductor, worker, now) for worker in conductor.workers),
        counters=conductor.counters.state_dict(),
    )


def _waiting(conductor: Conductor, now: float) -> Waiting | None:
    if conductor.batch is not None:
        return None
    rules, pool, step = conductor.rules, conductor.pool, conductor.version
    chosen = composition.choose(rules, pool, step)
    full = len(chosen) == rules.batch
    blockers = composition.blockers(rules, pool, chosen, step) if full else []
    if full and not composition.must_wait(rules, blockers):
        return None
    since = now if conductor.waiting_since is None else conductor.waiting_since
    return composition.waiting(rules, pool, chosen, blockers, step, since)


def _missing_roles(conductor: Conductor) -> tuple[str, ...]:
    workers = list(conductor.workers)
    served = {route for worker in workers for route in worker.teachers if worker.role == "teacher"}
    routes = {entry.sample.prompt.teacher for entry in conductor.pool.at(Stage.WRITTEN).values()}
    missing = [f"teacher:{route}" for route in sorted(routes - served)]
    if not any(worker.role == "rollout" for worker in workers):
        missing.insert(0, "rollout")
    return tuple(missing)


def _worker_report(conductor: Conductor, worker: Worker, now: float) -> WorkerReport:
    leases = tuple(LeaseReport(lease.id, lease.number, now - lease.since) for lease in worker.leases.values())
    waits_for = "" if leases else _waits_for(conductor, worker)
    return WorkerReport(worker.name, worker.role, worker.version, now - worker.last_heard, leases, waits_for)


def _waits_for(conductor: Conductor, worker: Worker) -> str:
    if worker.role == "teacher":
        written = conductor.pool.at(Stage.WRITTEN).values()
        return "itself" if any(entry.sample.prompt.teacher in worker.teachers for entry in written) else "rollout"
    if conductor.may_start_at(worker):
        return "itself"
    behind = worker.version is None or worker.version < conductor.version
    return "weights" if behind else "trainer"
