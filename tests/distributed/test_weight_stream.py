"""Weights from trainers to engines in other processes: bit for bit, by every transport, and when somebody is killed."""

from __future__ import annotations

import shutil
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from tests.distributed import weight_cases as cases
from tests.engines.writing import make_decoder
from tests.helpers import processes
from tests.helpers.weights import BUCKET_BYTES, answers, engine_on, holds
from tests.helpers.worlds import run_world
from titan_opd.channel import Address, ChannelError, ZmqTransport
from titan_opd.weights.errors import TransferError
from titan_opd.weights.publisher import WeightPublisher

pytestmark = pytest.mark.slow  # more processes import everything
_context = processes._context  # forked from a server that has imported everything


@pytest.fixture
def memory():
    """A folder on the file system in memory."""
    folder = Path(tempfile.mkdtemp(dir="/dev/shm", prefix="titan-opd-test-"))
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="module", params=[1, 2], ids=["one trainer", "two trainers"])
def streamed(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("world")
    return run_world(cases.stream, request.param, folder, size=request.param + 1, folder=folder)


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("transport", [*cases.TRANSPORTS, "auto"])
def test_an_engine_stores_the_cast_weights_bit_for_bit(streamed, transport, tied):
    found = streamed[-1][transport, tied]
    used = "shared_memory" if transport == "auto" else transport
    assert found == {"holds 1": True, "holds 2": True, "answers": True, "transport": used}


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_engines_in_the_trainers_processes_too(streamed, tied):
    for trainer in streamed[:-1]:
        assert trainer["in_process", tied]["direct"]
        assert trainer["in_process", tied]["copy"]


def test_trainers_hold_two_buckets_at_most_and_one_trainer_none(streamed):
    trainers = streamed[:-1]
    for peak in (result["peak_bytes"] for trainer in trainers for result in trainer.values()):
        assert 0 < peak <= 2 * BUCKET_BYTES if len(trainers) > 1 else peak == 0


def test_every_placement_on_four_ranks(tmp_path):
    """FIELD 14: all ranks gather in one order, however late each of them is."""
    for found in run_world(cases.placements, tmp_path, size=4, folder=tmp_path):
        assert found == {"700": [], str(BUCKET_BYTES): [], str(1 << 24): [], "int8": []}


def test_fsdp_over_tensor_parallel_parts_is_gathered_in_buckets_too(tmp_path):
    for process in run_world(cases.fsdp_and_tp, tmp_path, size=4, folder=tmp_path):
        for student, found in process.items():
            assert found["wrong"] == [], student
            assert 0 < found["peak_bytes"] <= 2 * BUCKET_BYTES


def test_a_missing_rank_is_named_with_the_tensor_and_the_collective(tmp_path):
    """FIELD 14: a deadline, not the collective's half hour."""
    message, _ = run_world(cases.late, tmp_path, size=2, folder=tmp_path)
    assert "rank 0: all_gather of 'model.embed_tokens.weight'" in message
    assert "failed within 1 s" in message


# ---- Killed ----------------------------------------------------------------------------------------------------------


class Trainer:
    """A process that publishes version `version`, made with `seed`, and can be killed."""

    def __init__(self, transport, memory, *, seed, version):
        here, there = _context.Pipe()
        self.process = _context.Process(target=cases.serve, args=(transport, memory, seed, version, there), daemon=True)
        self.process.start()
        there.close()
        assert here.poll(120), "the trainer does not start"
        self.address = Address(*here.recv())

    def kill(self):
        self.process.kill()
        self.process.join(30)


@pytest.mark.parametrize("transport", ["channel", "process_group"])
def test_a_killed_trainer_leaves_an_engine_that_knows_it(memory, transport):
    trainer = Trainer(transport, memory, seed=1, version=1)
    engine = engine_on(0)
    receiver = cases.make_receiver(transport, "rollout-0", timeout=10)
    # In the third bucket: by then those that were on their way at the time have been used up.
    dying = cases.Dying(engine, on_write=3, action=trainer.kill)
    with pytest.raises(TransferError, match=r"version 1: bucket \d+ of \d+ \('.*'\) did not come"):
        receiver.take(dying, trainer.address, 1)
    assert (engine.policy_version, engine.is_serving) == (0, False)
    with pytest.raises(ValueError, match="incomplete weight update"):
        answers(engine)
    follower = Trainer(transport, memory, seed=2, version=1)
    receiver.take(engine, follower.address, 1)
    assert answers(engine) == answers(engine_on(2))
    follower.kill()
    with pytest.raises(ChannelError, match="manifest-2"):
        receiver.take(engine, follower.address, 2)
    assert engine.is_serving
    assert answers(engine) == answers(engine_on(2))


def test_files_in_memory_outlive_a_killed_trainer(memory):
    """What was published whole can be taken whole."""
    trainer = Trainer("shared_memory", memory, seed=1, version=1)
    engine = engine_on(0)
    dying = cases.Dying(engine, on_write=2, action=trainer.kill)
    cases.make_receiver("shared_memory", "rollout-0").take(dying, trainer.address, 1)
    assert answers(engine) == answers(engine_on(1))


@pytest.mark.parametrize("transport", cases.TRANSPORTS)
def test_a_killed_engine_hinders_nobody(memory, transport):
    store = cases.make_store(ZmqTransport())
    source = cases.make_source(make_decoder(seed=1))
    outlets = cases.make_outlets(transport, store, memory)
    publisher = WeightPublisher(source, outlets, store, bucket_bytes=BUCKET_BYTES)
    publisher.publish(1)
    address = (store.address.endpoint, store.address.public_key)
    engine = _context.Process(target=cases.take_and_die, args=(transport, address, 1))
    engine.start()
    engine.join(120)
    assert engine.exitcode == -9
    other = engine_on(0)
    receiver = cases.make_receiver(transport, "rollout-1")
    end = time.monotonic() + 60
    while not other.policy_version:
        try:
            receiver.take(other, store.address, 1)
        except TransferError:  # in one round with the dead one
            assert time.monotonic() < end
    assert holds(other, make_decoder(seed=1))
    begin = time.monotonic()
    publisher.publish(2)  # the trainer goes on
    assert time.monotonic() - begin < 30
    publisher.close()
    store.close()


def test_engines_that_ask_together_are_served_together(memory):
    """One broadcast of a process group serves several."""
    store = cases.make_store(ZmqTransport())
    publisher = WeightPublisher(
        cases.make_source(make_decoder(seed=1)),
        cases.make_outlets("process_group", store, memory),
        store,
        bucket_bytes=BUCKET_BYTES,
    )
    publisher.publish(1)
    engines = [engine_on(0) for _ in range(3)]

    def take(index):
        cases.make_receiver("process_group", f"rollout-{index}").take(engines[index], store.address, 1)

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(take, range(3)))
    assert all(holds(engine, make_decoder(seed=1)) for engine in engines)
    publisher.close()
    store.close()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_ipc_between_two_processes(memory):
    """Not run on a machine without a GPU."""
    store = cases.make_store(ZmqTransport())
    device = torch.device("cuda", 0)
    publisher = WeightPublisher(
        cases.make_source(make_decoder(seed=1).to(device)),
        [cases.CudaIpcOutlet(device)],
        store,
        bucket_bytes=BUCKET_BYTES,
    )
    publisher.publish(1)
    pipe, there = _context.Pipe()
    address = (store.address.endpoint, store.address.public_key)
    engine = _context.Process(target=cases.take_on_gpu, args=(address, 1, there))
    engine.start()
    assert pipe.poll(120)
    assert pipe.recv()
    engine.join(60)
    publisher.close()
    store.close()
