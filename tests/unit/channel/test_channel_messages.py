"""Headers: what is written is read, what breaks a bound is refused, and a trajectory costs at most 1 KB."""

from __future__ import annotations

from typing import get_args

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.channel.ends import make_hello
from titan_opd.channel import Address, ChannelError
from titan_opd.channel import messages as m
from titan_opd.channel.wire import decode, encode, protocol_of_hello

LONG = (1 << 63) - 1
LEASE = "x" * 32
ADDRESS = Address("tcp://" + "h" * 108 + ":12345", "k" * 40)

LARGEST = {
    "hello": make_hello(name="n" * 64, store=ADDRESS),
    "welcome": m.Welcome(2.0, 30.0),
    "refused": m.Refused("r" * 2000),
    "heartbeat": m.Heartbeat(1.5),
    "goodbye": m.Goodbye("done"),
    "stop": m.Stop("done"),
    "engine_version": m.EngineVersion(LONG),
    "engine_failed": m.EngineFailed("half"),
    "want_samples": m.WantSamples(m.MAX_ITEMS),
    "sample_leases": m.SampleLeases([m.SampleLease("a:12345678", 1 << 32, 3, 7, 1 << 20, 999)] * m.MAX_ITEMS),
    "rollout_done": m.RolloutDone(LEASE, LONG, LONG, LONG, "length", LONG),
    "returned": m.LeasesReturned(["a:12345678"] * m.MAX_ITEMS, "why"),
    "cancelled": m.LeasesCancelled(["a:12345678"] * m.MAX_ITEMS),
    "want_scoring": m.WantScoring(1),
    "scoring_leases": m.ScoringLeases(
        [ADDRESS] * 256, [m.ScoringLease("a:12345678", 1 << 32, 255, "b:12345678", 1 << 16)] * m.MAX_ITEMS
    ),
    "scoring_done": m.ScoringDone(LEASE, LONG),
    "lost": m.PayloadLost(LEASE, "dead"),
    "release": m.Release([LEASE] * m.MAX_ITEMS),
    "next_batch": m.NextBatch(5),
    "waiting": m.Waiting("teacher", "deadline", [LONG] * 64, 12, 3.5),
    "batch": m.BatchAssignment(
        9, 7, [ADDRESS] * 256, [[m.BatchItem(1 << 32, 255, "a:12345678", 255, "b:12345678", 1 << 16)] * 64] * 64
    ),
    "trained": m.BatchTrained(9),
    "new_version": m.NewVersion(9, ADDRESS),
    "cut_request": m.CutRequest(),
    "cut": m.Cut(ADDRESS, LEASE),
    "batch_returned": m.BatchReturned(9, "lost"),
    "report_request": m.ReportRequest(),
    "report": m.Report({"version": 3, "waiting": None, "workers": [{"name": "w", "silent": 0.5}]}),
}


def test_every_message_is_here():
    assert {type(message) for message in LARGEST.values()} == set(get_args(m.AnyMessage))


@pytest.mark.parametrize("name", LARGEST)
def test_what_is_written_is_read_also_at_full_length(name):
    frame = encode(LARGEST[name])
    assert len(frame) <= m.MAX_HEADER_BYTES
    assert decode([frame], "peer") == LARGEST[name]
    assert decode([memoryview(frame)], "peer") == LARGEST[name]


def test_each_message_has_a_direction():
    heard = {kind for kinds in (*m.FROM_ROLE.values(), *m.TO_ROLE.values()) for kind in kinds}
    assert heard == set(get_args(m.AnyMessage)) - {m.Hello}  # which comes before anybody has a role


def test_a_trajectory_takes_at_most_a_kilobyte_of_headers():
    """Everything at its longest, each message for one sample only but for a batch of 64 from 16 stores; and the release
    of both payloads."""
    batch = [[m.BatchItem(LONG, LONG, LEASE, LONG, LEASE, LONG)] * 64]
    messages = (
        m.SampleLeases([m.SampleLease(LEASE, LONG, LONG, LONG, LONG, LONG)]),
        m.RolloutDone(LEASE, LONG, LONG, LONG, "length", LONG),
        m.ScoringLeases([ADDRESS], [m.ScoringLease(LEASE, LONG, LONG, LEASE, LONG)]),
        m.ScoringDone(LEASE, LONG),
        m.Release([LEASE]),
        m.Release([LEASE]),
    )
    of_batch = len(encode(m.BatchAssignment(LONG, LONG, [ADDRESS] * 16, batch))) / 64
    assert sum(len(encode(message)) for message in messages) + of_batch <= 1024


BROKEN = {
    "a field of another type": {"type": "NextBatch", "version": "five"},
    "a negative count": {"type": "NextBatch", "version": -1},
    "a count above 63 bits": {"type": "NextBatch", "version": 1 << 63},
    "an unknown field": {"type": "NextBatch", "version": 5, "extra": 1},
    "a missing field": {"type": "NextBatch"},
    "an unknown message": {"type": "Exec", "code": "1"},
    "no message": {"version": 5},
    "a list": [1, 2, 3],
    "nothing": None,
    "an item too long": {"type": "SampleLeases", "leases": [["a", 1, 2, 3, 4, 5, 6]]},
    "an item too short": {"type": "SampleLeases", "leases": [["a", 1]]},
    "too many items": {"type": "Release", "leases": ["a"] * (m.MAX_ITEMS + 1)},
    "an empty lease": {"type": "Release", "leases": [""]},
    "a name that is a path": msgspec.to_builtins(make_hello()) | {"type": "Hello", "name": "../../etc"},
    "a name with a line's end": msgspec.to_builtins(make_hello()) | {"type": "Hello", "name": "a\n"},
    "a digest that is none": msgspec.to_builtins(make_hello()) | {"type": "Hello", "model_digest": "<script>"},
    "not a number of seconds": {"type": "Heartbeat", "idle_seconds": float("nan")},
}


@pytest.mark.parametrize("what", BROKEN)
def test_what_breaks_a_bound_is_refused_with_its_sender(what):
    with pytest.raises(ChannelError, match="worker-7"):
        decode([msgspec.msgpack.encode(BROKEN[what])], "worker-7")


def test_frames_are_one_and_not_too_long():
    frame = encode(m.NextBatch(1))
    for frames in ([], [frame, frame], [frame, b""], [bytes(m.MAX_HEADER_BYTES + 1)]):
        with pytest.raises(ChannelError, match="peer: a header of"):
            decode(frames, "peer")


def test_nesting_without_end_is_refused():
    with pytest.raises(ChannelError):
        decode([b"\x82\xa4type\xa6Report\xa6report\x81\xa1a" + b"\x91" * 100_000], "peer")


@settings(max_examples=300)
@given(st.binary(max_size=200))
def test_random_bytes_are_no_message(data):
    with pytest.raises(ChannelError):
        decode([data], "peer")


@settings(max_examples=200)
@given(st.sampled_from(sorted(LARGEST)), st.data())
def test_a_cut_message_is_refused(name, data):
    frame = encode(LARGEST[name])
    length = data.draw(st.integers(0, len(frame) - 1))
    with pytest.raises(ChannelError):
        decode([frame[:length]], "peer")


def test_who_would_write_what_nobody_reads_is_told():
    with pytest.raises(ValueError, match="no valid NextBatch"):
        encode(m.NextBatch(-1))
    with pytest.raises(ValueError, match="no valid Report"):
        encode(m.Report({"text": "x" * m.MAX_HEADER_BYTES}))


def test_the_hello_of_another_protocol_is_understood_as_far_as_needed():
    future = {"type": "Hello", "protocol": 9, "package_version": "3.0", "colour": "blue"}
    assert protocol_of_hello([msgspec.msgpack.encode(future)]) == (9, "3.0")
    for frames in ([], [b"x"], [encode(m.NextBatch(1))], [b"a", b"b"], [bytes(m.MAX_HEADER_BYTES + 1)]):
        assert protocol_of_hello(frames) is None
