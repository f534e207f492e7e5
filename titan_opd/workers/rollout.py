"""The rollout worker: takes leases, writes the answers, and follows the trainer's weights in between."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence

from titan_opd.channel import ChannelError, PayloadStore, WorkerPort
from titan_opd.channel import messages as wire
from titan_opd.config.schema import SamplingConfig
from titan_opd.data import Prompt, Sample, Trajectory
from titan_opd.observe import trace
from titan_opd.rollout import Recording
from titan_opd.rollout.engine import StreamingEngine
from titan_opd.weights.errors import LayoutError, VerificationError, WeightError
from titan_opd.weights.receiver import WeightReceiver
from titan_opd.workers.outbox import Outbox

logger = logging.getLogger(__name__)
_IDLE_SECONDS = 0.05  # how long an empty engine waits for a message at a time
_RETRY_SECONDS = 1.0  # after an update that could not be fetched
_MOST_FAILURES = 3  # verifications in a row; what goes wrong as often will go wrong again


class RolloutWorker:
    """Writes answers for a conductor until it says Stop.

    Args:
        engine: holds no version yet; the first one comes from the trainer.
        port: the connection to the conductor.
        receiver: puts published weights into the engine.
        store: keeps the answers until they are trained.
        prompts: as all roles of the run read them; a lease names a prompt by its index.
        sampling, recording: how the answers are written and what is written down beside them.
        finish_first: whether the engine finishes its answers before it takes new weights (`in_flight = "wait"`).
    """

    def __init__(
        self,
        engine: StreamingEngine,
        port: WorkerPort,
        receiver: WeightReceiver,
        store: PayloadStore,
        *,
        prompts: Sequence[Prompt],
        sampling: SamplingConfig,
        recording: Recording,
        finish_first: bool,
    ) -> None:
        self._engine = engine
        self._port = port
        self._receiver = receiver
        self._outbox: Outbox[Trajectory] = Outbox(store)
        self._prompts = prompts
        self._sampling = sampling
        self._recording = recording
        self._finish_first = finish_first
        self._leases: dict[int, str] = {}  # the lease of each sample that is being written
        self._asked = 0  # leases that were asked for and have not come
        self._update: wire.NewVersion | None = None  # the newest that the engine does not have
        self._next_try = 0.0
        self._failures = 0  # of verifications, in a row
        self._way = ("", False)  # the transport that brought the last version, and whether it came as what changed
        self._stopped = False

    def run(self, stop: threading.Event | None = None) -> None:
        """Work until the conductor says Stop or `stop` is set.

        Raises:
            RefusedError: the conductor does not take what this worker says.
            ChannelError: the conductor is gone.
        """
        while not self._stopped and not (stop is not None and stop.is_set()):
            self._listen()
            self._take_update()
            if self._is_writing and self._engine.is_serving:
                with trace.span("rollout", running=self._engine.num_running):
                    for trajectory in self._engine.step():
                        self._finish(trajectory)
            self._deliver()
            self._ask()
        self._port.close()

    @property
    def _is_writing(self) -> bool:
        return self._engine.num_running + self._engine.num_waiting > 0

    def _listen(self) -> None:
        message = self._port.receive(0.0 if self._is_writing else _IDLE_SECONDS)
        while message is not None:
            self._hear(message)
            message = self._port.receive(0.0)

    def _hear(self, message: wire.Message) -> None:
        match message:
            case wire.SampleLeases(leases=leases):
                self._asked = max(0, self._asked - len(leases))
                samples = [Sample(one.number, one.epoch, one.repeat, self._prompts[one.prompt]) for one in leases]
                # One that is being written here comes anew because its lease no longer counts: that may be said later.
                self._engine.cancel([one.number for one in leases if one.number in self._leases])
                self._leases.update({one.number: one.lease for one in leases})
                self._engine.submit(samples, self._sampling, self._recording)
            case wire.LeasesCancelled(leases=leases) | wire.Release(leases=leases):
                self._forget(set(leases))
            case wire.NewVersion():
                self._update, self._next_try = message, 0.0
            case wire.Stop():
                self._stopped = True
            case wire.Report():
                pass

    def _forget(self, leases: set[str]) -> None:
        numbers = [number for number, lease in self._leases.items() if lease in leases]
        self._engine.cancel(numbers)
        for number in numbers:
            del self._leases[number]
        self._outbox.forget(leases)

    # ---- Weights -----------------------------------------------------------------------------------------------------

    def _take_update(self) -> None:
        """Take the newest weights, at once or when the engine is empty."""
        update = self._update
        if update is None or time.monotonic() < self._next_try or (self._finish_first and self._is_writing):
            return
        begin = time.monotonic()
        try:
            with trace.span("weight update", version=update.version):
                self._receiver.take(self._engine, update.store, update.version)
        except (ChannelError, WeightError) as error:
            self._update_failed(update.version, error)
            return
        way = (self._receiver.transport, self._receiver.took_delta)
        if way != self._way:
            self._way = way
            form = "what changed" if self._receiver.took_delta else "whole tensors"
            seconds = time.monotonic() - begin
            logger.info("weights come by %s, %s: version %d in %.2f s", way[0], form, update.version, seconds)
        self._update, self._failures = None, 0
        self._port.send(wire.EngineVersion(update.version, self._receiver.probe_gap))

    def _update_failed(self, version: int, error: ChannelError | WeightError) -> None:
        """Keep the old version in service if nothing was written, and try again, unless that is of no use.

        Raises:
            WeightError: the weights do not fit the engine, or arrive wrong again and again.
        """
        logger.warning("the update to version %d failed: %s", version, error)
        if not self._engine.is_serving or isinstance(error, LayoutError | VerificationError):
            self._drop_all()
            self._port.send(wire.EngineFailed(str(error)[:2000]))
        self._failures += isinstance(error, VerificationError)
        if isinstance(error, LayoutError) or self._failures >= _MOST_FAILURES:
            raise error
        # Else the trainer may have forgotten this version, and a newer one is on its way; or the port will tell.
        self._next_try = time.monotonic() + _RETRY_SECONDS

    def _drop_all(self) -> None:
        """What was being written cannot be finished: the conductor gives these samples out anew."""
        self._engine.cancel(list(self._leases))
        self._leases.clear()
        self._asked = 0

    # ---- Answers -----------------------------------------------------------------------------------------------------

    def _finish(self, trajectory: Trajectory) -> None:
        self._outbox.add(self._leases.pop(trajectory.sample.number), trajectory)

    def _deliver(self) -> None:
        """Announce what is written and fits the store; the rest waits, and nothing new is asked for meanwhile."""
        for lease, trajectory, num_bytes in self._outbox.delivered():
            versions = trajectory.policy_versions
            self._port.send(
                wire.RolloutDone(
                    lease,
                    first_version=int(versions[0]),
                    last_version=int(versions[-1]),
                    num_tokens=len(trajectory.response_ids),
                    finish_reason=trajectory.finish_reason,
                    num_bytes=num_bytes,
                )
            )

    def _ask(self) -> None:
        waits_for_update = self._finish_first and self._update is not None
        if self._outbox or waits_for_update or not self._engine.is_serving:
            return
        free = self._engine.free_capacity
        if free > self._asked:
            self._port.send(wire.WantSamples(free))
            self._asked = free
