"""Published versions: how they are kept, how long, in how much memory, and what is said when they cannot be had."""

from __future__ import annotations

import msgspec
import pytest
import torch

from tests.engines.writing import make_decoder
from tests.helpers.weights import Ends, answers, engine_on, holds
from titan_opd.channel import ChannelError
from titan_opd.errors import StorageError
from titan_opd.weights.errors import TransferError
from titan_opd.weights.manifest import ManifestRecord
from titan_opd.weights.transports import shared_memory

TRANSPORTS = ("in_process", "shared_memory", "channel")


@pytest.fixture(params=TRANSPORTS)
def ends(request, tmp_path):
    with Ends(request.param, tmp_path) as ends:
        yield ends


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_an_engine_gets_each_version_in_place(ends, tied):
    shape = {"tie_word_embeddings": tied}
    engine = engine_on(0, **shape)
    storage = [value.data_ptr() for value in engine._decoder.parameters()]
    receiver = ends.receiver()
    for version, seed in ((1, 1), (2, 2), (3, 3)):
        decoder = make_decoder(seed=seed, **shape)
        ends.publish(decoder, version)
        receiver.take(engine, ends.store.address, version)
        assert holds(engine, decoder)
        # Against a fresh engine: going there and back would not show a copy left behind.
        assert answers(engine) == answers(engine_on(seed, **shape)) != answers(engine_on(seed - 1, **shape))
        assert engine.policy_version == version
    assert storage == [value.data_ptr() for value in engine._decoder.parameters()]


def test_the_newest_two_versions_can_be_had(ends):
    for version in (1, 2, 3):
        ends.publish(make_decoder(seed=version), version)
    for version in (2, 3):
        engine = engine_on(0)
        ends.take(engine, version)
        assert holds(engine, make_decoder(seed=version))
    engine = engine_on(0)
    with pytest.raises(ChannelError, match="no payload 'manifest-1'"):
        ends.take(engine, 1)
    assert answers(engine) == answers(engine_on(0))


def test_a_version_that_is_forgotten_under_way_leaves_a_clear_state(ends):
    """The manifest has come when the bytes go away."""
    ends.publish(make_decoder(seed=1), 1)
    receiver, engine = ends.receiver(), engine_on(0)
    fetch = receiver._fetcher.fetch

    def fetch_and_forget(address, key, *rest, **options):
        record = fetch(address, key, *rest, **options)
        if key == "manifest-1":
            ends.outlet.forget(1)
        return record

    receiver._fetcher.fetch = fetch_and_forget
    with pytest.raises(TransferError, match="version 1"):
        receiver.take(engine, ends.store.address, 1)
    assert answers(engine) == answers(engine_on(0))


def test_the_publisher_of_one_process_holds_nothing_beside_the_published_copy(ends):
    ends.publish(make_decoder(seed=1), 1)
    assert ends.publisher.source.peak_bytes == 0
    copy = sum(value.numel() * 2 for value in make_decoder().parameters())
    assert copy <= sum(ends.manifest.buckets) <= copy + 64 * len(ends.manifest.tensors)


def test_a_wrong_transport_is_an_error_not_another_way(tmp_path):
    with Ends("channel", tmp_path) as ends:
        ends.publish(make_decoder(seed=1), 1)
        receiver = ends.receiver(transport="shared_memory")
        with pytest.raises(TransferError, match="'shared_memory': the trainer offers channel for version 1"):
            receiver.take(engine_on(0), ends.store.address, 1)


def test_auto_takes_the_way_with_the_fewest_copies(tmp_path):
    for transport in TRANSPORTS:
        with Ends(transport, tmp_path) as ends:
            ends.publish(make_decoder(seed=1), 1)
            receiver = ends.receiver(transport="auto")
            receiver.take(engine_on(0), ends.store.address, 1)
            assert receiver.transport == transport


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tensors": "of another type"}, "'model.embed_tokens.weight' is of type 'complex64'"),
        ({"buckets": [10]}, "lies outside its bucket"),
        ({"version": -1}, "no manifest of weights that can be read"),
        ({"tensors": "twice"}, "names a tensor twice"),
    ],
)
def test_a_manifest_that_contradicts_itself_is_refused(tmp_path, change, message):
    with Ends("in_process", tmp_path) as ends:
        ends.publish(make_decoder(), 1)
        tensors = ends.manifest.tensors
        if change == {"tensors": "twice"}:
            change = {"tensors": [*tensors, tensors[0]]}
        elif change == {"tensors": "of another type"}:
            change = {"tensors": [msgspec.structs.replace(tensors[0], dtype="complex64"), *tensors[1:]]}
        record = ManifestRecord.of(msgspec.structs.replace(ends.manifest, **change))
    with pytest.raises(ChannelError, match=message):
        record.manifest()


# ---- Files in memory -------------------------------------------------------------------------------------------------


def test_no_room_is_an_error_not_a_killed_process(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shared_memory.os, "posix_fallocate", full)
    with Ends("shared_memory", tmp_path) as ends, pytest.raises(StorageError, match=r"--shm-size.*'channel'"):
        ends.publish(make_decoder(), 1)


def test_files_are_the_users_alone_and_gone_afterwards(tmp_path):
    with Ends("shared_memory", tmp_path) as ends:
        ends.publish(make_decoder(), 1)
        folder = tmp_path / "weights"
        assert folder.stat().st_mode & 0o777 == 0o700
        assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o600}
        for version in (2, 3):
            ends.publish(make_decoder(), version)
        assert {path.name.partition("-")[0] for path in folder.iterdir()} == {"2", "3"}
    assert not folder.exists()


def test_what_a_killed_trainer_left_is_cleared(tmp_path):
    folder = tmp_path / "weights"
    folder.mkdir()
    (folder / "7-0").write_bytes(b"x" * 100)
    with Ends("shared_memory", tmp_path) as ends:
        ends.publish(make_decoder(seed=1), 7)
        engine = engine_on(0)
        ends.take(engine, 7)
        assert holds(engine, make_decoder(seed=1))


def test_a_mapped_bucket_outlives_its_file(tmp_path):
    with Ends("shared_memory", tmp_path) as ends:
        ends.publish(make_decoder(), 1)
        inlet = shared_memory.SharedMemoryInlet()
        (first,) = inlet.buckets(ends.manifest, range(1), ends.manifest.offers["shared_memory"], None)
        kept = first.clone()
        ends.outlet.forget(1)
        assert torch.equal(first, kept)


def test_auto_leaves_files_of_another_machine_alone(tmp_path):
    with Ends("shared_memory", tmp_path) as ends:
        ends.publish(make_decoder(), 1)
        offer = ends.manifest.offers["shared_memory"]
        inlet = shared_memory.SharedMemoryInlet()
        assert inlet.can_read(ends.manifest, offer)
        assert not inlet.can_read(msgspec.structs.replace(ends.manifest, machine="another"), offer)
        ends.outlet.forget(1)
        assert not inlet.can_read(ends.manifest, offer)
