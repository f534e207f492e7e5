"""Versions that travel as what changed: whoever has the base takes them, everybody else the whole tensors."""

from __future__ import annotations

import msgspec
import pytest
import torch

from tests.engines.writing import make_decoder
from tests.helpers.weights import DIGEST_ONLY, Ends, answers, engine_on, holds, nudged, weights_of
from tests.unit.weights.test_weight_faults import PackedEngine
from titan_opd.channel import ChannelError
from titan_opd.weights.errors import VerificationError
from titan_opd.weights.manifest import ManifestRecord
from titan_opd.weights.publisher import WeightPublisher
from titan_opd.weights.receiver import Checks
from titan_opd.weights.transports.shared_memory import bucket_file
from titan_opd.weights.verify import digest
from titan_opd.weights.version_delta import VersionDelta

NORM, EMBEDDING = "model.norm.weight", "model.embed_tokens.weight"


@pytest.fixture
def ends(tmp_path):
    with Ends("shared_memory", tmp_path, delta=True) as ends:
        yield ends


@pytest.mark.parametrize("transport", ["in_process", "shared_memory", "channel", "process_group"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_an_engine_follows_by_changes(tmp_path, transport, dtype):
    with Ends(transport, tmp_path, dtype=dtype, delta=True) as ends:
        engine, decoder = engine_on(0, dtype), make_decoder(seed=1)
        receiver = ends.receiver()
        taken = []
        for version in range(1, 5):
            ends.publish(decoder, version)
            receiver.take(engine, ends.store.address, version)
            taken.append(receiver.took_delta)
            assert holds(engine, decoder)
            assert engine.policy_version == version
            decoder = nudged(decoder, 0.05, seed=version, only="mlp" if version == 2 else "")
        assert taken == [False, True, True, True]


def test_the_answers_are_those_of_a_fresh_engine(ends):
    first, second = make_decoder(seed=1), nudged(make_decoder(seed=1), 0.1)
    engine, fresh, receiver = engine_on(0), engine_on(0), ends.receiver()
    for version, decoder in ((1, first), (2, second)):
        ends.publish(decoder, version)
        receiver.take(engine, ends.store.address, version)
    ends.take(fresh, 2)
    assert receiver.took_delta
    assert answers(engine) == answers(fresh)


def test_each_tensor_goes_as_what_is_smallest_and_is_counted(ends):
    decoder = make_decoder(seed=1)
    ends.publish(decoder, 1)
    assert ends.manifest.delta is None
    assert ends.publisher.metrics == {}
    changed = nudged(nudged(decoder, 0.05, only=EMBEDDING), 1.0, only=NORM)
    ends.publish(changed, 2)
    one, other = ends.manifest.delta.tensors
    assert (one.name, one.num_changed, one.is_whole) == (EMBEDDING, int(0.05 * 101 * 32), False)
    assert (other.name, other.num_changed, other.is_whole) == (NORM, 32, True)
    num_elements = sum(value.numel() for value in decoder.parameters())
    metrics = ends.publisher.metrics
    assert metrics.pop("seconds/weights_delta") > 0
    assert metrics == {
        "weights/changed_share": pytest.approx((one.num_changed + 32) / num_elements),
        "weights/delta_share": pytest.approx((8 + 4 * one.num_changed + 2 * 32) / (2 * num_elements)),
        "weights/tensors_unchanged": len(ends.manifest.tensors) - 2,
        "weights/tensors_sparse": 1,
        "weights/tensors_whole": 1,
    }


@pytest.mark.parametrize(("num_changed", "kind"), [(0, "unchanged"), (1, "sparse"), (20, "sparse"), (21, "whole")])
def test_a_tensor_goes_whole_above_a_fifth(num_changed, kind):
    old, new = torch.zeros(100), torch.zeros(100)
    new[:num_changed] = 1
    metrics = VersionDelta({"w": old}, {"w": new}).metrics()
    assert {name: metrics[f"weights/tensors_{name}"] for name in ("unchanged", "sparse", "whole")} == {
        name: int(name == kind) for name in ("unchanged", "sparse", "whole")
    }


def test_a_version_that_is_the_same_brings_no_byte(ends):
    engine, receiver = engine_on(0), ends.receiver()
    for version in (1, 2):
        ends.publish(make_decoder(seed=1), version)
        receiver.take(engine, ends.store.address, version)
    assert receiver.took_delta
    assert len(ends.manifest.delta_buckets) == 0
    assert holds(engine, make_decoder(seed=1))
    assert engine.policy_version == 2


def test_changes_of_half_the_bytes_are_not_published(ends):
    for version in (1, 2):
        ends.publish(make_decoder(seed=version), version)
    assert ends.manifest.delta is None
    assert ends.publisher.metrics["weights/delta_share"] > 0.5


def test_who_does_not_have_the_base_takes_whole_tensors(ends):
    decoders = [make_decoder(seed=1)]
    for seed in range(3):
        decoders.append(nudged(decoders[-1], 0.05, seed=seed))
    fresh, late = engine_on(0), engine_on(0)
    late_receiver = ends.receiver()
    for version, decoder in enumerate(decoders[:3], start=1):
        ends.publish(decoder, version)
        if version == 1:
            late_receiver.take(late, ends.store.address, version)
    for engine, receiver in ((fresh, ends.receiver()), (late, late_receiver)):
        receiver.take(engine, ends.store.address, 3)
        assert not receiver.took_delta
        assert holds(engine, decoders[2])
    ends.publish(decoders[3], 4)  # from here on it follows
    late_receiver.take(late, ends.store.address, 4)
    assert late_receiver.took_delta
    assert holds(late, decoders[3])


def test_the_number_of_the_base_is_not_enough(tmp_path):
    """An engine of a run that was continued from before: version 1 has come twice, with other weights."""
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
    with (
        Ends("in_process", tmp_path / "one", delta=True) as one,
        Ends("in_process", tmp_path / "other", delta=True) as other,
    ):
        engine, receiver = engine_on(0), one.receiver()
        one.publish(make_decoder(seed=1), 1)
        receiver.take(engine, one.store.address, 1)
        continued = other.receiver()
        continued._previous = receiver._previous
        for version, decoder in ((1, make_decoder(seed=2)), (2, nudged(make_decoder(seed=2), 0.05))):
            other.publish(decoder, version)
        continued.take(engine, other.store.address, 2)
        assert not continued.took_delta
        assert holds(engine, decoder)


def delta_bytes(ends):
    """The memory of the changes of the newest version, as every process sees it."""
    (index,) = ends.manifest.delta_buckets
    path = bucket_file(ends.outlet._folder, ends.manifest.version, index)
    return torch.empty(0, dtype=torch.uint8).set_(
        torch.UntypedStorage.from_file(str(path), shared=True, nbytes=ends.manifest.buckets[index])
    )


@pytest.mark.parametrize("part", ["count", "value", "offset", "whole"])
def test_a_flipped_byte_is_refused_and_repaired_by_whole_tensors(ends, part):
    engine, receiver = engine_on(0), ends.receiver()
    decoder = make_decoder(seed=1)
    ends.publish(decoder, 1)
    receiver.take(engine, ends.store.address, 1)
    decoder = nudged(nudged(decoder, 0.05, only=EMBEDDING), 1.0, only=NORM)
    ends.publish(decoder, 2)
    sparse, whole = ends.manifest.delta.tensors
    place = {
        "count": sparse.begin,
        "value": sparse.begin + 8 + 3,
        "offset": sparse.begin + 8 + 2 * sparse.num_changed + 4,
        "whole": whole.begin + 5,
    }[part]
    delta_bytes(ends)[place] ^= 1
    wrong = NORM if part == "whole" else EMBEDDING
    expected = ChannelError if part == "count" else VerificationError
    with pytest.raises(expected, match=wrong):
        receiver.take(engine, ends.store.address, 2)
    if part == "count":  # found before a byte was written
        assert engine.is_serving
        assert engine.policy_version == 1
    else:
        with pytest.raises(ValueError, match="incomplete weight update"):
            answers(engine)
    receiver.take(engine, ends.store.address, 2)
    assert not receiver.took_delta
    assert holds(engine, decoder)
    ends.publish(nudged(decoder, 0.01, seed=1), 3)
    receiver.take(engine, ends.store.address, 3)
    assert receiver.took_delta


def test_an_engine_whose_storage_is_not_its_base_is_found(ends):
    """The digests are those of the whole tensors, so a fault in what the changes leave alone shows."""
    engine, receiver, decoder = engine_on(0), ends.receiver(), make_decoder(seed=1)
    ends.publish(decoder, 1)
    receiver.take(engine, ends.store.address, 1)
    weights_of(engine)[NORM][3] += 1
    ends.publish(nudged(decoder, 0.05, only="mlp"), 2)
    with pytest.raises(VerificationError, match=f"1 of 21 .*'{NORM}'"):
        receiver.take(engine, ends.store.address, 2)


# ---- Engines that take whole parameters only -------------------------------------------------------------------------


def test_an_engine_that_takes_whole_parameters_gets_them_from_a_mirror(ends):
    engine, receiver = PackedEngine(engine_on(0).weight_specs()), ends.receiver()
    decoder = make_decoder(seed=1)
    for version in range(1, 4):
        ends.publish(decoder, version)
        receiver.take(engine, ends.store.address, version)
        assert receiver.took_delta is (version > 1)
        for name, value in decoder.named_parameters():
            assert torch.equal(engine.packed[name], value.bfloat16().flip(0)), name
        decoder = nudged(decoder, 0.05, seed=version)


def test_changes_that_fail_leave_the_mirrored_engine_in_service(ends):
    engine, receiver = PackedEngine(engine_on(0).weight_specs()), ends.receiver()
    decoder = make_decoder(seed=1)
    ends.publish(decoder, 1)
    receiver.take(engine, ends.store.address, 1)
    before = {name: digest(value) for name, value in engine.packed.items()}
    decoder = nudged(decoder, 0.05, only=EMBEDDING)
    ends.publish(decoder, 2)
    delta_bytes(ends)[0] ^= 1
    with pytest.raises(ChannelError, match="contradict their number"):
        receiver.take(engine, ends.store.address, 2)
    assert {name: digest(value) for name, value in engine.packed.items()} == before
    receiver.take(engine, ends.store.address, 2)
    assert not receiver.took_delta
    assert torch.equal(engine.packed[EMBEDDING], dict(decoder.named_parameters())[EMBEDDING].bfloat16().flip(0))


# ---- What is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_changed": 101 * 32 + 1}, "which has fewer"),
        ({"name": "another"}, "which has fewer"),
        ({"begin": 1 << 20}, "lie outside their bucket"),
        ({"bucket": 0}, "lie outside their bucket"),
        ({"num_changed": 0}, "no manifest of weights that can be read"),
    ],
)
def test_a_manifest_whose_changes_contradict_it_is_refused(ends, change, message):
    decoder = make_decoder(seed=1)
    for version, one in ((1, decoder), (2, nudged(decoder, 0.05, only=EMBEDDING))):
        ends.publish(one, version)
    delta = ends.manifest.delta
    for entries in ([msgspec.structs.replace(delta.tensors[0], **change)], delta.tensors * 2):
        spoilt = msgspec.structs.replace(delta, tensors=entries)
        record = ManifestRecord.of(msgspec.structs.replace(ends.manifest, delta=spoilt))
        with pytest.raises(ChannelError, match=message if len(entries) == 1 else "name a tensor twice"):
            record.manifest()


def test_changes_need_digests(ends):
    with pytest.raises(ValueError, match="changes need digests"):
        WeightPublisher(None, [ends.outlet], None, bucket_bytes=1, digests=False, delta=True)
    with pytest.raises(ValueError, match="changes need digests"):
        ends.receiver(Checks(digest=False, probe=True))
    ends.receiver(DIGEST_ONLY).close()
