"""The engines that write with the student's weights, and what they record for the objective."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from titan_opd.assemble.common import Common
from titan_opd.config import Config
from titan_opd.config.objective import Objective
from titan_opd.config.schema import RolloutConfig
from titan_opd.models import Decoder
from titan_opd.rollout import RECORD_NOTHING, AnswersEngine, NativeEngine, Recording, RolloutEngine
from titan_opd.rollout.quantized import quantize_linears
from titan_opd.rollout.vllm_setup import require_vllm

if TYPE_CHECKING:
    from titan_opd.rollout.vllm import VllmEngine
    from titan_opd.rollout.vllm_stream import VllmStream


def build_engine(config: Config, common: Common, device: torch.device) -> NativeEngine:
    """The engine that writes with the student's weights, which it has still to be given."""
    decoder = Decoder(common.student).to(device, getattr(torch, config.rollout.dtype))
    if config.rollout.quantization != "none":
        quantize_linears(decoder, config.rollout.quantization)
    return NativeEngine(
        decoder.requires_grad_(False),
        config=config.rollout,
        stop_ids=common.stop_ids,
        vocab_size=common.vocab_size,
        max_prompt_tokens=config.data.max_prompt_tokens,
        seed=config.run.seed,
        recompute_kv=config.schedule.recompute_kv,
    )


def build_stream(config: Config, common: Common, device: torch.device) -> NativeEngine | VllmStream:
    """The engine of a rollout worker, which writes while others train; it has still to be given weights.

    Raises:
        ValueError: vLLM is asked for and missing, or cannot run this model here.
    """
    if config.rollout.engine != "vllm":
        return build_engine(config, common, device)
    require_vllm("rollout.engine")
    from titan_opd.assemble.vllm import build_vllm_stream

    return build_vllm_stream(config, common, what_to_record(config.objective, config.rollout), device)


def build_writer(
    config: Config, common: Common, recording: Recording, device: torch.device
) -> NativeEngine | VllmEngine:
    """What writes in the trainer's process while nothing else happens: the answers of evaluations, and all of them in a
    schedule in which nothing overlaps. Where vLLM runs beside the trainer, evaluations are the native engine's.
    """
    if config.rollout.engine != "vllm" or config.overlaps:
        return build_engine(config, common, device)
    require_vllm("rollout.engine")
    from titan_opd.assemble.vllm import build_vllm_engine

    return build_vllm_engine(config, common, recording, device)


def training_engine(config: Config, writer: NativeEngine | VllmEngine, recording: Recording) -> RolloutEngine:
    """Where the answers that are trained come from: the writer, or the data's own, which it may have to read."""
    if config.rollout.engine != "answers":
        return writer
    assert isinstance(writer, NativeEngine)
    return AnswersEngine(reader=None if recording == RECORD_NOTHING else writer)


def what_to_record(objective: Objective, rollout: RolloutConfig) -> Recording:
    """What the objective needs to know of the student's distribution when it wrote, or read, an answer."""
    if objective.support == "student_topk":
        return Recording(top_k=rollout.student_top_k)
    if objective.kind == "hybrid" and objective.support == "sampled":
        return Recording(num_samples=2)  # the expert's token and the student's own
    if objective.kind == "policy_gradient" and rollout.num_samples > 1:
        return Recording(num_samples=rollout.num_samples)
    return RECORD_NOTHING  # the written token alone is in the trajectory anyway
