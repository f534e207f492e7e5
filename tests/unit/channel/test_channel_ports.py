"""The conductor's and the workers' ends, over each transport."""

from __future__ import annotations

import threading
import time

import pytest
from msgspec import msgpack, structs

import titan_opd
from tests.unit.channel.ends import PATIENCE, QUICK, make_hello, next_event, next_said
from titan_opd.channel import (
    Address,
    ChannelError,
    Joined,
    Left,
    PortLimits,
    RefusedError,
    WorkerPort,
)
from titan_opd.channel import messages as m
from titan_opd.channel.conductor_port import CUT_OFF_BYTES
from titan_opd.channel.transport import QUEUE_LENGTH
from titan_opd.channel.wire import decode, encode

LEASES = m.SampleLeases([m.SampleLease("a:1", 17, 0, 1, 5, 2)])


def test_a_worker_joins_talks_and_says_goodbye(ends):
    conductor = ends.conductor()
    worker = ends.worker(conductor)
    assert Joined("rollout-0", conductor.peers["rollout-0"]) in ends.heard

    worker.send(m.WantSamples(3))
    assert next_said(conductor, m.WantSamples) == m.WantSamples(3)
    conductor.send("rollout-0", LEASES)
    assert worker.receive(PATIENCE) == LEASES
    assert worker.receive(0.0) is None

    worker.close("tired")
    assert next_event(conductor, Left) == Left("rollout-0", "it said goodbye: tired")
    assert conductor.peers == {}


def test_messages_keep_their_order_in_both_directions(ends):
    conductor = ends.conductor()
    worker = ends.worker(conductor)
    for version in range(100):
        worker.send(m.EngineVersion(version))
    assert [next_said(conductor, m.EngineVersion).version for _ in range(100)] == list(range(100))
    for number in range(100):
        conductor.send("rollout-0", m.Release([str(number)]))
    assert [worker.receive(PATIENCE).leases for _ in range(100)] == [[str(number)] for number in range(100)]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"protocol": 99}, "with protocol 99, the conductor .* with protocol 1; install the same version"),
        ({"package_version": "0.0.1"}, "it has titan_opd 0.0.1 .* install the same version everywhere"),
        ({"vocabulary_digest": "ffff"}, r"vocabulary \(digest ffff\) is not the run's \(a1\); give it the run's token"),
        ({"model_digest": ""}, r"model \(digest none\) is not the run's \(c3\); give it the run's rollout model"),
        ({"prompts_digest": "ff"}, r"prompts \(digest ff\) is not the run's \(b2\)"),
    ],
)
def test_a_worker_that_does_not_fit_is_refused_with_the_reason(ends, changes, reason):
    conductor = ends.conductor()
    with pytest.raises(RefusedError, match=reason):
        ends.worker(conductor, make_hello(**changes))
    assert conductor.peers == {}
    assert conductor.counters["refused.refused_hello"] == 1


@pytest.mark.parametrize(("skew", "reason"), [(-3.0, "3.* s behind"), (3.0, "[23].* s ahead of")])
def test_a_worker_whose_clock_is_wrong_is_refused(ends, monkeypatch, skew, reason):
    conductor = ends.conductor(structs_replace(QUICK, clock_skew_seconds=1.0))
    monkeypatch.setattr(
        "titan_opd.channel.worker_port.hello_now", lambda hello: structs.replace(hello, wall_time=time.time() + skew)
    )
    with pytest.raises(RefusedError, match=f"{reason} the conductor's, the limit is 1 s; set both by NTP"):
        ends.worker(conductor)


def structs_replace(limits, **changes):
    return PortLimits(**(vars(limits) | changes))


def test_a_clock_that_says_nothing_is_wrong_too(ends, monkeypatch):
    conductor = ends.conductor()
    monkeypatch.setattr(
        "titan_opd.channel.worker_port.hello_now", lambda hello: structs.replace(hello, wall_time=float("nan"))
    )
    with pytest.raises(RefusedError, match="nan"):
        ends.worker(conductor)


def test_a_name_is_taken_until_its_worker_leaves(ends):
    conductor = ends.conductor()
    first = ends.worker(conductor)
    with pytest.raises(RefusedError, match="'rollout-0' is taken by a worker that is connected; choose another"):
        ends.worker(conductor)
    first.send(m.WantSamples(1))
    assert next_said(conductor, m.WantSamples) == m.WantSamples(1)  # the first one works on
    first.close()
    next_event(conductor, Left)
    ends.worker(conductor)
    assert set(conductor.peers) == {"rollout-0"}


def test_the_number_of_workers_is_bounded(ends):
    conductor = ends.conductor(structs_replace(QUICK, peers=1))
    ends.worker(conductor)
    with pytest.raises(RefusedError, match="there are 1 workers"):
        ends.worker(conductor, make_hello(name="rollout-1"))


def test_a_teacher_needs_no_prompts_but_its_own_model(ends):
    conductor = ends.conductor()
    ends.worker(conductor, make_hello("teacher", "teacher-0", prompts_digest="ff"))
    with pytest.raises(RefusedError, match="give it the run's teacher model"):
        ends.worker(conductor, make_hello("teacher", "teacher-1", model_digest="c3"))


def test_what_a_role_does_not_say_is_refused_and_the_others_go_on(ends):
    conductor = ends.conductor()
    bad = ends.worker(conductor, make_hello(name="bad"))
    good = ends.worker(conductor, make_hello("teacher", "good"))
    bad.send(m.BatchTrained(1))
    good.send(m.WantScoring(2))
    assert next_said(conductor, m.WantScoring) == m.WantScoring(2)
    while not conductor.counters["refused.unexpected"]:
        conductor.receive(0.05)
    with pytest.raises(RefusedError, match=r"bad at .*: a rollout does not say BatchTrained"):
        bad.receive(PATIENCE)
    assert set(conductor.peers) == {"bad", "good"}


def test_a_loop_that_hangs_shows_in_its_heartbeats(ends):
    conductor = ends.conductor()
    worker = ends.worker(conductor)
    first = next_said(conductor, m.Heartbeat)
    time.sleep(0.3)
    while next_said(conductor, m.Heartbeat).idle_seconds < first.idle_seconds + 0.25:
        pass
    worker.alive()
    assert next_said(conductor, m.Heartbeat) is not None
    while next_said(conductor, m.Heartbeat).idle_seconds > 0.25:
        worker.alive()


def test_a_silent_worker_leaves_and_hears_of_it_when_it_speaks_again(ends):
    conductor = ends.conductor(structs_replace(QUICK, silence_seconds=0.5))
    dialer = ends.of_workers.dial(conductor.address, max_frame_bytes=CUT_OFF_BYTES)
    ends.callback(dialer.close)
    dialer.wait_connected(PATIENCE)
    dialer.send([encode(make_hello(name="mute"))])
    assert isinstance(next_event(conductor, Left), Left)
    assert conductor.peers == {}
    dialer.send([encode(m.WantSamples(1))])
    while not conductor.counters["refused.unexpected"]:
        conductor.receive(0.05)
    answers = []
    while not any(isinstance(answer, m.Refused) for answer in answers):
        answers.append(decode(dialer.receive(PATIENCE), "conductor"))
    assert "connect anew" in answers[-1].reason


def test_a_conductor_that_was_busy_takes_nobody_for_silent(ends):
    conductor = ends.conductor(structs_replace(QUICK, silence_seconds=0.5))
    dialer = ends.of_workers.dial(conductor.address, max_frame_bytes=CUT_OFF_BYTES)
    ends.callback(dialer.close)
    dialer.wait_connected(PATIENCE)
    dialer.send([encode(make_hello())])
    next_event(conductor, Joined)
    dialer.send([encode(m.WantSamples(1))])
    time.sleep(0.6)
    assert next_said(conductor, m.WantSamples) == m.WantSamples(1)


def test_a_conductor_that_falls_silent_is_an_error_at_the_worker(ends):
    conductor = ends.conductor(structs_replace(QUICK, silence_seconds=0.5))
    worker = ends.worker(conductor)
    with pytest.raises(ChannelError, match=r"conductor: silent for 0.5 s"):  # nobody calls conductor.receive
        worker.receive(PATIENCE)
    with pytest.raises(ChannelError, match="silent"):
        worker.send(m.WantSamples(1))


def test_a_conductor_that_closes_is_an_error_at_the_worker_after_its_last_message(ends):
    conductor = ends.conductor()
    worker = ends.worker(conductor)
    conductor.send("rollout-0", m.Stop("the run is done"))
    conductor.close()
    assert worker.receive(PATIENCE) == m.Stop("the run is done")
    with pytest.raises(ChannelError, match="the connection is lost"):
        worker.receive(PATIENCE)


def test_no_conductor_is_an_error_in_time(ends):
    conductor = ends.conductor()
    address = conductor.address
    conductor.close()
    with pytest.raises(ChannelError, match=r"within 0.3 s"):
        WorkerPort.connect(ends.of_workers, address, make_hello(), timeout=0.3)


def test_a_conductor_that_listens_and_does_not_answer_is_an_error_in_time(ends):
    conductor = ends.conductor()
    with pytest.raises(ChannelError, match=r"no answer to Hello within 0.5 s"):
        WorkerPort.connect(ends.of_workers, conductor.address, make_hello(), timeout=0.5)


def test_a_worker_waits_for_a_conductor_that_starts_later(ends, tmp_path):

    probe = ends.conductor()
    address = probe.address
    probe.close()
    result = []
    hello = make_hello()
    thread = threading.Thread(
        target=lambda: result.append(WorkerPort.connect(ends.of_workers, address, hello, timeout=PATIENCE))
    )
    thread.start()
    time.sleep(0.2)
    conductor = ends.conductor(endpoint=address.endpoint)
    assert next_event(conductor, Joined).name == "rollout-0"
    thread.join(PATIENCE)
    ends.callback(result[0].close)


def test_a_worker_that_does_not_read_leaves_and_costs_bounded_memory(ends):
    conductor = ends.conductor()
    dialer = ends.of_workers.dial(conductor.address, max_frame_bytes=CUT_OFF_BYTES)
    ends.callback(dialer.close)
    dialer.wait_connected(PATIENCE)
    dialer.send([encode(make_hello(name="deaf"))])
    next_event(conductor, Joined)
    full = m.Release(["x" * 32] * m.MAX_ITEMS)
    sent = 0
    while not conductor.counters["undeliverable"] and sent < 10_000:
        conductor.send("deaf", full)
        sent += 1
    assert sent < 10_000
    left = next_event(conductor, Left)
    assert left.name == "deaf"
    assert "it does not read: its queue is full" in left.reason


def count_until_full(send):
    for sent in range(10_000):
        try:
            send()
        except ChannelError as error:
            assert "conductor: reads nothing for 0.2 s: 64 messages wait" in str(error)  # noqa: PT017
            return sent
    raise AssertionError("it takes messages without end")


def test_a_conductor_that_does_not_read_stops_the_worker(ends):
    conductor = ends.conductor()
    worker = ends.worker(conductor)
    done = m.LeasesReturned(["x" * 32] * m.MAX_ITEMS, "why")
    sent = count_until_full(lambda: worker.send(done, timeout=0.2))
    assert sent >= QUEUE_LENGTH
    for _ in range(sent):  # and nothing was lost
        assert next_said(conductor, m.LeasesReturned) == done


def test_a_worker_that_reads_late_loses_nothing(ends):
    conductor = ends.conductor()
    worker = ends.worker(conductor)
    count = 1000  # far more than all queues between the two
    for number in range(count):
        conductor.send("rollout-0", m.Release([str(number)]))
    end = time.monotonic() + 0.5
    while time.monotonic() < end:
        conductor.receive(0.05)
    got = []
    while len(got) < count:
        message = worker.receive(0.0)
        if message is None:
            conductor.receive(0.001)
        else:
            got.append(message.leases)
    assert got == [[str(number)] for number in range(count)]


def test_the_hello_of_another_protocol_gets_the_reason_whatever_else_it_says(ends):
    conductor = ends.conductor()
    dialer = ends.of_workers.dial(conductor.address, max_frame_bytes=CUT_OFF_BYTES)
    ends.callback(dialer.close)
    dialer.wait_connected(PATIENCE)
    dialer.send([msgpack.encode({"type": "Hello", "protocol": 2, "package_version": "9.9", "mood": "good"})])
    while not conductor.counters["refused.other_version"]:
        conductor.receive(0.05)
    answer = decode(dialer.receive(PATIENCE), "conductor")
    assert f"it has titan_opd 9.9 with protocol 2, the conductor {titan_opd.__version__}" in answer.reason


def test_a_message_for_who_has_left_is_counted(ends):
    conductor = ends.conductor()
    conductor.send("nobody", LEASES)
    assert conductor.counters["undeliverable"] == 1


def test_two_conductors_cannot_have_one_address(ends):
    conductor = ends.conductor()
    with pytest.raises(ValueError, match=f"{conductor.address.endpoint} is taken: .* choose another port or path"):
        ends.conductor(endpoint=conductor.address.endpoint)
    ends.worker(conductor)  # the first is unharmed


def test_an_address_is_free_again_after_close(ends):
    conductor = ends.conductor()
    endpoint = conductor.address.endpoint
    conductor.close()
    again = ends.conductor(endpoint=endpoint)
    assert again.address == Address(endpoint, conductor.address.public_key)
    ends.worker(again)


def test_limits_that_cannot_work_are_refused():
    with pytest.raises(ValueError, match="heartbeat_seconds = 30"):
        PortLimits(heartbeat_seconds=30.0, silence_seconds=30.0)
