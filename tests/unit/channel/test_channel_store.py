"""The payload store and who fetches from it, over each transport."""

from __future__ import annotations

import threading
import time

import msgspec
import pytest
import torch

from tests.helpers.trajectories import make_trajectories
from tests.unit.channel.ends import PATIENCE
from titan_opd.channel import Address, ChannelError, PayloadFetcher, PayloadStore, RecordLimits
from titan_opd.channel.store import Fetch
from titan_opd.data.records import Trajectory
from titan_opd.losses import TeacherScores

SCORES = TeacherScores(ids=torch.arange(6).view(3, 2), logprobs=torch.rand(3, 2).bfloat16())


def block(size):
    return TeacherScores(hidden=torch.zeros(size, dtype=torch.uint8))


@pytest.fixture
def make_store(ends):
    def make(capacity_bytes=1 << 20, name="rollout-0", **options):
        store = PayloadStore(
            ends.of_workers, name=name, capacity_bytes=capacity_bytes, consumer="the teacher workers", **options
        )
        ends.callback(store.close)
        return store

    return make


@pytest.fixture
def fetcher(ends):
    fetcher = PayloadFetcher(ends.of_workers, name="teacher-0")
    ends.callback(fetcher.close)
    return fetcher


def test_what_was_put_is_fetched_until_it_is_released(make_store, fetcher):
    store = make_store()
    trajectory = make_trajectories(1, vocab_size=50, num_samples=3)[0]
    size = store.put("a:1", trajectory, timeout=0)
    store.put("a:2", SCORES, timeout=0)
    assert store.keys == ["a:1", "a:2"]
    for _ in range(2):  # fetching takes nothing away
        got = fetcher.fetch(store.address, "a:1", Trajectory, timeout=PATIENCE)
        assert torch.equal(got.sampled_logprobs, trajectory.sampled_logprobs)
        assert got.prompt.id == trajectory.prompt.id
    before = store.num_bytes
    store.release(["a:1", "unknown", "a:1"])
    assert store.num_bytes == before - size
    with pytest.raises(ChannelError, match=r"teacher-0: payload 'a:1' cannot be fetched: store at .* no payload 'a:1'"):
        fetcher.fetch(store.address, "a:1", Trajectory, timeout=PATIENCE)
    assert fetcher.fetch(store.address, "a:2", TeacherScores, timeout=PATIENCE).logprobs.dtype is torch.bfloat16
    store.release(["a:2"])
    assert store.num_bytes == 0


def test_large_payloads_arrive_whole(make_store, fetcher):
    store = make_store(capacity_bytes=1 << 28)
    hidden = torch.randint(256, (20_000_001,), dtype=torch.uint8)
    store.put("a:1", TeacherScores(hidden=hidden), timeout=0)
    assert torch.equal(fetcher.fetch(store.address, "a:1", TeacherScores, timeout=PATIENCE).hidden, hidden)


def test_several_fetch_from_several(make_store, ends):
    stores = [make_store(name=f"rollout-{number}") for number in range(3)]
    for number, store in enumerate(stores):
        for key in range(20):
            store.put(f"a:{key}", TeacherScores(ids=torch.tensor([number, key])), timeout=0)
    failures = []

    def fetch_all(name):
        fetcher = PayloadFetcher(ends.of_workers, name=name)
        for number, store in enumerate(stores):
            for key in range(20):
                got = fetcher.fetch(store.address, f"a:{key}", TeacherScores, timeout=PATIENCE)
                if got.ids.tolist() != [number, key]:
                    failures.append((name, number, key))
        fetcher.close()

    threads = [threading.Thread(target=fetch_all, args=(f"rank-{rank}",)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert [store.counters["fetched"] for store in stores] == [60, 60, 60]


def test_a_full_store_waits_for_a_release(make_store):
    store = make_store(capacity_bytes=1000)
    store.put("a:1", block(700), timeout=0)
    put = threading.Thread(target=lambda: store.put("a:2", block(700), timeout=PATIENCE))
    put.start()
    time.sleep(0.1)
    assert store.keys == ["a:1"]
    store.release(["a:1"])
    put.join(PATIENCE)
    assert store.keys == ["a:2"]


def test_a_store_that_stays_full_says_who_does_not_consume(make_store, fetcher):
    store = make_store(capacity_bytes=1000)
    store.put("a:1", block(700), timeout=0)
    with pytest.raises(ChannelError, match=r"rollout-0: no room .* 'a:1', .* never fetched: the teacher workers"):
        store.put("a:2", block(700), timeout=0.1)
    fetcher.fetch(store.address, "a:1", TeacherScores, timeout=PATIENCE)
    with pytest.raises(ChannelError, match="fetched by teacher-0 and not released"):
        store.put("a:2", block(700), timeout=0.1)
    assert store.keys == ["a:1"]


def test_what_can_never_be_stored_is_refused_at_once(make_store):
    store = make_store(capacity_bytes=1000)
    with pytest.raises(ValueError, match="larger than the whole store of rollout-0"):
        store.put("a:1", block(1000), timeout=PATIENCE)
    store.put("a:1", block(10), timeout=0)
    with pytest.raises(ValueError, match="has a payload 'a:1' already"):
        store.put("a:1", block(10), timeout=PATIENCE)
    with pytest.raises(ValueError, match="holds nothing"):
        make_store(capacity_bytes=0)


def test_a_payload_of_another_type_names_the_store(make_store, fetcher):
    store = make_store()
    store.put("a:1", SCORES, timeout=0)
    with pytest.raises(ChannelError, match=r"store at .*: no valid Trajectory \(it is a 'TeacherScores'\)"):
        fetcher.fetch(store.address, "a:1", Trajectory, timeout=PATIENCE)
    fetcher.fetch(store.address, "a:1", TeacherScores, timeout=PATIENCE)  # over a connection made anew


def test_a_payload_above_the_fetchers_limit_is_refused(make_store, ends):
    store = make_store(capacity_bytes=8 << 20)
    store.put("a:1", block(3 << 20), timeout=0)
    store.put("a:2", block(1000), timeout=0)
    limited = PayloadFetcher(ends.of_workers, name="rank-0", limits=RecordLimits(frame_bytes=1 << 20))
    ends.callback(limited.close)
    with pytest.raises(ChannelError, match=r"payload 'a:1' cannot be fetched: .* lost"):
        limited.fetch(store.address, "a:1", TeacherScores, timeout=PATIENCE)
    assert limited.fetch(store.address, "a:2", TeacherScores, timeout=PATIENCE).hidden.shape == (1000,)


def test_a_store_that_closed_is_an_error_in_time(make_store, fetcher):
    store = make_store()
    store.put("a:1", SCORES, timeout=0)
    fetcher.fetch(store.address, "a:1", TeacherScores, timeout=PATIENCE)
    store.close()
    with pytest.raises(ChannelError, match="the connection is lost"):
        fetcher.fetch(store.address, "a:1", TeacherScores, timeout=PATIENCE)
    with pytest.raises(ChannelError, match=r"within 0.2 s"):
        fetcher.fetch(store.address, "a:1", TeacherScores, timeout=PATIENCE, connect_timeout=0.2)


def test_a_producer_that_hangs_is_an_error_in_time(ends, fetcher):
    listener = ends.of_workers.listen_anywhere("hung", max_frame_bytes=1024)
    ends.callback(listener.close)
    with pytest.raises(ChannelError, match="no answer in time: the producer hangs"):
        fetcher.fetch(listener.address, "a:1", TeacherScores, timeout=0.3)


def test_an_answer_that_is_none_is_an_error(ends, fetcher):
    listener = ends.of_workers.listen_anywhere("strange", max_frame_bytes=1024)
    ends.callback(listener.close)

    def answer():
        request = listener.receive(PATIENCE)
        listener.send(request.route, [b"\x80\x04pickle"])

    thread = threading.Thread(target=answer)
    thread.start()
    with pytest.raises(ChannelError, match=r"store at .*: no answer that can be read"):
        fetcher.fetch(listener.address, "a:1", TeacherScores, timeout=PATIENCE)
    thread.join()


def test_an_answer_that_comes_late_is_not_taken_for_the_next(ends, fetcher):
    """The connection is dropped with the request, so that the late answer has no way to arrive."""
    listener = ends.of_workers.listen_anywhere("slow", max_frame_bytes=1024)
    ends.callback(listener.close)
    with pytest.raises(ChannelError, match="hangs"):
        fetcher.fetch(listener.address, "a:1", TeacherScores, timeout=0.2)
    first = listener.receive(PATIENCE)
    with pytest.raises(ChannelError, match="hangs"):
        fetcher.fetch(listener.address, "a:2", TeacherScores, timeout=0.2)
    second = listener.receive(PATIENCE)
    assert second.route != first.route
    with pytest.raises(ChannelError, match="left"):
        listener.send(first.route, [b"late"])


def test_requests_that_are_none_are_counted_and_harm_nobody(make_store, ends, fetcher):
    store = make_store()
    store.put("a:1", SCORES, timeout=0)
    dialer = ends.of_workers.dial(store.address, max_frame_bytes=1 << 20)
    ends.callback(dialer.close)
    dialer.wait_connected(PATIENCE)
    fetch = Fetch(1, 1, "a:1", "rank-0")
    for frames in ([b""], [b"x", b"y"], [b"\xff" * 100], [msgspec.msgpack.encode({"type": "Fetch"})]):
        dialer.send(frames)
    dialer.send([msgspec.msgpack.encode(msgspec.structs.replace(fetch, protocol=7))])
    answer = msgspec.msgpack.decode(dialer.receive(PATIENCE)[0])
    assert "it speaks protocol 1, rank-0 speaks 7" in answer["reason"]
    assert store.counters["refused"] == 4
    dialer.send([bytes(5000)])  # cut off
    with pytest.raises(ChannelError, match="lost"):
        dialer.receive(PATIENCE)
    fetcher.fetch(store.address, "a:1", TeacherScores, timeout=PATIENCE)


def test_an_address_of_another_transport_is_refused(ends, fetcher):
    if ends.kind == "in_process":
        with pytest.raises(ChannelError, match="nobody listened"):
            fetcher.fetch(Address("tcp://127.0.0.1:1"), "a:1", TeacherScores, timeout=0.1)
    else:
        key = ends.of_workers._keys.public if ends.kind == "curve" else ""
        with pytest.raises(ValueError, match="is no address"):
            fetcher.fetch(Address("local://store", key), "a:1", TeacherScores, timeout=0.1)
