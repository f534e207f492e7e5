"""The rollout worker announces a version after it is verified, and says when it is not; what it does about leases."""

from __future__ import annotations

import threading

import pytest
import torch

from tests.engines.writing import make_decoder, make_samples
from tests.helpers.weights import DIGEST_ONLY, Ends, engine_on, holds
from tests.unit.channel.ends import IDENTITY, PATIENCE, QUICK, make_hello
from titan_opd.channel import ConductorPort, InProcessTransport, PayloadStore, Said, WorkerPort
from titan_opd.channel import messages as wire
from titan_opd.config.schema import SamplingConfig
from titan_opd.rollout import Recording
from titan_opd.weights.errors import LayoutError, VerificationError
from titan_opd.workers.rollout import RolloutWorker


class Run:
    """A worker in a thread, its conductor's port, and a trainer's end of the weights."""

    def __init__(self, folder):
        transport = InProcessTransport()
        self.ends = Ends("in_process", folder)
        self.engine = engine_on(0)
        self.port = ConductorPort(transport, "local://conductor", IDENTITY, QUICK)
        self.error = None
        self.stop = threading.Event()
        self.store = PayloadStore(transport, name="rollout-0", capacity_bytes=1 << 20, consumer="nobody")
        self.thread = threading.Thread(target=self._work, args=(transport,), daemon=True)
        self.thread.start()

    def _work(self, transport):
        port = WorkerPort.connect(transport, self.port.address, make_hello())
        worker = RolloutWorker(
            self.engine,
            port,
            self.ends.receiver(DIGEST_ONLY),
            self.store,
            prompts=[sample.prompt for sample in make_samples(1)],
            sampling=SamplingConfig(max_new_tokens=4),
            recording=Recording(),
            finish_first=False,
        )
        try:
            worker.run(self.stop)
        except Exception as error:
            self.error = error

    def announce(self, version):
        self.port.send("rollout-0", wire.NewVersion(version, self.ends.store.address))

    def next_said(self, *kinds):
        """The next message of the worker of one of these kinds."""
        end = threading.Event()
        timer = threading.Timer(PATIENCE, end.set)
        timer.start()
        try:
            while not end.is_set():
                event = self.port.receive(0.1)
                if isinstance(event, Said) and isinstance(event.message, kinds):
                    return event.message
        finally:
            timer.cancel()
        raise TimeoutError(kinds)

    def wait_joined(self):
        while "rollout-0" not in self.port.peers:
            self.port.receive(0.1)

    def close(self):
        self.stop.set()
        self.thread.join(PATIENCE)
        self.store.close()
        self.ends.close()
        self.port.close()


@pytest.fixture
def run(tmp_path):
    run = Run(tmp_path)
    run.wait_joined()
    yield run
    run.close()


OUTCOMES = (wire.EngineVersion, wire.EngineFailed)


def test_a_version_is_announced_when_it_is_there(run):
    run.ends.publish(make_decoder(seed=1), 1)
    run.announce(1)
    assert run.next_said(*OUTCOMES) == wire.EngineVersion(1)
    assert holds(run.engine, make_decoder(seed=1))


def test_a_failed_verification_is_told_and_never_announced(run):
    run.ends.publish(make_decoder(seed=1), 1)
    run.ends.local.published(1)[0][100] ^= 1
    run.announce(1)
    for _ in range(3):  # it tries again: what went wrong may have been on the way
        said = run.next_said(*OUTCOMES)
        assert isinstance(said, wire.EngineFailed)
        assert "version 1 at rollout-0: 1 of 21 tensors are wrong" in said.reason
        assert "model.embed_tokens.weight" in said.reason
    run.thread.join(PATIENCE)
    assert isinstance(run.error, VerificationError)
    assert not run.engine.is_serving


def test_a_newer_version_heals_it(run):
    run.ends.publish(make_decoder(seed=1), 1)
    run.ends.local.published(1)[0][100] ^= 1
    run.announce(1)
    assert isinstance(run.next_said(*OUTCOMES), wire.EngineFailed)
    run.ends.publish(make_decoder(seed=2), 2)
    run.announce(2)
    while isinstance(said := run.next_said(*OUTCOMES), wire.EngineFailed):
        pass
    assert said == wire.EngineVersion(2)
    assert holds(run.engine, make_decoder(seed=2))


def test_a_sample_that_is_given_out_anew_is_begun_anew(run):
    """Its first lease has been cancelled, and the new one comes before that is told with the next heartbeat."""
    for lease in ("a", "b"):
        run.port.send("rollout-0", wire.SampleLeases([wire.SampleLease(lease, 3, 0, 0, 0, 0)]))
    run.port.send("rollout-0", wire.LeasesCancelled(["a"]))
    assert run.next_said(wire.RolloutDone).lease == "b"
    assert run.error is None


def test_weights_of_another_model_end_the_worker(run):
    run.ends.publish(make_decoder(seed=1, num_hidden_layers=1), 1)
    run.announce(1)
    said = run.next_said(*OUTCOMES)
    assert isinstance(said, wire.EngineFailed)
    assert "9 of 21 parameters are missing: 'model.layers.1." in said.reason
    run.thread.join(PATIENCE)
    assert isinstance(run.error, LayoutError)
    assert run.engine.is_serving
    assert holds(run.engine, make_decoder(seed=0))
    assert torch.equal(run.engine._decoder.lm_head_weight, make_decoder(seed=0).lm_head_weight.bfloat16())
