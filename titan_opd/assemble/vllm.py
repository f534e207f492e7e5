"""From a checked configuration to the parts of a run that vLLM does; imported only where one is asked for."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import torch

from titan_opd.checkpoint import model_folder
from titan_opd.config import Config
from titan_opd.rollout import Recording
from titan_opd.rollout.vllm import VllmEngine
from titan_opd.rollout.vllm_requests import needs_draws
from titan_opd.rollout.vllm_stream import VllmStream
from titan_opd.teacher.vllm import VllmScorer

if TYPE_CHECKING:
    from titan_opd.assemble.common import Common


def build_vllm_engine(config: Config, common: Common, recording: Recording, device: torch.device) -> VllmEngine:
    """The engine that writes in the trainer's processes, for training and for evaluation.

    Raises:
        ValueError: vLLM is missing, or cannot run this model here.
    """
    samplings = (config.rollout.sampling, config.evaluation.sampling)
    return VllmEngine(
        common.student,
        config=config.rollout,
        stop_ids=common.stop_ids,
        vocab_size=common.vocab_size,
        max_prompt_tokens=config.data.max_prompt_tokens,
        max_new_tokens=max(sampling.max_new_tokens for sampling in samplings),
        seed=config.run.seed,
        draws=any(needs_draws(sampling, recording) for sampling in samplings),
        device=device,
    )


def build_vllm_stream(config: Config, common: Common, recording: Recording, device: torch.device) -> VllmStream:
    """The engine that writes all the time, in processes beside this one.

    Raises:
        ValueError: vLLM is missing, or cannot run this model here.
    """
    _share_threads(config)
    sampling = config.rollout.sampling
    return VllmStream(
        common.student,
        config=config.rollout,
        stop_ids=common.stop_ids,
        vocab_size=common.vocab_size,
        max_prompt_tokens=config.data.max_prompt_tokens,
        max_new_tokens=sampling.max_new_tokens,
        seed=config.run.seed,
        draws=needs_draws(sampling, recording),
        recompute_kv=config.schedule.recompute_kv,
        device=device,
    )


def build_vllm_scorer(config: Config, common: Common, device: torch.device) -> VllmScorer:
    """What scores answers with the teacher as the objective needs.

    Raises:
        ValueError: vLLM is missing, or cannot run the teacher or score for this objective.
    """
    _share_threads(config)
    return VllmScorer(
        model_folder(config.teacher.path),
        config.objective,
        config=config.teacher,
        vocab_size=common.vocab_size,
        max_tokens=config.data.max_prompt_tokens + config.rollout.sampling.max_new_tokens,
        device=device,
    )


def _share_threads(config: Config) -> None:
    """vLLM's own processes take as many threads as this one."""
    if config.run.threads:
        os.environ.setdefault("OMP_NUM_THREADS", str(config.run.threads))
