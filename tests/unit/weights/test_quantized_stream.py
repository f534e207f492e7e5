"""Quantised weights: the trainer's bytes are the engine's, and the engine's policy is what they stand for."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor

from tests.engines.writing import make_decoder, make_engine, make_samples, recomputed_logits
from tests.helpers.weights import DIGEST_ONLY, Ends, answers, engine_on, make_source, nudged, stored_by_hand, weights_of
from titan_opd.config.schema import SamplingConfig
from titan_opd.models import Decoder
from titan_opd.rollout import NativeEngine
from titan_opd.weights.direct import DirectDelivery
from titan_opd.weights.errors import LayoutError, VerificationError
from titan_opd.weights.quantization import TYPES, dequantize_rows, is_quantized, quantize_rows, scale_name

DTYPES = (torch.float32, torch.bfloat16)
per_kind = pytest.mark.parametrize("quantization", list(TYPES))
LAYER = "model.layers.1.mlp.down_proj.weight"


def same_bits(engine: NativeEngine, expected: dict[str, Tensor]) -> bool:
    stored = weights_of(engine)
    return stored.keys() == expected.keys() and all(
        stored[name].dtype == value.dtype and torch.equal(stored[name].view(torch.uint8), value.view(torch.uint8))
        for name, value in expected.items()
    )


@torch.no_grad()
def dequantized(decoder: Decoder, dtype: torch.dtype, quantization: str) -> Decoder:
    """An ordinary decoder with the weights that the quantised ones stand for."""
    plain = copy.deepcopy(decoder).to(dtype)
    for name, value in plain.named_parameters():
        if is_quantized(name):
            value.copy_(dequantize_rows(*quantize_rows(value, TYPES[quantization]), dtype))
    return plain


@per_kind
@pytest.mark.parametrize("transport", ["in_process", "shared_memory", "channel"])
def test_the_engine_has_the_trainers_bytes_after_each_update(tmp_path, transport, quantization):
    engine = engine_on(0, quantization=quantization)
    storage = {name: value.data_ptr() for name, value in weights_of(engine).items()}
    with Ends(transport, tmp_path, quantization=quantization) as ends:
        receiver = ends.receiver()
        for version in (1, 2, 3):
            decoder = make_decoder(seed=version)
            ends.publish(decoder, version)
            receiver.take(engine, ends.store.address, version)
            assert same_bits(engine, stored_by_hand(decoder, torch.bfloat16, quantization))
            assert answers(engine) == answers(engine_on(version, quantization=quantization))
    assert storage == {name: value.data_ptr() for name, value in weights_of(engine).items()}


@per_kind
@pytest.mark.parametrize("dtype", DTYPES)
def test_straight_from_the_trainer(dtype, quantization):
    engine = engine_on(0, dtype, quantization, model_type="qwen2")
    for version in (1, 2):
        decoder = make_decoder(seed=version, model_type="qwen2")
        source = make_source(decoder, dtype, quantization)
        DirectDelivery(source, worker="trainer", checks=DIGEST_ONLY).deliver(engine, version)
        assert same_bits(engine, stored_by_hand(decoder, dtype, quantization))


@per_kind
@pytest.mark.parametrize("as_iterator", [False, True])
def test_weights_by_name_are_quantised_by_the_engine(quantization, as_iterator):
    engine, decoder = engine_on(0, quantization=quantization), make_decoder(seed=1)
    weights = dict(decoder.named_parameters())
    engine.load_weights(iter(weights.items()) if as_iterator else weights, 1)
    assert same_bits(engine, stored_by_hand(decoder, torch.bfloat16, quantization))


@per_kind
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_policy_is_that_of_the_dequantised_weights_to_the_bit(dtype, quantization):
    decoder = make_decoder(seed=3, model_type="qwen2")
    engine = engine_on(3, dtype, quantization, model_type="qwen2")
    plain = make_engine(dequantized(decoder, dtype, quantization))
    for sampling in (SamplingConfig(max_new_tokens=12), SamplingConfig(temperature=0.0, max_new_tokens=12)):
        written = (one.generate(make_samples(6), sampling) for one in (engine, plain))
        for mine, its in zip(*written, strict=True):
            assert torch.equal(mine.response_ids, its.response_ids)
            assert torch.equal(mine.behavior_logprobs, its.behavior_logprobs)


@pytest.mark.parametrize(("quantization", "band"), [("int8", 0.2), ("fp8", 0.6)])
def test_log_probabilities_are_near_those_of_the_unquantised_model(quantization, band):
    """Mean difference of the written tokens, in nats: weights of a deviation of 0.3 make it as large as it gets."""
    written = engine_on(5, torch.float32, quantization).generate(make_samples(8), SamplingConfig(max_new_tokens=12))
    gaps = []
    for answer, logits in zip(written, recomputed_logits(make_decoder(seed=5), written), strict=True):
        exact = logits.log_softmax(-1).gather(1, answer.response_ids[:, None]).squeeze(1)
        gaps.append((exact - answer.behavior_logprobs).abs())
    assert 1e-3 < float(torch.cat(gaps).mean()) < band


@per_kind
@pytest.mark.parametrize("name", [LAYER, scale_name(LAYER)])
def test_a_flipped_byte_is_found(tmp_path, quantization, name):
    engine = engine_on(0, quantization=quantization)
    with Ends("in_process", tmp_path, quantization=quantization) as ends:
        ends.publish(make_decoder(seed=1), 1)
        (entry,) = [one for one in ends.manifest.tensors if one.name == name]
        ends.local.published(1)[entry.bucket][entry.begin + 1] ^= 4
        with pytest.raises(VerificationError, match=rf"version 1 at rollout-0: 1 of \d+ .*'{name}' differs"):
            ends.take(engine, 1)
        assert not engine.is_serving
        ends.publish(make_decoder(seed=2), 2)
        ends.take(engine, 2)
        assert answers(engine) == answers(engine_on(2, quantization=quantization))


def test_weights_that_are_quantised_otherwise_are_refused(tmp_path):
    with Ends("in_process", tmp_path, quantization="int8") as ends:
        ends.publish(make_decoder(seed=1), 1)
        with pytest.raises(LayoutError, match=r"q_proj.weight' was cast to torch.int8 and the engine stores .*float8"):
            ends.take(engine_on(0, quantization="fp8"), 1)
        with pytest.raises(LayoutError, match=r"it has no parameter for '.*q_proj.weight_scale'"):
            ends.take(engine_on(0), 1)


@per_kind
def test_changes_of_quantised_weights(tmp_path, quantization):
    """Single numbers of a row change where its largest one stays; a new scale moves the whole row."""
    engine, decoder = engine_on(0, quantization=quantization), make_decoder(seed=1)
    with Ends("channel", tmp_path, delta=True, quantization=quantization) as ends:
        receiver = ends.receiver()
        ends.publish(decoder, 1)
        receiver.take(engine, ends.store.address, 1)
        assert not receiver.took_delta
        for version in (2, 3):
            decoder = nudged(decoder, 0.001, seed=version)
            ends.publish(decoder, version)
            receiver.take(engine, ends.store.address, version)
            assert receiver.took_delta
            assert same_bits(engine, stored_by_hand(decoder, torch.bfloat16, quantization))


def test_half_of_the_bytes_travel(tmp_path):
    """Of the linear layers; the scales add 4 bytes a row, and the rest is what it was."""
    decoder = make_decoder()
    with Ends("in_process", tmp_path, quantization="int8") as ends:
        ends.publish(decoder, 1)
        linear = sum(value.numel() for name, value in decoder.named_parameters() if is_quantized(name))
        rows = sum(len(value) for name, value in decoder.named_parameters() if is_quantized(name))
        rest = sum(value.numel() for value in decoder.parameters()) - linear
        found = sum(one.spec.num_bytes for one in ends.manifest.tensors)
        assert found == linear + 4 * rows + 2 * rest
