"""The conductor's service: what it hands to a teacher, and when."""

from __future__ import annotations

import logging
import re
import threading
import time

import pytest

from tests.unit.channel.ends import IDENTITY, PATIENCE, QUICK, make_hello
from tests.unit.data.make import make_prompt
from titan_opd.channel import ConductorPort, InProcessTransport, PayloadStore, WorkerPort
from titan_opd.channel import messages as wire
from titan_opd.data import PromptStream
from titan_opd.schedule import Conductor, ScheduleRules
from titan_opd.schedule.service import TRAINER, ConductorService

PROMPTS = [make_prompt(f"p{i}", [i]) for i in range(8)]
BATCH, GROUP = 4, 3


class Run:
    """A conductor's service in a thread, and a port for each role."""

    def __init__(self):
        transport = InProcessTransport()
        port = ConductorPort(transport, "local://conductor", IDENTITY, QUICK)
        store = PayloadStore(transport, name="conductor", capacity_bytes=1 << 20, consumer="the trainer")
        stream = PromptStream(PROMPTS, shuffle=False, seed=0, samples_per_prompt=1)
        conductor = Conductor(ScheduleRules(BATCH, 1, "async"), stream, lease_seconds=60.0, incarnation="0")
        service = ConductorService(
            port,
            conductor,
            prompt_indices={prompt.id: index for index, prompt in enumerate(PROMPTS)},
            num_ranks=1,
            lease_seconds=600.0,
            store=store,
        )
        self._stop = threading.Event()
        self._thread = threading.Thread(target=service.run, args=(self._stop,))
        self._thread.start()
        hellos = [make_hello(role, name, store=store.address) for role, name in ROLES]
        self.ports = [WorkerPort.connect(transport, port.address, hello, timeout=PATIENCE) for hello in hellos]
        self.trainer, self.writer, self.teacher = self.ports

    def close(self):
        self._stop.set()
        self._thread.join()
        for port in self.ports:
            port.close()

    def leases(self, count):
        """Ask for samples to write, until there are `count`."""
        self.writer.send(wire.EngineVersion(0))
        self.writer.send(wire.WantSamples(count))
        found = []
        while len(found) < count:
            found += hear(self.writer, wire.SampleLeases).leases
        return found

    def write(self, leases):
        for lease in leases:
            self.writer.send(wire.RolloutDone(lease.lease, 0, 0, num_tokens=5, finish_reason="stop", num_bytes=10))


ROLES = (("trainer", TRAINER), ("rollout", "rollout-0"), ("teacher", "teacher-0"))


@pytest.fixture
def run():
    run = Run()
    yield run
    run.close()


def hear(port, kind):
    """The next message of a kind."""
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        message = port.receive(0.05)
        if isinstance(message, kind):
            return message
    raise AssertionError(f"no {kind.__name__}")


def hears_nothing(port):
    """Whether nothing comes for a moment."""
    return port.receive(0.2) is None


def test_while_the_trainer_is_busy_a_teacher_gets_whole_groups(run):
    first, *others = run.leases(GROUP + 1)
    run.teacher.send(wire.WantScoring(GROUP))
    run.write([first])
    assert hears_nothing(run.teacher)
    run.write(others)
    assert len(hear(run.teacher, wire.ScoringLeases).leases) == GROUP


def test_a_trainer_that_waits_gets_what_there_is_scored_at_once(run):
    leases = run.leases(BATCH)
    run.teacher.send(wire.WantScoring(GROUP))
    run.write(leases[:1])
    assert hears_nothing(run.teacher)
    run.trainer.send(wire.NextBatch(0))
    assert [lease.number for lease in hear(run.teacher, wire.ScoringLeases).leases] == [leases[0].number]


def test_a_batch_that_is_ready_goes_before_a_teacher_gets_less_than_a_group(run):
    """The trainer's question is answered first, so that it does not count as waiting."""
    leases = run.leases(BATCH + 1)
    run.teacher.send(wire.WantScoring(BATCH))
    run.write(leases[:BATCH])
    for lease in hear(run.teacher, wire.ScoringLeases).leases:
        run.teacher.send(wire.ScoringDone(lease.lease, num_bytes=10))
    run.teacher.send(wire.WantScoring(GROUP))
    run.write(leases[BATCH:])
    assert hears_nothing(run.teacher)
    run.trainer.send(wire.NextBatch(0))
    assert len(hear(run.trainer, wire.BatchAssignment).ranks[0]) == BATCH
    assert hears_nothing(run.teacher)


def test_the_bytes_of_headers_are_logged_at_the_end(run, caplog):
    run.write(run.leases(2))
    run.trainer.send(wire.NextBatch(0))
    run.teacher.send(wire.WantScoring(2))
    hear(run.teacher, wire.ScoringLeases)  # both ways have been taken
    with caplog.at_level(logging.INFO, logger="titan_opd.schedule.service"):
        run.close()
    num_answers, received, sent = map(
        int, re.search(r"headers of (\d+) answers: (\d+) .* (\d+) went", caplog.text).groups()
    )
    assert 1 <= num_answers <= 2
    assert received > 100
    assert sent > 100
