"""The teacher worker: takes leases of written answers, fetches them, scores them."""

from __future__ import annotations

import logging
import threading
from collections import deque
from dataclasses import replace

from titan_opd.channel import ChannelError, PayloadFetcher, PayloadStore, WorkerPort
from titan_opd.channel import messages as wire
from titan_opd.channel.addresses import Address
from titan_opd.data import Trajectory
from titan_opd.losses import TeacherScores
from titan_opd.observe import trace
from titan_opd.teacher import Scorer
from titan_opd.workers.outbox import Outbox

logger = logging.getLogger(__name__)
_IDLE_SECONDS = 0.05
_FETCH_SECONDS = 60.0


class TeacherWorker:
    """Scores answers for a conductor until it says Stop.

    Args:
        scorer: scores several answers in one call.
        port: the connection to the conductor.
        fetcher: fetches the answers from those who wrote them.
        store: keeps the scores until they are trained.
        at_a_time: most answers in one call of the scorer.
    """

    def __init__(
        self, scorer: Scorer, port: WorkerPort, fetcher: PayloadFetcher, store: PayloadStore, *, at_a_time: int
    ) -> None:
        self._scorer = scorer
        self._port = port
        self._fetcher = fetcher
        self._outbox: Outbox[TeacherScores] = Outbox(store)
        self._at_a_time = at_a_time
        self._waiting: deque[tuple[Address, wire.ScoringLease]] = deque()
        self._asked = 0
        self._stopped = False

    def run(self, stop: threading.Event | None = None) -> None:
        """Work until the conductor says Stop or `stop` is set.

        Raises:
            RefusedError: the conductor does not take what this worker says.
            ChannelError: the conductor is gone.
        """
        while not self._stopped and not (stop is not None and stop.is_set()):
            self._listen()
            if self._waiting and not self._outbox:
                self._score()
            self._deliver()
            self._ask()
        self._port.close()

    def _listen(self) -> None:
        message = self._port.receive(0.0 if self._waiting and not self._outbox else _IDLE_SECONDS)
        while message is not None:
            self._hear(message)
            message = self._port.receive(0.0)

    def _hear(self, message: wire.Message) -> None:
        match message:
            case wire.ScoringLeases(stores=stores, leases=leases):
                self._asked = max(0, self._asked - len(leases))
                self._waiting.extend((stores[lease.store], lease) for lease in leases)
            case wire.LeasesCancelled(leases=leases) | wire.Release(leases=leases):
                forgotten = set(leases)
                self._waiting = deque(pair for pair in self._waiting if pair[1].lease not in forgotten)
                self._outbox.forget(forgotten)
            case wire.Stop():
                self._stopped = True
            case wire.Report():
                pass

    def _score(self) -> None:
        leases: list[str] = []
        answers: list[Trajectory] = []
        while self._waiting and len(answers) < self._at_a_time:
            store, lease = self._waiting.popleft()
            try:
                answers.append(self._fetcher.fetch(store, lease.answer, Trajectory, timeout=_FETCH_SECONDS))
            except ChannelError as error:
                logger.warning("the answer to sample %d is lost: %s", lease.number, error)
                self._port.send(wire.PayloadLost(lease.answer, str(error)[:2000]))
                continue
            leases.append(lease.lease)
        if not answers:
            return
        with trace.span("score", samples=len(answers)):
            scored = self._scorer.score(answers)
        for lease, one in zip(leases, scored, strict=True):
            # The loss has the output projection that a dense score is made with; it does not travel with each answer.
            self._outbox.add(lease, replace(one.scores, lm_head_weight=None))

    def _deliver(self) -> None:
        for lease, _, num_bytes in self._outbox.delivered():
            self._port.send(wire.ScoringDone(lease, num_bytes))

    def _ask(self) -> None:
        free = self._at_a_time - len(self._waiting)
        if not self._outbox and free > self._asked:
            self._port.send(wire.WantScoring(free))
            self._asked = free
