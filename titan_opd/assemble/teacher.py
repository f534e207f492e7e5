"""The teacher and what scores with it."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from titan_opd.assemble.common import Common
from titan_opd.checkpoint import model_folder
from titan_opd.config import Config
from titan_opd.config.objective import Objective
from titan_opd.data import check_tokenizer, compare_tokenizers, load_tokenizer
from titan_opd.models import DecoderConfig, load_decoder
from titan_opd.ops.noise import derive_seed
from titan_opd.parallel import World
from titan_opd.rollout.vllm_setup import require_vllm
from titan_opd.rollout.vllm_shape import ModelShape
from titan_opd.teacher import NativeScorer, Scorer, TeacherModel
from titan_opd.teacher.model import load_sharded_teacher


def read_teacher_shape(config: Config) -> DecoderConfig:
    """The shape of the native teacher, wherever it runs.

    Raises:
        ValueError: its config.json is missing or broken, or asks for something unsupported.
    """
    return DecoderConfig.from_directory(model_folder(config.teacher.path))


def load_teacher(
    config: Config, common: Common, device: torch.device, world: World | None = None
) -> TeacherModel | None:
    """The teacher; None for cross-entropy, and where it is in vLLM.

    Args:
        world: the trainer's processes, which share it where `teacher.sharded` says so.

    Raises:
        ValueError: its files are missing or broken, it has another tokenizer than the student, or the processes cannot
            share it.
    """
    if config.teacher.engine != "native":
        return None
    path = model_folder(config.teacher.path)
    rows = read_teacher_shape(config).vocab_size
    _check_teacher(config, common.tokenizer, path, num_rows=rows)
    dtype = getattr(torch, config.teacher.dtype)
    if not config.teacher.sharded:
        return TeacherModel(load_decoder(path, dtype=dtype, device=device))
    assert world is not None
    if world.tp_size > 1 and rows != common.student.vocab_size:
        raise ValueError(
            f"teacher.sharded = true with parallel.tp = {world.tp_size} cuts both vocabularies alike, and they have "
            f"{rows} (teacher) and {common.student.vocab_size} rows; set parallel.tp = 1, or leave `sharded` out"
        )
    return load_sharded_teacher(path, dtype=dtype, parallel=config.parallel, world=world)


def load_vllm_scorer(config: Config, common: Common, device: torch.device) -> Scorer:
    """The teacher in vLLM.

    Raises:
        ValueError: vLLM is missing, the teacher's files are, or it has another tokenizer than the student.
    """
    require_vllm("teacher.engine")
    from titan_opd.assemble.vllm import build_vllm_scorer

    path = model_folder(config.teacher.path)
    _check_teacher(config, common.tokenizer, path, num_rows=ModelShape.from_directory(path).vocab_size)
    return build_vllm_scorer(config, common, device)


def load_scorer(config: Config, common: Common, device: torch.device) -> Scorer:
    """The teacher, whole, with what scores for the objective of the run.

    Raises:
        ValueError: as `load_teacher` and `load_vllm_scorer`.
    """
    if config.teacher.engine == "vllm":
        return load_vllm_scorer(config, common, device)
    teacher = load_teacher(config, common, device)
    assert teacher is not None, "a configuration without a teacher has nothing to score with"
    return build_scorer(config, teacher, config.objective, common.vocab_size)


def _check_teacher(config: Config, tokenizer: PreTrainedTokenizerBase, path: Path, *, num_rows: int) -> None:
    teacher_tokenizer = load_tokenizer(str(path))
    compare_tokenizers(tokenizer, teacher_tokenizer)
    check_tokenizer(teacher_tokenizer, num_rows, where=f"teacher.path = {config.teacher.path!r}")


def build_scorer(
    config: Config, teacher: TeacherModel, objective: Objective, vocab_size: int, world: World | None = None
) -> NativeScorer:
    """What scores answers with the teacher as the objective needs; `world` as of `load_teacher`."""
    return NativeScorer(
        teacher,
        objective,
        vocab_size=vocab_size,
        top_k=config.teacher.top_k,
        tokens_per_forward=config.teacher.tokens_per_forward,
        logits_chunk_mb=config.training.logits_chunk_mb,
        num_samples=config.teacher.num_samples,
        seed=derive_seed(config.run.seed, "teacher"),  # not the student's draws again
        fixed_shapes=config.teacher.fixed_shapes,
        world=world if config.teacher.sharded else None,
    )
