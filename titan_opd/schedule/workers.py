"""Who works for the run, and which leases they hold."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from titan_opd.schedule.headers import Orders

ROLES = ("rollout", "teacher")


@dataclass(frozen=True)
class Lease:
    """One sample in the hands of one worker."""

    id: str
    worker: str
    number: int
    since: float


@dataclass
class Worker:
    """A registered worker.

    Attributes:
        name: unique among the registered ones.
        role: "rollout" or "teacher".
        teachers: the routes that a teacher serves.
        last_heard: time of its last message.
        version: verified at a rollout worker's engine; None while it can serve nothing.
        leases: what it works on, by lease id.
        cancelled: leases that it has not been told of yet.
    """

    name: str
    role: str
    teachers: tuple[str, ...]
    last_heard: float
    version: int | None = None
    leases: dict[str, Lease] = field(default_factory=dict)
    cancelled: list[str] = field(default_factory=list)


class Workers:
    """The registered workers, their leases, and when they were last heard of.

    Args:
        lease_seconds: a worker that is silent for longer is lost.
        incarnation: begins every lease id. It differs between the processes of one run, so that a result that was
            leased by a conductor which is no more is not taken for one of this.
    """

    def __init__(self, lease_seconds: float, incarnation: str) -> None:
        self._lease_seconds = lease_seconds
        self._incarnation = incarnation
        self._num_leases = 0
        self._workers: dict[str, Worker] = {}

    def __iter__(self) -> Iterator[Worker]:
        return iter(self._workers.values())

    def add(self, name: str, role: str, teachers: Sequence[str], now: float) -> None:
        """Register a worker whose name is free."""
        if role not in ROLES:
            raise ValueError(f"worker {name!r} has the role {role!r}; the roles are {' and '.join(ROLES)}")
        self._workers[name] = Worker(name, role, tuple(teachers), last_heard=now)

    def remove(self, name: str) -> Worker | None:
        """Forget a worker; None when it is not registered."""
        return self._workers.pop(name, None)

    def heard(self, name: str, role: str, now: float) -> Worker | None:
        """Note a sign of life; None when no such worker is registered.

        Raises:
            ValueError: the worker is registered with another role.
        """
        worker = self._workers.get(name)
        if worker is None:
            return None
        if worker.role != role:
            raise ValueError(f"worker {name!r} is registered as {worker.role}, so it can do no work of a {role}")
        worker.last_heard = now
        return worker

    def heartbeat(self, name: str, now: float) -> Orders:
        """Note a sign of life and hand over the cancelled leases."""
        worker = self._workers.get(name)
        if worker is None:
            return Orders(known=False)
        worker.last_heard = now
        cancelled, worker.cancelled = tuple(worker.cancelled), []
        return Orders(known=True, cancelled=cancelled)

    def engine(self, name: str) -> Worker:
        """A registered rollout worker.

        Raises:
            ValueError: there is none of that name.
        """
        worker = self._workers.get(name)
        if worker is None or worker.role != "rollout":
            raise ValueError(f"{name!r} is no registered rollout worker; it has to register before its engine counts")
        return worker

    def silent(self, now: float) -> list[str]:
        """The workers that have not been heard of for longer than `lease_seconds`."""
        return [worker.name for worker in self if now - worker.last_heard > self._lease_seconds]

    def lease(self, worker: Worker, number: int, now: float) -> Lease:
        """A new lease of sample `number`."""
        lease = Lease(f"{self._incarnation}:{self._num_leases}", worker.name, number, now)
        self._num_leases += 1
        worker.leases[lease.id] = lease
        return lease

    def find(self, name: str, lease_id: str) -> Lease | None:
        """The worker's lease if it still counts."""
        worker = self._workers.get(name)
        return worker.leases.get(lease_id) if worker else None

    def end(self, lease: Lease) -> None:
        """The lease's work is done or given back by its worker."""
        del self._workers[lease.worker].leases[lease.id]

    def cancel(self, name: str | None, lease_id: str | None) -> None:
        """Void a lease or the result that it led to, and tell its worker with the next heartbeat."""
        worker = self._workers.get(name) if name else None
        if worker is not None and lease_id is not None:
            worker.leases.pop(lease_id, None)
            worker.cancelled.append(lease_id)
