"""Quantised rollout weights in vLLM: its policy is exactly the native quantised engine's."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch

from tests.engines.writing import STOP_IDS, VOCAB_SIZE, make_samples
from tests.helpers.vllm import CPU, make_student, needs_vllm, rollout_config
from tests.helpers.weights import DIGEST_ONLY, Ends, make_source, nudged
from titan_opd.config.schema import RolloutConfig, SamplingConfig
from titan_opd.models import Decoder
from titan_opd.rollout import NativeEngine, Recording
from titan_opd.rollout.quantized import quantize_linears
from titan_opd.rollout.vllm import VllmEngine
from titan_opd.rollout.vllm_stream import VllmStream
from titan_opd.weights.direct import DirectDelivery
from titan_opd.weights.errors import VerificationError
from titan_opd.weights.quantization import describe_quantization, is_quantized, is_scale, scale_name

pytestmark = needs_vllm
GREEDY = SamplingConfig(temperature=0.0, max_new_tokens=12)
WARM = SamplingConfig(max_new_tokens=12)
RECORD = Recording(top_k=1)
SIZES = {"vocab_size": VOCAB_SIZE, "max_prompt_tokens": 16, "seed": 0, "stop_ids": STOP_IDS}
SETTINGS = SIZES | {"max_new_tokens": 12, "draws": False, "device": CPU}


@pytest.fixture(scope="module", params=["int8", "fp8"])
def quantization(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def engine(quantization: str) -> VllmEngine:
    student = make_student("llama, tied", seed=0)
    config = rollout_config(quantization=quantization)
    return VllmEngine(student.config, config=config, **SETTINGS)


def native(decoder: Decoder, quantization: str) -> NativeEngine:
    quantize_linears(decoder, quantization)
    return NativeEngine(decoder, config=RolloutConfig(max_concurrent=8), **SIZES)


def deliver(engine: VllmEngine, decoder: Decoder, quantization: str, version: int) -> None:
    source = make_source(decoder, torch.float32, quantization)
    DirectDelivery(source, worker="trainer", checks=DIGEST_ONLY).deliver(engine, version)


def assert_same_policy(engine: VllmEngine | VllmStream, expected: NativeEngine) -> None:
    samples = make_samples(8)
    for mine, its in zip(engine.generate(samples, GREEDY), expected.generate(samples, GREEDY), strict=True):
        assert torch.equal(mine.response_ids, its.response_ids)
    answers = engine.generate(samples, WARM)
    for mine, its in zip(answers, expected.read(answers, WARM, RECORD), strict=True):
        torch.testing.assert_close(mine.behavior_logprobs, its.behavior_logprobs, atol=1e-4, rtol=0)


def test_after_each_update_it_is_the_native_quantised_engine(engine: VllmEngine, quantization: str) -> None:
    for version, seed in enumerate((1, 2), start=engine.policy_version + 1):
        deliver(engine, make_student("llama, tied", seed=seed), quantization, version)
        assert_same_policy(engine, native(make_student("llama, tied", seed=seed), quantization))


def test_weights_by_name_are_quantised_on_their_way(engine: VllmEngine, quantization: str) -> None:
    student = make_student("llama, tied", seed=3)
    engine.load_weights(student.named_parameters(), engine.policy_version + 1)
    assert_same_policy(engine, native(student, quantization))


def test_the_workers_digests_are_of_the_quantised_bytes(
    engine: VllmEngine, quantization: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A byte that changes on the way to vLLM, in a weight and in a scale."""
    student = make_student("llama, tied", seed=4)
    weight = next(name for name, _ in student.named_parameters() if is_quantized(name))
    send = engine.send
    for name in (weight, scale_name(weight)):

        def spoil(pieces, name=name):
            for piece in pieces:
                if piece.name == name:
                    piece.tensor.view(torch.uint8).view(-1)[1] ^= 4
            send(pieces)

        monkeypatch.setattr(engine, "send", spoil)
        with pytest.raises(VerificationError, match=f"'{name}' differs from what was sent"):
            deliver(engine, student, quantization, engine.policy_version + 1)
    monkeypatch.undo()
    deliver(engine, student, quantization, engine.policy_version + 1)
    assert_same_policy(engine, native(student, quantization))


def test_the_audit_line_is_the_native_engines(engine: VllmEngine, quantization: str) -> None:
    expected = native(make_student("llama, tied", seed=0), quantization)
    (line,) = describe_quantization(engine.weight_specs(), torch.float32)
    assert [line] == describe_quantization(expected.weight_specs(), torch.float32)
    assert sum(is_scale(name) for name in engine.weight_specs()) == 14


@pytest.mark.slow  # starts vLLM's own processes
@pytest.mark.parametrize("delta", [False, True], ids=["whole", "changes"])
def test_beside_the_trainer(quantization: str, delta: bool, tmp_path: Path) -> None:
    """Quantised bytes go through shared memory twice, to this process and to vLLM's."""
    config = rollout_config(quantization=quantization)
    stream = VllmStream(make_student("llama, tied", seed=0).config, config=config, recompute_kv=True, **SETTINGS)
    try:
        with Ends("shared_memory", tmp_path, dtype=torch.float32, delta=delta, quantization=quantization) as ends:
            receiver = ends.receiver()
            student = make_student("llama, tied", seed=1)
            for version in (1, 2):
                ends.publish(student, version)
                receiver.take(stream, ends.store.address, version)
                assert receiver.took_delta == (delta and version == 2)
                assert_same_policy(stream, native(copy.deepcopy(student), quantization))
                student = nudged(student, 0.0001)  # more would give most rows another scale
    finally:
        stream.close()
