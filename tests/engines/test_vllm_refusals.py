"""What is refused before vLLM is looked for, and what is said when it is missing. Runs with and without vLLM."""

from __future__ import annotations

import importlib.util
import os

import pytest

from tests.engines.writing import VOCAB_SIZE, make_decoder
from tests.helpers.vllm import CPU, make_student, rollout_config
from titan_opd.config.schema import RolloutConfig, RolloutVllmConfig
from titan_opd.models import Decoder
from titan_opd.rollout.vllm import VllmEngine
from titan_opd.rollout.vllm_setup import require_vllm
from titan_opd.rollout.vllm_stream import VllmStream

has_vllm = importlib.util.find_spec("vllm") is not None


def open_engine(kind: type, decoder: Decoder, config: RolloutConfig) -> None:
    more = {"recompute_kv": True} if kind is VllmStream else {}
    kind(
        decoder.config,
        config=config,
        stop_ids=[],
        vocab_size=VOCAB_SIZE,
        max_prompt_tokens=16,
        max_new_tokens=12,
        seed=0,
        draws=False,
        device=CPU,
        **more,
    )


@pytest.mark.parametrize("kind", [VllmEngine, VllmStream])
def test_bfloat16_on_a_cpu(kind: type) -> None:
    with pytest.raises(ValueError, match=r"rollout.dtype = 'bfloat16' crashes"):
        open_engine(kind, make_student("qwen3", seed=0), rollout_config(dtype="bfloat16"))


@pytest.mark.parametrize("kind", [VllmEngine, VllmStream])
def test_small_heads(kind: type) -> None:
    with pytest.raises(ValueError, match="head_dim = 8 is below 32"):
        open_engine(kind, make_decoder(vocab_size=112), rollout_config())


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"sleep": True}, "rollout.vllm.sleep = true frees a GPU's memory"),
        ({"tensor_parallel_size": 2}, "rollout.placement = 'workers'"),
    ],
    ids=["sleep", "tensor parallel"],
)
def test_what_does_not_fit_the_trainers_process(options: dict, complaint: str) -> None:
    config = rollout_config(vllm=RolloutVllmConfig(kv_cache_mb=64, **options))
    with pytest.raises(ValueError, match=complaint):
        open_engine(VllmEngine, make_student("qwen3", seed=0), config)


@pytest.mark.skipif(has_vllm, reason="vLLM is here; this is about what is said where it is not")
@pytest.mark.parametrize("kind", [VllmEngine, VllmStream])
def test_a_missing_vllm_is_told_with_the_way_to_it(kind: type) -> None:
    with pytest.raises(ValueError, match=r"rollout.engine = 'vllm' needs vllm 0.32.*scripts/setup_vllm_cpu.sh"):
        open_engine(kind, make_student("qwen3", seed=0), rollout_config())


@pytest.mark.skipif(has_vllm, reason="vLLM is here")
def test_a_refusal_leaves_the_environment_alone() -> None:
    """What vLLM needs would switch torch's compiler off for everything that follows in this process."""
    before = dict(os.environ)
    with pytest.raises(ValueError, match=r"rollout.engine = 'vllm' needs vllm"):
        require_vllm("rollout.engine")
    assert dict(os.environ) == before
