"""What only a GPU can show of vLLM: its second model runner, CUDA graphs, bfloat16, and memory given back."""

from __future__ import annotations

import pytest
import torch

from tests.engines.writing import VOCAB_SIZE, make_samples
from tests.helpers.vllm import make_student, needs_vllm, recomputed_logprobs, rollout_config
from titan_opd.config.schema import RolloutVllmConfig, SamplingConfig
from titan_opd.models import Decoder
from titan_opd.rollout import Recording
from titan_opd.rollout.vllm import VllmEngine
from titan_opd.weights.probe import QUANTIZED_TOLERANCES

pytestmark = [
    *needs_vllm,
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
WARM = SamplingConfig(temperature=0.7, max_new_tokens=12)


def make_engine(decoder: Decoder, dtype: str, **options: object) -> VllmEngine:
    return VllmEngine(
        decoder.config,
        config=rollout_config(dtype=dtype, vllm=RolloutVllmConfig(kv_cache_mb=256, **options)),
        stop_ids=[],
        vocab_size=VOCAB_SIZE,
        max_prompt_tokens=16,
        max_new_tokens=12,
        seed=0,
        draws=False,
        device=torch.device("cuda"),
    )


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-3), ("bfloat16", 0.25)])
def test_updates_reach_captured_graphs(dtype: str, tolerance: float) -> None:
    engine = make_engine(make_student("llama, tied", seed=0), dtype)
    for version in range(3):
        student = make_student("llama, tied", seed=version)
        weights = {name: weight.detach().cuda() for name, weight in student.named_parameters()}
        engine.load_weights(weights, version)
        answers = engine.generate(make_samples(8), WARM, Recording(top_k=5))
        for answer, expected in zip(answers, recomputed_logprobs(student, answers, temperature=0.7), strict=True):
            torch.testing.assert_close(answer.behavior_logprobs, expected, atol=tolerance, rtol=0)


@pytest.mark.parametrize("quantization", ["fp8_per_channel", "fp8_per_tensor"])
def test_vllm_quantises_each_update_anew(quantization: str) -> None:
    """An updated engine against one that never had other weights, and against the unquantised model."""
    first, second = (make_student("llama, tied", seed=seed) for seed in (0, 1))
    updated, fresh = (make_engine(one, "bfloat16", quantization=quantization) for one in (first, second))
    updated.load_weights(first.named_parameters(), 0)
    before = updated.generate(make_samples(8), WARM)
    updated.load_weights(second.named_parameters(), 1)
    fresh.load_weights(second.named_parameters(), 1)
    after, expected = (engine.generate(make_samples(8), WARM) for engine in (updated, fresh))
    for mine, its in zip(after, expected, strict=True):
        assert torch.equal(mine.response_ids, its.response_ids)
    assert [one.response_ids.tolist() for one in before] != [one.response_ids.tolist() for one in after]
    gaps = [
        (answer.behavior_logprobs - exact).abs()
        for answer, exact in zip(after, recomputed_logprobs(second, after, temperature=0.7), strict=True)
    ]
    assert 1e-3 < float(torch.cat(gaps).mean()) < QUANTIZED_TOLERANCES["fp8"]


def test_a_sleeping_engine_gives_its_memory_back_and_writes_on() -> None:
    student = make_student("qwen3", seed=0)
    engine = make_engine(student, "float32", sleep=True)
    engine.load_weights(student.named_parameters(), 0)
    before = torch.cuda.mem_get_info()[0]
    first = engine.generate(make_samples(4), WARM)
    assert torch.cuda.mem_get_info()[0] - before > 200 << 20  # of 256 MiB of cache
    engine.load_weights(student.named_parameters(), 1)
    for mine, other in zip(engine.generate(make_samples(4), WARM), first, strict=True):
        assert torch.equal(mine.response_ids, other.response_ids)
