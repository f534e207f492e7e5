"""Garbage thrown at a live conductor and a live store, while a good worker goes on as if nothing were."""

from __future__ import annotations

import os
import socket

import msgspec
import pytest
import zmq
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.unit.channel.ends import PATIENCE, Ends, make_hello, next_said
from titan_opd.channel import PayloadFetcher, PayloadStore
from titan_opd.channel import messages as m
from titan_opd.channel.conductor_port import CUT_OFF_BYTES
from titan_opd.channel.wire import decode, encode
from titan_opd.losses import TeacherScores


@pytest.fixture
def scene(tmp_path):
    """A conductor on TCP with a good worker."""
    with Ends("tcp", tmp_path) as ends:
        conductor = ends.conductor()
        worker = ends.worker(conductor)
        yield ends, conductor, worker


def refusals(conductor):
    return sum(count for name, count in conductor.counters.items() if name.startswith("refused."))


def goes_on(conductor, worker, number):
    """The good worker and the conductor hear each other."""
    worker.send(m.EngineVersion(number))
    assert next_said(conductor, m.EngineVersion) == m.EngineVersion(number)
    conductor.send("rollout-0", m.Release([str(number)]))
    assert worker.receive(PATIENCE) == m.Release([str(number)])
    assert set(conductor.peers) == {"rollout-0"}


VALID = [encode(message) for message in (make_hello(protocol=2), m.WantSamples(3), m.Heartbeat(0.0), m.Stop("x"))]
damaged = st.builds(
    lambda frame, position, flip: frame[: position % len(frame)] + bytes([flip]) + frame[position % len(frame) + 1 :],
    st.sampled_from(VALID),
    st.integers(0, 1000),
    st.integers(0, 255),
)
cut = st.builds(lambda frame, length: frame[: length % len(frame)], st.sampled_from(VALID), st.integers(0, 1000))
wrong_types = st.builds(
    msgspec.msgpack.encode,
    st.fixed_dictionaries(
        {"type": st.sampled_from(["Hello", "WantSamples", "Report", "Nothing"]), "capacity": st.text() | st.floats()}
    ),
)
frames_of_garbage = st.lists(st.binary(max_size=300) | damaged | cut | wrong_types, min_size=1, max_size=4)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(garbage=st.lists(frames_of_garbage, min_size=1, max_size=5))
def test_garbage_is_refused_and_the_good_worker_goes_on(scene, garbage):
    _, conductor, worker = scene
    before = refusals(conductor)
    with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
        stranger.linger = 0
        stranger.connect(conductor.address.endpoint)
        for frames in garbage:
            stranger.send_multipart(frames)
        while refusals(conductor) < before + len(garbage):  # each is counted
            conductor.receive(0.01)
        assert stranger.poll(round(PATIENCE * 1000))
        assert isinstance(decode(stranger.recv_multipart(), "conductor"), m.Refused)
    goes_on(conductor, worker, before)


def test_a_message_above_the_limit_is_refused_and_a_larger_one_cuts_its_sender_off(scene, caplog):
    _, conductor, worker = scene
    before = conductor.counters["refused.malformed"]
    with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
        stranger.linger = 0
        monitor = stranger.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        stranger.connect(conductor.address.endpoint)
        stranger.send(bytes(m.MAX_HEADER_BYTES + 1))
        while conductor.counters["refused.malformed"] == before:
            conductor.receive(0.01)
        assert "a stranger at 127.0.0.1: a header of 262145 bytes; the most is 262144" in caplog.text
        assert not monitor.poll(0)
        stranger.send(bytes(CUT_OFF_BYTES + 1))
        assert monitor.poll(round(PATIENCE * 1000))
        stranger.disable_monitor()
    goes_on(conductor, worker, 1)


def test_sockets_that_do_not_speak_the_protocol_harm_nobody(scene):
    _, conductor, worker = scene
    host, port = conductor.address.endpoint.removeprefix("tcp://").split(":")
    sockets = []
    old_protocol = b"\x01\x00\x06\x00hello"  # of ZeroMQ, without any handshake
    half_a_greeting = b"\xff" + bytes(8) + b"\x7f" + os.urandom(60)
    for text in (b"GET / HTTP/1.1\r\n\r\n", os.urandom(5000), half_a_greeting, old_protocol, b""):
        plain = socket.create_connection((host, int(port)))
        sockets.append(plain)
        plain.sendall(text)
    goes_on(conductor, worker, 2)
    for plain in sockets:
        plain.close()
    goes_on(conductor, worker, 3)


def test_a_socket_of_another_pattern_is_refused(scene):
    _, conductor, worker = scene
    before = refusals(conductor)
    with zmq.Context() as context, context.socket(zmq.REQ) as stranger:
        stranger.linger = 0
        stranger.connect(conductor.address.endpoint)
        stranger.send(VALID[1])  # with an empty frame before it
        while refusals(conductor) == before:
            conductor.receive(0.01)
    goes_on(conductor, worker, 4)


def test_a_flood_does_not_keep_the_conductor_from_the_others(scene, caplog):
    _, conductor, worker = scene
    caplog.clear()
    count = 5000
    before = refusals(conductor)
    with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
        stranger.linger = 0
        stranger.sndhwm = 0
        stranger.connect(conductor.address.endpoint)
        for _ in range(count):
            stranger.send(b"garbage")
        goes_on(conductor, worker, 5)
        while refusals(conductor) < before + count:
            conductor.receive(0.01)
    goes_on(conductor, worker, 6)
    assert len(caplog.records) < 200  # the log is not flooded


def test_garbage_at_a_store_is_refused_and_its_consumers_go_on(scene):
    ends, _, _ = scene
    store = PayloadStore(ends.of_workers, name="rollout-0", capacity_bytes=1 << 20, consumer="nobody")
    ends.callback(store.close)
    store.put("a:1", TeacherScores(), timeout=0)
    fetcher = PayloadFetcher(ends.of_workers, name="teacher-0")
    ends.callback(fetcher.close)

    @settings(max_examples=60, deadline=None)
    @given(frames_of_garbage)
    def throw(frames):
        before = store.counters["refused"]
        with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
            stranger.linger = 1000
            stranger.connect(store.address.endpoint)
            stranger.send_multipart(frames)
            fetcher.fetch(store.address, "a:1", TeacherScores, timeout=PATIENCE)
            while store.counters["refused"] == before:
                fetcher.fetch(store.address, "a:1", TeacherScores, timeout=PATIENCE)

    throw()
