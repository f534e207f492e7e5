"""Every fault of an update is found, with the tensor, the version and the worker named, and leaves a clear state."""

from __future__ import annotations

import contextlib

import msgspec
import pytest
import torch

from tests.engines.writing import make_decoder, make_engine
from tests.helpers.weights import BUCKET_BYTES, DIGEST_ONLY, Ends, answers, engine_on, holds
from titan_opd.models import Decoder
from titan_opd.rollout import NativeEngine
from titan_opd.weights.direct import DirectDelivery
from titan_opd.weights.errors import LayoutError, TransferError, VerificationError
from titan_opd.weights.manifest import Probe
from titan_opd.weights.probe import probe_ids
from titan_opd.weights.receiver import Checks, put_in
from titan_opd.weights.source import WeightSource
from titan_opd.weights.verify import digest

EMBEDDING, NORM = "model.embed_tokens.weight", "model.norm.weight"
TWINS = ("model.layers.0.mlp.gate_proj.weight", "model.layers.0.mlp.up_proj.weight")


@pytest.fixture
def ends(tmp_path):
    with Ends("in_process", tmp_path) as ends:
        yield ends


def published(ends, seed, version):
    """Publish, and return the manifest and the buckets, to be spoilt."""
    ends.publish(make_decoder(seed=seed), version)
    return ends.manifest, [bucket.clone() for bucket in ends.local.published(version)]


def take(engine, manifest, buckets, *, previous=None, checks=DIGEST_ONLY):
    put_in(engine, manifest, iter(buckets), worker="rollout-0", checks=checks, previous=previous or {})


def place(manifest, buckets, name):
    """The bytes of a tensor."""
    (entry,) = [one for one in manifest.tensors if one.name == name]
    size = torch.Size(entry.shape).numel() * 2
    return buckets[entry.bucket][entry.begin : entry.begin + size]


def is_poisoned(engine):
    with pytest.raises(ValueError, match="incomplete weight update"):
        answers(engine)
    return not engine.is_serving


def test_a_sound_update_passes(ends):
    engine = engine_on(0)
    take(engine, *published(ends, 1, 1))
    assert holds(engine, make_decoder(seed=1))
    assert answers(engine) == answers(engine_on(1)) != answers(engine_on(0))


def test_a_corrupted_byte(ends):
    engine = engine_on(0)
    manifest, buckets = published(ends, 1, 3)
    place(manifest, buckets, NORM)[5] ^= 4
    with pytest.raises(VerificationError, match=rf"version 3 at rollout-0: 1 of 21 .*'{NORM}' differs"):
        take(engine, manifest, buckets)
    assert engine.policy_version == 0
    assert is_poisoned(engine)
    take(engine, *published(ends, 2, 4))  # a complete one heals it
    assert answers(engine) == answers(engine_on(2))


def test_a_swapped_pair_of_tensors(ends):
    engine = engine_on(0)
    manifest, buckets = published(ends, 1, 1)
    one, other = (place(manifest, buckets, name) for name in TWINS)
    kept = one.clone()
    one.copy_(other)
    other.copy_(kept)
    with pytest.raises(VerificationError) as failure:
        take(engine, manifest, buckets)
    for name, twin in (TWINS, TWINS[::-1]):
        assert f"'{name}' holds the bytes of '{twin}'" in str(failure.value)
    assert is_poisoned(engine)


def test_a_stale_bucket(ends):
    engine = engine_on(0)
    before, old = published(ends, 1, 1)
    take(engine, before, old)
    manifest, buckets = published(ends, 2, 2)
    index = next(one.bucket for one in manifest.tensors if one.name == TWINS[0])
    buckets[index] = old[index]
    with pytest.raises(
        VerificationError, match=rf"version 2 .*'{TWINS[0]}' has not changed: it holds the bytes of the"
    ):
        take(engine, manifest, buckets, previous=before.digests)
    assert is_poisoned(engine)


class DeafEngine(NativeEngine):
    """Says that it took the weights, raises its version, and keeps the old ones."""

    @contextlib.contextmanager
    def update_weights(self, version):
        with super().update_weights(version) as update:
            kept = {name: value.detach().clone() for name, value in self._decoder.named_parameters()}
            finish = update.finish

            def forget():
                finish()
                for name, value in self._decoder.named_parameters():
                    value.detach().copy_(kept[name])

            update.finish = forget
            yield update


def deaf_engine(seed):
    engine = engine_on(seed)
    engine.__class__ = DeafEngine
    return engine


def test_an_update_that_changes_nothing(ends):
    """FIELD 13: the version number moves, the weights do not."""
    before, old = published(ends, 0, 1)
    engine = deaf_engine(0)
    take(engine, before, old)  # these weights it has already
    with pytest.raises(VerificationError, match=rf"version 2 .*'{EMBEDDING}' has not changed"):
        take(engine, *published(ends, 1, 2), previous=before.digests)
    assert engine.policy_version == 1
    assert is_poisoned(engine)


def test_an_update_that_changes_nothing_is_found_in_direct_delivery():
    engine = deaf_engine(0)
    source = WeightSource(make_decoder(seed=1), dtype=torch.bfloat16, bucket_bytes=BUCKET_BYTES, timeout=5)
    delivery = DirectDelivery(source, worker="trainer-0", checks=DIGEST_ONLY)
    with pytest.raises(VerificationError, match=rf"version 1 at trainer-0: .*'{EMBEDDING}\[0:"):
        delivery.deliver(engine, 1)
    assert is_poisoned(engine)


def without(manifest, name):
    return msgspec.structs.replace(manifest, tensors=[one for one in manifest.tensors if one.name != name])


def changed(manifest, name, /, **changes):
    tensors = [msgspec.structs.replace(one, **changes) if one.name == name else one for one in manifest.tensors]
    return msgspec.structs.replace(manifest, tensors=tensors)


def renamed(manifest, name):
    return changed(manifest, name, name=f"{name}.lora")


def flattened(manifest, name):
    return changed(manifest, name, shape=[48 * 32])


def one_too_many(manifest, name):
    extra = msgspec.structs.replace(manifest.tensors[0], name="lm_head.bias")
    return msgspec.structs.replace(manifest, tensors=[*manifest.tensors, extra])


MISFITS = {
    without: rf"1 of 21 parameters are missing: '{TWINS[0]}'",
    renamed: rf"1 of 21 parameters are missing: '{TWINS[0]}'",
    flattened: rf"'{TWINS[0]}' is of shape \[1536\], the engine's \[48, 32\]",
    one_too_many: r"no parameter for 'lm_head\.bias'",
}


@pytest.mark.parametrize("misfit", MISFITS, ids=lambda misfit: misfit.__name__)
def test_what_does_not_fit_is_refused_before_a_byte_is_written(ends, misfit):
    """FIELD 13: names that do not match."""
    engine = engine_on(0)
    manifest, buckets = published(ends, 1, 1)
    with pytest.raises(LayoutError, match=f"version 1 do not fit the engine of rollout-0: .*{MISFITS[misfit]}"):
        take(engine, misfit(manifest, TWINS[0]), buckets)
    assert (engine.policy_version, engine.is_serving) == (0, True)
    assert answers(engine) == answers(engine_on(0))


def test_a_second_cast_is_refused(ends):
    """FIELD 16: what the engine stores must be made from the masters, not from another rounding of them."""
    engine = engine_on(0, torch.float16)
    with pytest.raises(LayoutError, match=r"was cast to torch\.bfloat16 and the engine stores torch\.float16"):
        take(engine, *published(ends, 1, 1))
    assert answers(engine) == answers(engine_on(0, torch.float16))


def test_the_engine_stores_the_masters_rounded_once(tmp_path):
    """FIELD 16: trainer and engine round the same bytes. bfloat16 of a float16 copy differs; the channel's does not."""
    decoder = make_decoder(seed=1)
    with Ends("in_process", tmp_path) as ends:
        engine = engine_on(0)
        ends.publish(decoder, 1)
        ends.take(engine, 1)
    assert holds(engine, decoder)
    assert not holds(engine, make_decoder(seed=1).half().float())


@pytest.mark.parametrize("written", [False, True], ids=["before the first bucket", "after it"])
def test_bytes_that_do_not_come(ends, written):
    engine = engine_on(0)
    manifest, buckets = published(ends, 1, 1)
    with pytest.raises(TransferError, match=rf"version 1 ends before bucket {int(written)} of {len(buckets)}, '"):
        take(engine, manifest, buckets[: int(written)])
    assert engine.is_serving is not written
    assert engine.policy_version == 0
    if written:
        assert is_poisoned(engine)
    else:
        assert answers(engine) == answers(engine_on(0))


# ---- Storage that cannot be read -------------------------------------------------------------------------------------


class PackedUpdate:
    """As of an engine that keeps rows in another order: what it stores is not what was sent."""

    def __init__(self, packed, faults):
        self.packed, self.faults, self.written = packed, faults, {}

    def write(self, pieces):
        for piece in pieces:
            self.written[piece.name] = digest(piece.tensor)
            if piece.name not in self.faults:
                self.packed[piece.name] = piece.tensor.flip(0)

    def finish(self):
        pass

    def stored(self, name):
        return None

    def written_digests(self):
        return self.written

    def fingerprint(self, name):
        return digest(self.packed[name]) if name in self.packed else None


class PackedEngine:
    takes_rows = False

    def __init__(self, specs):
        self.specs, self.packed, self.faults = specs, {}, set()

    def weight_specs(self):
        return self.specs

    @contextlib.contextmanager
    def update_weights(self, version):
        yield PackedUpdate(self.packed, self.faults)


def test_storage_that_cannot_be_read_must_at_least_change(ends):
    engine = PackedEngine(engine_on(0).weight_specs())
    before, old = published(ends, 0, 1)
    take(engine, before, old)
    after, new = published(ends, 1, 2)
    take(engine, after, new, previous=before.digests)
    engine.faults = {NORM}
    take(engine, after, new, previous=after.digests)  # nothing changed at the trainer either
    latest, newest = published(ends, 2, 3)
    # A norm is drawn as ones in every seed, so it never changes; the embedding does.
    take(engine, latest, newest, previous=after.digests)
    engine.faults = {EMBEDDING}
    with pytest.raises(
        VerificationError, match=rf"version 4 .*'{EMBEDDING}' changed at the trainer and not at the eng"
    ):
        take(engine, *published(ends, 3, 4), previous=latest.digests)


def test_an_engine_that_says_nothing_of_its_storage_is_not_believed(ends):
    engine = PackedEngine(engine_on(0).weight_specs())
    manifest, buckets = published(ends, 0, 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PackedUpdate, "written_digests", lambda self: {})
        with pytest.raises(VerificationError, match=f"does not say what it wrote for '{EMBEDDING}' and 20 more"):
            take(engine, manifest, buckets)


# ---- The probe -------------------------------------------------------------------------------------------------------


def probe_of(engine, tolerance=1e-3):
    ids = probe_ids(101)
    with engine.update_weights(engine.policy_version) as update:
        logprobs = update.logprobs(ids).tolist()
        update.is_finished = True
    return Probe(ids.tolist(), logprobs, tolerance)


PROBE_ONLY = Checks(digest=False, probe=True)


@pytest.mark.parametrize("seed", [1, 2])
def test_the_probe_knows_the_weights(tmp_path, seed):
    with Ends("in_process", tmp_path, dtype=torch.float32) as ends:
        ends.publish(make_decoder(seed=1), 1, probe=probe_of(engine_on(seed, torch.float32)))
        engine = engine_on(0, torch.float32)
        if seed == 1:
            ends.take(engine, 1, PROBE_ONLY)
            assert answers(engine) == answers(engine_on(1, torch.float32))
            return
        with pytest.raises(VerificationError, match="version 1 at rollout-0: log-probabilities of a fixed text of 32"):
            ends.take(engine, 1, PROBE_ONLY)
        assert is_poisoned(engine)


class StaleHead(Decoder):
    """Its output projection is a copy that updates do not reach: digests of the parameters see nothing wrong."""

    @property
    def lm_head_weight(self):
        return self.copied


def test_the_probe_sees_a_stale_copy_that_digests_do_not(tmp_path):
    tied = {"tie_word_embeddings": True}
    with Ends("in_process", tmp_path, dtype=torch.float32) as ends:
        ends.publish(make_decoder(seed=1, **tied), 1, probe=probe_of(engine_on(1, torch.float32, **tied)))
        for checks in (DIGEST_ONLY, Checks(digest=True, probe=True)):
            decoder = make_decoder(seed=0, **tied)
            decoder.copied = decoder.lm_head_weight.detach().clone()
            decoder.__class__ = StaleHead
            engine = make_engine(decoder)
            with contextlib.nullcontext() if checks is DIGEST_ONLY else pytest.raises(VerificationError, match="else"):
                ends.take(engine, 1, checks)
            assert engine.is_serving is (checks is DIGEST_ONLY)


def test_not_a_number_is_no_agreement(tmp_path):
    with Ends("in_process", tmp_path, dtype=torch.float32) as ends:
        decoder = make_decoder(seed=1)
        with torch.no_grad():
            decoder.model.norm.weight.fill_(torch.nan)
        ends.publish(decoder, 1, probe=probe_of(engine_on(1, torch.float32)))
        with pytest.raises(VerificationError, match="differ from the trainer's by nan"):
            ends.take(engine_on(0, torch.float32), 1, PROBE_ONLY)
