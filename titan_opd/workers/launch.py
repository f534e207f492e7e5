"""Opens a schedule with workers: its conductor, its workers on this machine, and the trainer's end of it."""

from __future__ import annotations

import json
import logging
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from titan_opd.assemble import Parts
from titan_opd.channel import (
    Address,
    ChannelError,
    InProcessTransport,
    PayloadFetcher,
    PayloadStore,
    RefusedError,
    Transport,
    WorkerPort,
    messages,
)
from titan_opd.channel.keys import CONDUCTOR
from titan_opd.checkpoint import write_file
from titan_opd.config import Config
from titan_opd.data.records import ScoredTrajectory
from titan_opd.observe import PhaseClock
from titan_opd.parallel import World
from titan_opd.rollout import RECORD_NOTHING
from titan_opd.schedule import SyncSchedule
from titan_opd.schedule.service import TRAINER, checkpoint_keys
from titan_opd.schedule.trainer_end import ScheduleCut, TrainerLink, WorkerSchedule
from titan_opd.weights.transports import WEIGHT_LIMITS, InProcess
from titan_opd.workers.connection import conductor_address, conductor_endpoint, open_transport
from titan_opd.workers.roles import (
    START_SECONDS,
    make_hello,
    open_store,
    serve_conductor,
    serve_rollout,
    serve_teacher,
)
from titan_opd.workers.supervisor import LocalWorker, Supervisor
from titan_opd.workers.weights import build_delivery, build_probe, build_publisher, version_bytes

logger = logging.getLogger(__name__)
RESTORE_FILE = "conductor.json"  # in the run's folder: what the conductor goes on from
_LOCAL_ENDPOINT = "local://conductor"
_JOIN_SECONDS = 30.0
_CONNECT_SECONDS = 5.0  # for one try to reach the conductor


@dataclass(frozen=True)
class Continuation:
    """What a schedule goes on from.

    Attributes:
        state: of `Conductor.snapshot`.
        samples: the finished samples that the checkpoint kept.
    """

    state: Mapping[str, Any]
    samples: list[ScoredTrajectory]


class _RoleThread(threading.Thread):
    """A role in this process; its error is kept for the trainer."""

    def __init__(self, thread_name: str, serve: Callable[..., None], /, *arguments: Any, **options: Any) -> None:
        super().__init__(name=thread_name, daemon=True)
        self.error: BaseException | None = None
        self.stop = threading.Event()
        self._serve = lambda: serve(*arguments, **options, stop=self.stop)

    def run(self) -> None:
        try:
            self._serve()
        except BaseException as error:
            self.error = error


class Schedule(Protocol):
    """Where the trainer's batches come from, and where its new weights go."""

    def next_batch(self, version: int) -> list[ScoredTrajectory]:
        """This process's share of the batch that the step at `version` trains."""

    def publish(self, version: int) -> dict[str, float]:
        """The step is done: the student's present weights are those of `version`, the next one. Returns metrics of
        their way to the engines, if there are any."""

    def cut(self) -> ScheduleCut | None:
        """What a checkpoint must keep of the schedule, beside the position of the prompts; in the main process."""

    def report(self) -> dict[str, Any] | None:
        """Who does what and who waits for whom, from any thread of the main process; None when nothing overlaps."""


@contextmanager
def open_schedule(
    config: Config,
    parts: Parts,
    world: World,
    clock: PhaseClock,
    *,
    config_file: Path,
    version: int,
    continuation: Continuation | None,
) -> Iterator[Schedule]:
    """The running schedule of a configuration; everything it started has ended after the block.

    Args:
        config: of the run.
        parts: the run's; its engine and scorer are those of a schedule in which nothing overlaps.
        world: the trainer's processes, all of which enter together.
        clock: of the run.
        config_file: the resolved configuration on disk, for the worker processes.
        version: the policy version to begin with.
        continuation: what a schedule with workers goes on from; None: it begins.

    Raises:
        ValueError: an address is taken, keys are missing.
        ChannelError: a role could not be started.
    """
    if not config.overlaps:
        yield SyncSchedule(
            parts.prompts,
            parts.engine,
            parts.scorer,
            recording=parts.recording,
            schedule=config.schedule,
            rollout=config.rollout,
            deliver=_delivery(config, parts, world),
            clock=clock,
            world=world,
        )
        return
    with ExitStack() as resources:
        launcher = _Launcher(config, parts, world, config_file, continuation, resources)
        schedule = launcher.schedule(clock)
        schedule.publish(version, trained=False)
        yield schedule


def _delivery(config: Config, parts: Parts, world: World) -> Callable[[int], float | None]:
    """Gives this process's engine the student's present weights as a version, and returns the probe's gap."""
    engine = parts.engine
    if config.rollout.engine == "answers" and parts.recording == RECORD_NOTHING:
        return lambda version: engine.load_weights((), version)  # the data's own answers: nobody computes with them
    delivery, probe = build_delivery(config, parts, world), build_probe(config, parts)
    return lambda version: delivery.deliver(engine, version, probe=None if probe is None else probe())


def _interpreter(path: str, option: str) -> str:
    """The interpreter of a worker: this one where `path` is empty.

    Raises:
        ValueError: there is none at `path`.
    """
    found = shutil.which(path) if path else sys.executable
    if found is None:
        raise ValueError(
            f"{option} = {path!r} is no program that can be run; scripts/setup_vllm_cpu.sh makes .venv-vllm/bin/python"
        )
    return found


class _Launcher:
    def __init__(
        self,
        config: Config,
        parts: Parts,
        world: World,
        config_file: Path,
        continuation: Continuation | None,
        resources: ExitStack,
    ) -> None:
        self._config = config
        self._parts = parts
        self._world = world
        self._config_file = config_file
        self._continuation = continuation
        self._resources = resources
        self._threads: list[_RoleThread] = []
        self._local_weights = InProcess() if config.rollout.placement == "colocated" else None
        self._supervisor: Supervisor | None = None
        placements = (config.rollout.placement, config.teacher.placement)
        self._one_process = world.size == 1 and placements == ("colocated", "colocated") and not config.channel.address
        self._endpoint = _LOCAL_ENDPOINT if self._one_process else conductor_endpoint(config)
        self._transport: Transport
        if self._one_process:
            self._transport, self._address = InProcessTransport(), Address(_LOCAL_ENDPOINT)
        else:
            self._transport = open_transport(config, self._endpoint, member=CONDUCTOR)
            self._address = conductor_address(config, self._endpoint, member=CONDUCTOR)

    def schedule(self, clock: PhaseClock) -> WorkerSchedule:
        config = self._config
        if self._world.is_main:
            self._start_conductor_and_workers()
        self._start_colocated()
        link = self._link() if self._world.is_main else None
        store = None if link is None else link.weights
        publisher = build_publisher(config, self._parts, self._world, store, self._local_weights)
        self._resources.callback(publisher.close)
        dense = config.objective.support == "dense"
        teacher = self._parts.teacher
        return WorkerSchedule(
            link,
            PayloadFetcher(self._transport, name=f"trainer-{self._world.rank}"),
            publisher,
            probe=build_probe(config, self._parts),
            teacher_weight=teacher.decoder.lm_head_weight if dense and teacher is not None else None,
            check=self._check,
            ask_report=self._ask_report,
            clock=clock,
            world=self._world,
        )

    # ---- Threads of this process -------------------------------------------------------------------------------------

    def _start_colocated(self) -> None:
        config, parts, rank = self._config, self._parts, self._world.rank
        common = {"device": self._world.device}
        arguments = (config, parts.common, self._transport, self._address)
        if config.teacher.placement == "colocated":
            name = f"teacher-in-{rank}"
            self._start(_RoleThread(name, serve_teacher, *arguments, name=name, scorer=parts.scorer, **common))
        if config.rollout.placement == "colocated":
            name = f"rollout-in-{rank}"
            self._start(
                _RoleThread(name, serve_rollout, *arguments, name=name, local_weights=self._local_weights, **common)
            )

    def _start(self, thread: _RoleThread) -> None:
        self._threads.append(thread)
        thread.start()
        self._resources.callback(self._end, thread)

    def _end(self, thread: _RoleThread) -> None:
        thread.stop.set()
        thread.join(_JOIN_SECONDS)
        if thread.is_alive():
            logger.warning("%s does not end within %g s", thread.name, _JOIN_SECONDS)

    # ---- Other processes ---------------------------------------------------------------------------------------------

    def _start_conductor_and_workers(self) -> None:
        config = self._config
        restore = None
        if self._continuation is not None:
            stored = [one.trajectory.sample.number for one in self._continuation.samples]
            restore = {"state": dict(self._continuation.state), "stored": stored}
        if self._one_process:
            conductor = _RoleThread(
                "conductor",
                serve_conductor,
                config,
                self._parts.common,
                self._transport,
                self._endpoint,
                num_ranks=1,
                restore=restore,
            )
            self._start(conductor)
            return
        folder = self._config_file.parent
        conductor = ["worker", "--role", "conductor", "--ranks", str(self._world.dp_size)]
        if restore is not None:
            write_file(folder / RESTORE_FILE, json.dumps(restore))
            conductor += ["--restore", str(folder / RESTORE_FILE)]
        workers = [self._process("conductor", conductor, config.channel.cores, restarts=False)]
        for role, section in (("rollout", config.rollout), ("teacher", config.teacher)):
            for index in range(section.workers):
                workers.append(
                    self._process(
                        f"{role}-{index}",
                        ["worker", "--role", role],
                        section.cores[index] if section.cores else "",
                        device=section.devices[index] if section.devices else None,
                        python=_interpreter(section.python, f"{role}.python"),
                    )
                )
        self._supervisor = Supervisor(folder, workers)
        self._resources.callback(self._supervisor.close)

    def _process(
        self,
        name: str,
        arguments: list[str],
        cores: str,
        *,
        device: int | None = None,
        python: str = sys.executable,
        restarts: bool = True,
    ) -> LocalWorker:
        own = ["--connect", self._endpoint, "--name", name, "--ends-with-parent", str(self._config_file)]
        if cores:
            own = ["--cores", cores, *own]
        environment = {} if device is None else {"CUDA_VISIBLE_DEVICES": str(device)}
        return LocalWorker(name, [*arguments, *own], environment=environment, restarts=restarts, python=python)

    def _check(self) -> None:
        """Raise what ended a role that the run cannot do without."""
        if self._supervisor is not None:
            self._supervisor.check()
        for thread in self._threads:
            if thread.error is not None:
                raise thread.error

    def _ask_report(self) -> dict[str, Any]:
        """The conductor's report, over a connection of its own: the trainer's belongs to its main thread."""
        hello = make_hello(self._config, self._parts.common, "trainer", "watchdog", None)
        port = WorkerPort.connect(self._transport, self._address, hello, timeout=_JOIN_SECONDS)
        try:
            port.send(messages.ReportRequest())
            while True:
                message = port.receive(_JOIN_SECONDS)
                if isinstance(message, messages.Report):
                    return message.report
                if message is None:
                    raise ChannelError(f"no report within {_JOIN_SECONDS:g} s", sender="conductor")
        finally:
            port.close()

    # ---- The trainer's end -------------------------------------------------------------------------------------------

    def _link(self) -> TrainerLink:
        kept = open_store(self._config, self._transport, "kept", consumer="the trainer")
        self._resources.callback(kept.close)
        port = self._connect(kept.address)
        self._resources.callback(port.close)
        for one in self._continuation.samples if self._continuation is not None else ():
            answer, scores = checkpoint_keys(one.trajectory.sample.number)
            kept.put(answer, one.trajectory, timeout=0.0)
            kept.put(scores, one.scores, timeout=0.0)
        weights = PayloadStore(
            self._transport,
            name="weights",
            capacity_bytes=version_bytes(self._config, self._parts) * 3 + (64 << 20),
            consumer="the rollout workers",
            limits=WEIGHT_LIMITS,
        )
        self._resources.callback(weights.close)
        return TrainerLink(port, weights, kept)

    def _connect(self, store: Address) -> WorkerPort:
        hello = make_hello(self._config, self._parts.common, "trainer", TRAINER, store)
        end = time.monotonic() + START_SECONDS
        while True:
            try:
                return WorkerPort.connect(self._transport, self._address, hello, timeout=_CONNECT_SECONDS)
            except RefusedError:
                raise
            except ChannelError:
                if self._supervisor is not None:
                    self._supervisor.check()  # why the conductor is not there says more
                else:
                    self._check()
                if time.monotonic() > end:
                    raise
                time.sleep(0.1)
