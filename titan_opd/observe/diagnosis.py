"""Why nothing moves: what is known of a run that stalls, and the causes that it points to."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FULL_DISK_BYTES = 64 << 20  # with less room no checkpoint or log can be relied on


@dataclass(frozen=True)
class LeaseState:
    """A sample in a worker's hands, by its number, for `age` seconds."""

    number: int
    age: float


@dataclass(frozen=True)
class WorkerState:
    """One worker.

    Attributes:
        name, role: as it registered.
        version: verified at a rollout worker's engine; None while it serves nothing, and for teachers.
        silent: seconds since it was last heard of.
        leases: what it works on.
        waits_for: without leases, who has to move first: "trainer", "weights" (an update of its engine), "rollout", or
            "itself" (there is work, and it does not ask).
    """

    name: str
    role: str
    version: int | None
    silent: float
    leases: tuple[LeaseState, ...] = ()
    waits_for: str = ""


@dataclass(frozen=True)
class RunState:
    """Who does what and who waits for whom.

    Attributes:
        version: the current policy version.
        max_staleness: the schedule's bound.
        lease_seconds: a worker that is silent for longer is lost.
        training: whether the trainer has a batch that it has not finished.
        waiting_role: "rollout" or "teacher", whom the next batch waits for; None while one is out or can be had.
        waiting_reason: "samples" (too few finished) or "deadline" (some samples must come first).
        waiting_numbers: those samples; none when any will do.
        queues: samples by stage.
        missing_roles: roles that have work and no worker; a teacher's route follows a colon.
        workers: all that are registered.
    """

    version: int
    max_staleness: int
    lease_seconds: float
    training: bool
    waiting_role: str | None = None
    waiting_reason: str = ""
    waiting_numbers: tuple[int, ...] = ()
    queues: Mapping[str, int] = field(default_factory=dict)
    missing_roles: tuple[str, ...] = ()
    workers: tuple[WorkerState, ...] = ()

    @classmethod
    def from_schedule(cls, report: Mapping[str, Any], *, max_staleness: int, lease_seconds: float) -> RunState:
        """From the conductor's report, as the JSON values in which it also travels between processes."""
        waiting = report["waiting"] or {}
        return cls(
            version=report["version"],
            max_staleness=max_staleness,
            lease_seconds=lease_seconds,
            training=report["training"],
            waiting_role=waiting.get("role"),
            waiting_reason=waiting.get("reason", ""),
            waiting_numbers=tuple(waiting.get("numbers", ())),
            queues=dict(report["queues"]),
            missing_roles=tuple(report["missing_roles"]),
            workers=tuple(
                WorkerState(
                    worker["name"],
                    worker["role"],
                    worker["version"],
                    worker["silent"],
                    tuple(LeaseState(lease["number"], lease["age"]) for lease in worker["leases"]),
                    worker["waits_for"],
                )
                for worker in report["workers"]
            ),
        )


@dataclass(frozen=True)
class StallReport:
    """A run in which nothing has moved for too long.

    Attributes:
        run_directory: the run's folder.
        quiet_seconds: since the last progress.
        progress: what has moved so far and how many seconds ago it last did.
        free_bytes: room on the disk of the run's folder; None when even that could not be found out.
        state: of the schedule; None without one, or when it could not be had.
        state_error: why the state could not be had.
    """

    run_directory: Path
    quiet_seconds: float
    progress: Mapping[str, float] = field(default_factory=dict)
    free_bytes: int | None = None
    state: RunState | None = None
    state_error: str = ""


def diagnose(report: StallReport) -> list[str]:
    """The causes that the report points to, most likely first; one line that says so when it points to none."""
    causes = list(_storage(report))
    if report.state is not None:
        for find in _CAUSES:
            causes += find(report.state)
    return causes or ["no cause is recognised; the stacks below tell where each thread stands"]


def _storage(report: StallReport) -> Iterator[str]:
    if report.free_bytes is None:
        yield (
            f"the disk of {report.run_directory} does not answer: whoever writes a log or a checkpoint there hangs; "
            "look at the mount"
        )
    elif report.free_bytes < FULL_DISK_BYTES:
        yield (
            f"the disk of {report.run_directory} is full ({report.free_bytes >> 20} MiB free): make room, then go on "
            "with --resume"
        )
    if report.state_error:
        yield f"the conductor does not tell the state of the schedule ({report.state_error}): it hangs or is gone"


def _never_dialled_in(state: RunState) -> Iterator[str]:
    for missing in state.missing_roles:
        role, _, route = missing.partition(":")
        whose = f" for teacher route {route!r}" if route else ""
        yield (
            f"no {role} worker{whose} is there: none has dialled in, or all were lost; look at their logs, and start "
            f"one with titan-opd worker --role {role}"
        )


def _expired_leases(state: RunState) -> Iterator[str]:
    for worker in state.workers:
        if worker.silent > state.lease_seconds:
            yield (
                f"{worker.role} worker {worker.name} has been silent for {worker.silent:.0f} s, so its leases have "
                f"expired (lease_seconds = {state.lease_seconds:g}){_samples(worker)}: its process is dead or hangs"
            )


def _old_engines(state: RunState) -> Iterator[str]:
    for worker in _alive(state, "rollout"):
        if worker.version is None:
            yield (
                f"the engine of {worker.name} holds no complete version (the trainer is at {state.version}): an update "
                "broke off, or its first one has not come; look for weight errors in its log"
            )
        elif worker.version < state.version and worker.waits_for == "weights":
            yield (
                f"the engine of {worker.name} is at the old policy version {worker.version}, the trainer at "
                f"{state.version}, and it may not start another sample (max_staleness = {state.max_staleness}): the "
                "weight update has not arrived or was not verified"
            )


def _idle_workers(state: RunState) -> Iterator[str]:
    for role in ("rollout", "teacher"):
        for worker in _alive(state, role):
            if worker.waits_for == "itself":
                yield (
                    f"{role} worker {worker.name} has work and sends signs of life, but does not ask for it: its main "
                    "loop hangs"
                )


def _slow_trainer(state: RunState) -> Iterator[str]:
    finished = state.queues.get("scored", 0)
    if state.training:
        yield (
            f"the trainer is the slow consumer: it has the batch of version {state.version} and does not finish the "
            f"step ({finished} more samples are scored and wait); look at its stacks: a collective, or a payload "
            "that does not come"
        )
    elif state.waiting_role is None:
        yield (
            f"the trainer is the slow consumer: a batch of version {state.version} is ready and it does not ask for "
            "it; look at its stacks"
        )


def _slow_workers(state: RunState) -> Iterator[str]:
    """Live workers that hold what the next batch waits for."""
    if state.waiting_role is None:
        return
    work, verb = {"rollout": ("writing", "written"), "teacher": ("scoring", "scored")}[state.waiting_role]
    wanted = set(state.waiting_numbers)
    waiting = f", {state.queues.get('written', 0)} more answers wait" if state.waiting_role == "teacher" else ""
    for worker in _alive(state, state.waiting_role):
        held = [lease for lease in worker.leases if not wanted or lease.number in wanted]
        if held:
            oldest = max(held, key=lambda lease: lease.age)
            why = "deadlines allow no other batch" if state.waiting_reason == "deadline" else "too few are finished"
            yield (
                f"{state.waiting_role} worker {worker.name} is the slow consumer: the step at version {state.version} "
                f"waits for samples to be {verb} ({why}), and it has been {work} sample {oldest.number} for "
                f"{oldest.age:.0f} s ({len(held)} such samples{waiting})"
            )


_CAUSES: tuple[Callable[[RunState], Iterator[str]], ...] = (
    _never_dialled_in,
    _expired_leases,
    _old_engines,
    _slow_trainer,
    _slow_workers,
    _idle_workers,
)


def _alive(state: RunState, role: str) -> Iterator[WorkerState]:
    return (worker for worker in state.workers if worker.role == role and worker.silent <= state.lease_seconds)


def _samples(worker: WorkerState) -> str:
    if not worker.leases:
        return ""
    numbers = ", ".join(str(lease.number) for lease in worker.leases[:8])
    return f" on samples {numbers}" + (" and more" if len(worker.leases) > 8 else "")
