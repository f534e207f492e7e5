"""What is refused before vLLM is looked for, and what is said when it is missing. Runs with and without vLLM."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest

from tests.engines.writing import VOCAB_SIZE, make_decoder
from tests.helpers.vllm import CPU, SHAPES, make_student, rollout_config
from titan_opd.config.schema import RolloutConfig, RolloutVllmConfig
from titan_opd.models import Decoder, save_decoder
from titan_opd.rollout.vllm import VllmEngine
from titan_opd.rollout.vllm_setup import require_vllm
from titan_opd.rollout.vllm_shape import ModelShape, check_split
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
def test_vllms_own_quantisation_on_a_cpu(kind: type) -> None:
    config = rollout_config(dtype="bfloat16", vllm=RolloutVllmConfig(kv_cache_mb=64, quantization="fp8_per_channel"))
    with pytest.raises(ValueError, match=r"'fp8_per_channel' is for bfloat16, .*set rollout.quantization = 'fp8'"):
        open_engine(kind, make_student("qwen3", seed=0), config)


@pytest.mark.parametrize("kind", [VllmEngine, VllmStream])
def test_small_heads(kind: type) -> None:
    with pytest.raises(ValueError, match="head_dim = 8 is below 32"):
        open_engine(kind, make_decoder(vocab_size=112), rollout_config())


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"sleep": True}, "rollout.vllm.sleep = true frees a GPU's memory"),
        ({"tensor_parallel_size": 2}, "tensor_parallel_size = 2 does not divide the trainer's 1 processes"),
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


@pytest.mark.parametrize(
    ("shape", "num_devices", "complaint"),
    [
        ({}, 3, "tensor_parallel_size = 3 does not divide the model's 4 attention heads"),
        ({"num_attention_heads": 6, "num_key_value_heads": 3}, 2, "does not divide the model's 3 key and value heads"),
        ({"intermediate_size": 50}, 4, "does not divide the model's 50 columns"),
    ],
)
def test_a_model_that_cannot_be_split(shape: dict, num_devices: int, complaint: str) -> None:
    model = ModelShape.of(make_decoder(**{"head_dim": 32} | shape).config)
    with pytest.raises(ValueError, match=complaint):
        check_split(model, num_devices, "rollout.vllm.tensor_parallel_size")


def test_more_devices_than_key_and_value_heads_share_them() -> None:
    check_split(ModelShape.of(make_decoder(head_dim=32).config), 4, "rollout.vllm.tensor_parallel_size")  # two for four


@pytest.mark.parametrize("shape", list(SHAPES))
def test_a_shape_is_the_same_by_whoever_reads_it(shape: str, tmp_path: Path) -> None:
    student = make_student(shape, seed=0)
    save_decoder(student, tmp_path)
    assert ModelShape.from_directory(tmp_path) == ModelShape.of(student.config)


def test_a_folder_without_a_model(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds no model that can be read"):
        ModelShape.from_directory(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "abacus"}')
    with pytest.raises(ValueError, match="abacus"):
        ModelShape.from_directory(tmp_path)
