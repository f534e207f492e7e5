"""What the native engine writes, held against transformers' generate."""

from __future__ import annotations

import pytest
import torch

from tests.helpers.tiny_models import make_tiny_checkpoint, make_tiny_model
from titan_opd.config.schema import RolloutConfig, SamplingConfig
from titan_opd.data.records import Prompt, Sample
from titan_opd.models import load_decoder
from titan_opd.rollout import NativeEngine

VOCAB_SIZE = 101
STOP_IDS = tuple(range(0, VOCAB_SIZE, 12))  # enough of them that some answers stop


def make_samples(num_samples: int, *, seed: int = 0, vocab_size: int = VOCAB_SIZE) -> list[Sample]:
    """Prompts of 1 to 12 tokens, in no order of length."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 13, (num_samples,), generator=generator).tolist()
    return [
        Sample(number, 0, 0, Prompt(f"prompt-{number}", torch.randint(vocab_size, (length,), generator=generator)))
        for number, length in enumerate(lengths)
    ]


def make_engine(decoder, *, max_concurrent: int = 4, vocab_size: int = VOCAB_SIZE, stop_ids=STOP_IDS, seed: int = 0):
    config = RolloutConfig(max_concurrent=max_concurrent)
    return NativeEngine(
        decoder, config=config, stop_ids=stop_ids, vocab_size=vocab_size, max_prompt_tokens=16, seed=seed
    )


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_greedy_equals_transformers(tmp_path, family, tied):
    path = make_tiny_checkpoint(tmp_path, family, tie_word_embeddings=tied)
    reference = make_tiny_model(family, tie_word_embeddings=tied)
    samples = make_samples(10)
    engine = make_engine(load_decoder(path), max_concurrent=3)
    answers = engine.generate(samples, SamplingConfig(temperature=0.0, max_new_tokens=20))
    for sample, answer in zip(samples, answers, strict=True):
        prompt = sample.prompt.token_ids
        text = reference.generate(prompt[None], max_new_tokens=20, do_sample=False, eos_token_id=list(STOP_IDS))[0]
        assert answer.sample is sample
        assert answer.response_ids.tolist() == text[len(prompt) :].tolist()
        assert answer.finish_reason == ("stop" if text[-1] in STOP_IDS else "length")
        assert answer.behavior_logprobs.tolist() == [0.0] * len(answer.response_ids)
    assert {answer.finish_reason for answer in answers} == {"stop", "length"}
