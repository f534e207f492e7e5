"""The channel between real processes: deaths, slow consumers, and ten thousand trajectories' headers."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time

import pytest
import torch
from msgspec import structs

from tests.unit.channel.ends import IDENTITY, PATIENCE, QUICK, make_hello, next_event, next_said
from titan_opd.channel import (
    Address,
    ChannelError,
    ConductorPort,
    Joined,
    Left,
    PayloadFetcher,
    PayloadStore,
    PortLimits,
    Said,
    WorkerPort,
    ZmqTransport,
)
from titan_opd.channel import messages as m
from titan_opd.losses import TeacherScores

pytestmark = pytest.mark.slow  # processes that import torch

context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(["titan_opd.channel", "titan_opd.losses", "tests.unit.channel.ends"])

LARGE = 400 << 20
PAYLOAD = TeacherScores(hidden=torch.zeros(1000, dtype=torch.uint8))


@pytest.fixture
def conductor():
    port = ConductorPort(ZmqTransport(), "tcp://127.0.0.1:*", IDENTITY, QUICK)
    yield port
    port.close()


@pytest.fixture
def start():
    """Starts a function in a process of its own; ends it with the test."""
    processes = []

    def start(function, *arguments):
        process = context.Process(target=function, args=arguments, daemon=True)
        process.start()
        processes.append(process)
        return process

    yield start
    for process in processes:
        process.kill()
        process.join()


def connect(endpoint, store=None, **identity):
    address = None if store is None else store.address
    hello = structs.replace(make_hello(**identity), store=address)
    return WorkerPort.connect(ZmqTransport(), Address(endpoint), hello, timeout=PATIENCE)


# ---- Death -----------------------------------------------------------------------------------------------------------


def produce_and_wait(endpoint, num_bytes):
    """A producer with one large payload."""
    store = PayloadStore(ZmqTransport(), name="rollout-0", capacity_bytes=2 * num_bytes, consumer="the test")
    store.put("a:1", TeacherScores(hidden=torch.zeros(num_bytes, dtype=torch.uint8)), timeout=0)
    worker = connect(endpoint, store)
    worker.send(m.RolloutDone("a:1", 0, 0, num_bytes, "stop", store.num_bytes))
    while True:
        worker.receive(1.0)


def test_a_producer_killed_before_and_while_it_is_fetched_from_is_an_error(conductor, start):
    producer = start(produce_and_wait, conductor.address.endpoint, 1000)
    address = next_event(conductor, Joined).hello.store
    next_said(conductor, m.RolloutDone)
    fetcher = PayloadFetcher(ZmqTransport(), name="teacher-0")
    fetcher.fetch(address, "a:1", TeacherScores, timeout=PATIENCE)  # the connection stands
    os.kill(producer.pid, signal.SIGSTOP)  # it will not answer the next request ...
    begin = time.monotonic()

    killer = threading.Timer(0.3, os.kill, (producer.pid, signal.SIGKILL))  # ... and dies while it is waited for
    killer.start()
    with pytest.raises(
        ChannelError, match=r"teacher-0: payload 'a:1' cannot be fetched: tcp://.* has gone or cut it off"
    ):
        fetcher.fetch(address, "a:1", TeacherScores, timeout=1000.0)
    assert time.monotonic() - begin < 500  # it did not wait for its deadline
    killer.join()
    # The free port may connect to itself, as Linux allows on the loopback; it speaks no protocol then.
    with pytest.raises(ChannelError, match=r"not connected within 0.3 s: nobody listens|does not speak this protocol"):
        fetcher.fetch(address, "a:1", TeacherScores, timeout=1000.0, connect_timeout=0.3)
    assert next_event(conductor, Left).name == "rollout-0"  # at the next beat, long before it counts as silent
    fetcher.close()


def test_a_producer_killed_amid_a_large_payload_is_an_error(conductor, start):
    producer = start(produce_and_wait, conductor.address.endpoint, LARGE)
    address = next_event(conductor, Joined).hello.store
    next_said(conductor, m.RolloutDone)
    result = context.SimpleQueue()
    start(fetch_and_tell, address, result)
    assert result.get() == "asking"
    time.sleep(0.02)
    producer.kill()
    assert result.get() in ("whole", "error")  # as the kill comes early or late; never half a payload, never a hang


def fetch_and_tell(address, result):
    fetcher = PayloadFetcher(ZmqTransport(), name="teacher-0")
    result.put("asking")
    try:
        got = fetcher.fetch(address, "a:1", TeacherScores, timeout=1000.0)
        result.put("whole" if got.hidden.numel() == LARGE else "half")
    except ChannelError as error:
        result.put("error" if "has gone or cut it off" in str(error) or "nobody listens" in str(error) else str(error))


def test_a_killed_worker_frees_its_name_at_once(conductor, start):
    first = start(produce_and_wait, conductor.address.endpoint, 1000)
    next_event(conductor, Joined)
    first.kill()
    first.join()
    start(produce_and_wait, conductor.address.endpoint, 1000)
    events = []
    while not (events and isinstance(events[-1], Joined)):
        event = conductor.receive(0.05)
        if isinstance(event, Joined | Left):
            events.append(event)
    assert [type(event) for event in events] == [Left, Joined]


def conduct_and_wait(pipe):
    limits = PortLimits(heartbeat_seconds=0.05, silence_seconds=1.0)
    port = ConductorPort(ZmqTransport(), "tcp://127.0.0.1:*", IDENTITY, limits)
    pipe.send(port.address.endpoint)
    while True:
        port.receive(1.0)


def test_a_killed_conductor_is_an_error_at_the_worker(start):
    ours, theirs = context.Pipe()
    conductor = start(conduct_and_wait, theirs)
    worker = connect(ours.recv())
    conductor.kill()
    with pytest.raises(ChannelError, match="the connection is lost: the other side has gone"):
        worker.receive(1000.0)
    worker.close()


def test_a_stopped_conductor_is_an_error_at_the_worker_in_time(start):
    ours, theirs = context.Pipe()
    conductor = start(conduct_and_wait, theirs)
    worker = connect(ours.recv())
    os.kill(conductor.pid, signal.SIGSTOP)
    with pytest.raises(ChannelError, match="conductor: silent for 1 s"):
        worker.receive(1000.0)
    worker.close()


# ---- Slow consumers --------------------------------------------------------------------------------------------------


def produce_at_full_speed(endpoint, num_samples):
    """Writes an answer for each lease, asks for as many as it has room for, and releases what it is told to."""
    store = PayloadStore(ZmqTransport(), name="rollout-0", capacity_bytes=5000, consumer="the test")
    worker = connect(endpoint, store)
    worker.send(m.WantSamples(1))
    done = 0
    while done < num_samples:
        message = worker.receive(PATIENCE)
        if isinstance(message, m.Release):
            store.release(message.leases)
        elif isinstance(message, m.SampleLeases):
            for lease in message.leases:
                while True:
                    try:
                        size = store.put(lease.lease, PAYLOAD, timeout=0.05)
                        break
                    except ChannelError:  # full: only a release helps
                        release = worker.receive(PATIENCE)
                        assert isinstance(release, m.Release), release
                        store.release(release.leases)
                worker.send(m.RolloutDone(lease.lease, 0, 0, 1, "stop", size))
                worker.send(m.WantSamples(1))
                done += 1
    assert store.num_bytes <= 5000
    worker.close()


def test_a_slow_consumer_stops_the_producers_leases(conductor, start):
    """Without a release the producer asks for no more samples than its store holds; each release brings one more."""
    start(produce_at_full_speed, conductor.address.endpoint, 12)
    next_event(conductor, Joined)
    handed_out, written = 0, []

    def serve(seconds):
        nonlocal handed_out
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            event = conductor.receive(0.02)
            if isinstance(event, Said) and isinstance(event.message, m.WantSamples):
                lease = m.SampleLease(f"a:{handed_out}", handed_out, 0, 0, 0, 0)
                conductor.send(event.name, m.SampleLeases([lease]))
                handed_out += 1
            elif isinstance(event, Said) and isinstance(event.message, m.RolloutDone):
                written.append(event.message.lease)

    end = time.monotonic() + PATIENCE
    while len(written) < 4 and time.monotonic() < end:
        serve(0.05)
    serve(0.5)
    assert len(written) == 4  # four payloads of about 1,100 bytes fill 5,000
    assert handed_out == 5  # and one is in the producer's hands
    for released in range(1, 4):
        conductor.send("rollout-0", m.Release([f"a:{released - 1}"]))
        while len(written) < 4 + released and time.monotonic() < end:
            serve(0.05)
        serve(0.1)
        assert (len(written), handed_out) == (4 + released, 5 + released)


# ---- Ten thousand trajectories ---------------------------------------------------------------------------------------

COUNT = 10_000
MANY = 250  # leases a message


def wait_for_stop(worker):
    released = 0
    while not isinstance(message := worker.receive(1000.0), m.Stop):
        released += len(message.leases)
    assert released == COUNT
    worker.close()


def write_many(endpoint):
    worker = connect(endpoint)
    written = 0
    while written < COUNT:
        worker.send(m.WantSamples(MANY))
        for lease in worker.receive(PATIENCE).leases:
            worker.send(m.RolloutDone(lease.lease, 3, 4, 8000, "length", 1_600_000))
            written += 1
    wait_for_stop(worker)


def score_many(endpoint):
    worker = connect(endpoint, role="teacher", name="teacher-0")
    scored = 0
    while scored < COUNT:
        worker.send(m.WantScoring(MANY))
        for lease in worker.receive(PATIENCE).leases:
            worker.send(m.ScoringDone(lease.lease, 6_400_000))
            scored += 1
    wait_for_stop(worker)


def test_ten_thousand_trajectories_cost_at_most_a_kilobyte_of_headers_each(conductor, start):
    workers = [start(function, conductor.address.endpoint) for function in (write_many, score_many)]
    store = Address("tcp://10.20.30.40:43210", "k" * 40)
    leased, written, scored, wanted = 0, [], [], 0
    while len(scored) < COUNT:
        event = conductor.receive(PATIENCE)
        assert not isinstance(event, Left), event
        match event:
            case Said(name, m.WantSamples(capacity)):
                numbers = range(leased, min(leased + capacity, COUNT))
                leases = [m.SampleLease(f"f00dcafe:{n}", n, 0, n % 8, n // 8, 3) for n in numbers]
                conductor.send(name, m.SampleLeases(leases))
                leased = numbers.stop
            case Said(_, m.RolloutDone(lease)):
                written.append(lease)
            case Said(_, m.WantScoring(capacity)):
                wanted += capacity
            case Said(name, m.ScoringDone(lease)):
                scored.append(lease)
        if wanted and len(written) > len(scored):
            ready = written[len(scored) : len(scored) + wanted] if wanted == MANY else []
            if ready and (len(ready) == MANY or len(written) == COUNT):
                leases = [m.ScoringLease(f"s-{lease}", 0, 0, lease, 8000) for lease in ready]
                conductor.send("teacher-0", m.ScoringLeases([store], leases))
                wanted = 0
    assert len(set(written)) == len(set(scored)) == COUNT
    for name, lease_ids in (("rollout-0", written), ("teacher-0", scored)):
        for first in range(0, COUNT, 64):
            conductor.send(name, m.Release(lease_ids[first : first + 64]))
    for name in ("rollout-0", "teacher-0"):
        conductor.send(name, m.Stop("done"))
    while conductor.peers:
        conductor.receive(0.05)
    for worker in workers:
        worker.join()
    assert [worker.exitcode for worker in workers] == [0, 0]

    assert not any(name.startswith("refused") for name in conductor.counters)
    total = conductor.counters["bytes_received"] + conductor.counters["bytes_sent"]  # heartbeats included
    assert total / COUNT <= 1024, total / COUNT
