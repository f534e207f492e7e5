"""From a checked configuration to the parts of a run: models, tokenizer, prompts, engine, scorer."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from transformers import PreTrainedTokenizerBase

from titan_opd import ops
from titan_opd.checkpoint import model_folder, resuming_from
from titan_opd.config import Config
from titan_opd.config.objective import Objective
from titan_opd.config.schema import RolloutConfig
from titan_opd.data import (
    Prompt,
    PromptStream,
    check_tokenizer,
    compare_tokenizers,
    load_prompts,
    load_tokenizer,
    num_tokens,
    stop_ids,
)
from titan_opd.evaluation import REVERSE_KL, Evaluator
from titan_opd.learner import DistillationModel
from titan_opd.models import Decoder, DecoderConfig, attention_backend, load_decoder
from titan_opd.ops.noise import derive_seed
from titan_opd.parallel import World, describe_float8, init_shards, load_shards, materialize, parallelize
from titan_opd.parallel.cores import pin_to_cores
from titan_opd.prompt_checks import check_prompts
from titan_opd.rollout import RECORD_NOTHING, AnswersEngine, NativeEngine, Recording, RolloutEngine
from titan_opd.rollout.quantized import quantize_linears
from titan_opd.rollout.vllm_setup import require_vllm
from titan_opd.rollout.vllm_shape import ModelShape
from titan_opd.schedule import ScheduleRules
from titan_opd.teacher import LabelScorer, NativeScorer, Scorer, TeacherModel
from titan_opd.teacher.model import load_sharded_teacher
from titan_opd.weights import named_weights

if TYPE_CHECKING:
    from titan_opd.rollout.vllm import VllmEngine
    from titan_opd.rollout.vllm_stream import VllmStream


@dataclass(frozen=True)
class Parts:
    """What a run is made of.

    Attributes:
        model: the student with its loss on top, parallelised; float32.
        teacher: the model that scores; None for cross-entropy.
        tokenizer: the student's, equal to the teacher's.
        prompts: the training prompts as an endless stream of samples.
        engine: where the training answers come from: the student's engine, or the data's own answers.
        recording: what the engine writes down beside the tokens.
        scorer: what scores the answers.
        evaluator: what evaluates the student; None when there are no evaluation prompts.
        common: what the workers read too.
        float8: lines that say which products of the student are in float8.
    """

    model: DistillationModel
    teacher: TeacherModel | None
    tokenizer: PreTrainedTokenizerBase
    prompts: PromptStream
    engine: RolloutEngine
    recording: Recording
    scorer: Scorer
    evaluator: Evaluator | None
    common: Common
    float8: list[str]

    @property
    def student(self) -> Decoder:
        return self.model.decoder

    def describe(self) -> list[str]:
        """Lines that say what runs and on which code paths."""
        lines = [f"student: {_describe_model(self.student)}"]
        if self.teacher is not None:
            lines.append(f"teacher: {_describe_model(self.teacher.decoder)}")
        weight = self.student.lm_head_weight
        lines.append(f"tokenizer: {self.model.vocab_size} tokens")
        lines.append(f"attention: {attention_backend(weight.device, weight.dtype)}; {ops.describe(weight.device)}")
        return lines + self.float8


@dataclass(frozen=True)
class Common:
    """What all roles of a run read from the same files.

    Attributes:
        tokenizer: the student's.
        student: the shape of its model.
        stop_ids: tokens that end an answer.
        train_prompts: what the samples of the run ask.
        eval_prompts: all prompts of the evaluation file.
    """

    tokenizer: PreTrainedTokenizerBase
    student: DecoderConfig
    stop_ids: list[int]
    train_prompts: list[Prompt]
    eval_prompts: list[Prompt]

    @property
    def vocab_size(self) -> int:
        """Tokens of the tokenizer; rows of a vocabulary at or above it are padding."""
        return num_tokens(self.tokenizer)

    def stream(self, config: Config) -> PromptStream:
        """The training prompts as an endless stream of samples, from sample 0."""
        return PromptStream(
            self.train_prompts,
            shuffle=config.data.shuffle,
            seed=config.run.seed,
            samples_per_prompt=config.schedule.samples_per_prompt,
        )


def read_common(config: Config, *, checkpoint: Path | None = None) -> Common:
    """Read tokenizer, prompts and the student's shape.

    Args:
        config: what to read.
        checkpoint: the student's folder when a run goes on; None: as `config` says.

    Raises:
        ValueError: a missing or broken file, a tokenizer that does not fit the model.
    """
    folder = model_folder(config.student.path) if checkpoint is None else checkpoint
    with resuming_from(checkpoint):
        student = DecoderConfig.from_directory(folder)
        tokenizer = load_tokenizer(str(folder) if checkpoint is not None else config.student.tokenizer or str(folder))
    check_tokenizer(tokenizer, student.vocab_size, where=f"student.path = {config.student.path!r}")
    stops = stop_ids(tokenizer, student.eos_token_ids, config.rollout.sampling.stop_ids)
    train_prompts, eval_prompts = load_prompts(config.data, tokenizer, stops)
    return Common(tokenizer, student, stops, train_prompts, eval_prompts)


def assemble(config: Config, world: World, *, checkpoint: Path | None = None) -> Parts:
    """Read and build everything that `config` names.

    Args:
        config: what to build.
        world: the processes that share it.
        checkpoint: where the student's weights come from when a run goes on; None: from where `config` says.

    Raises:
        ValueError: a missing or broken file, a tokenizer that does not fit its model or the teacher's, prompts that
            cannot be used; the message names it and the way out.
    """
    pin_to_cores(config.run.cores, "run.cores")
    if config.run.threads:
        torch.set_num_threads(config.run.threads)
    check_world(config, world)
    ScheduleRules.of(config.schedule)  # its checks, before anything large is read
    common = read_common(config, checkpoint=checkpoint)
    model = build_student(config, common, world, checkpoint=checkpoint)
    student = model.decoder
    here = config.teacher.placement == "colocated"
    teacher = load_teacher(config, common, world.device, world) if here else None
    eval_prompts = common.eval_prompts[: config.evaluation.num_prompts]
    contexts = {"student.path": student.config.max_position_embeddings}
    if teacher is not None:
        contexts["teacher.path"] = teacher.decoder.config.max_position_embeddings
    check_prompts(config, common.train_prompts, eval_prompts, contexts=contexts, world_size=world.dp_size)
    recording = what_to_record(config.objective, config.rollout)
    writer = _build_writer(config, common, recording, world.device)
    writer.load_weights(named_weights(student), 0)

    evaluator = None
    if eval_prompts:
        evaluator = Evaluator(
            engine=writer,
            prompts=eval_prompts,
            tokenizer=common.tokenizer,
            student=model,
            teacher=None if teacher is None else build_scorer(config, teacher, REVERSE_KL, common.vocab_size, world),
            evaluation=config.evaluation,
            training=config.training,
            world=world,
        )
    scorer: Scorer = LabelScorer()
    if teacher is not None:
        scorer = build_scorer(config, teacher, config.objective, common.vocab_size, world)
    elif here and config.teacher.engine == "vllm":
        scorer = load_vllm_scorer(config, common, world.device)
    return Parts(
        model=model,
        teacher=teacher,
        tokenizer=common.tokenizer,
        prompts=common.stream(config),
        engine=_engine(config, writer, recording),
        recording=recording,
        scorer=scorer,
        evaluator=evaluator,
        common=common,
        float8=describe_float8(student, config.training.float8, tp=world.tp_size),
    )


def check_world(config: Config, world: World) -> None:
    """Raise a ValueError when the processes cannot share the answers of an optimizer step equally."""
    per_step = config.schedule.batch // config.schedule.minibatches
    if per_step % world.dp_size:
        raise ValueError(
            f"schedule.batch / schedule.minibatches = {per_step} answers a step cannot be shared equally by "
            f"{world.describe_shares()}; choose a multiple of {world.dp_size}, or another number of processes"
        )


def build_student(config: Config, common: Common, world: World, *, checkpoint: Path | None) -> DistillationModel:
    """The student with its loss, spread over the processes; each has read, or drawn, its own shards.

    Raises:
        ValueError: its files are missing or broken, or the processes cannot share it.
    """
    with torch.device("meta"):
        student = Decoder(common.student)
    model = DistillationModel(student, vocab_size=common.vocab_size, logits_chunk_mb=config.training.logits_chunk_mb)
    parallelize(model, student, world.mesh, config.training, config.parallel, forward_methods=("sweep",))
    materialize(model, torch.device("cpu") if config.parallel.cpu_offload else world.device)
    if checkpoint is None and config.student.initialize == "random":
        init_shards(student, torch.Generator().manual_seed(config.run.seed))
    else:
        with resuming_from(checkpoint):
            load_shards(student, checkpoint or model_folder(config.student.path))
    return model


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
    _check_teacher(config, common.tokenizer, path, num_rows=DecoderConfig.from_directory(path).vocab_size)
    dtype = getattr(torch, config.teacher.dtype)
    if not config.teacher.sharded:
        return TeacherModel(load_decoder(path, dtype=dtype, device=device))
    assert world is not None
    rows = DecoderConfig.from_directory(path).vocab_size
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
    from titan_opd.vllm_parts import build_vllm_scorer

    path = model_folder(config.teacher.path)
    _check_teacher(config, common.tokenizer, path, num_rows=ModelShape.from_directory(path).vocab_size)
    return build_vllm_scorer(config, common, device)


def _check_teacher(config: Config, tokenizer: PreTrainedTokenizerBase, path: Path, *, num_rows: int) -> None:
    teacher_tokenizer = load_tokenizer(str(path))
    compare_tokenizers(tokenizer, teacher_tokenizer)
    check_tokenizer(teacher_tokenizer, num_rows, where=f"teacher.path = {config.teacher.path!r}")


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
    from titan_opd.vllm_parts import build_vllm_stream

    return build_vllm_stream(config, common, what_to_record(config.objective, config.rollout), device)


def _build_writer(
    config: Config, common: Common, recording: Recording, device: torch.device
) -> NativeEngine | VllmEngine:
    """What writes in the trainer's process while nothing else happens: the answers of evaluations, and all of them in a
    schedule in which nothing overlaps. Where vLLM runs beside the trainer, evaluations are the native engine's.
    """
    overlaps = config.schedule.mode != "sync" or "workers" in (config.rollout.placement, config.teacher.placement)
    if config.rollout.engine != "vllm" or overlaps:
        return build_engine(config, common, device)
    require_vllm("rollout.engine")
    from titan_opd.vllm_parts import build_vllm_engine

    return build_vllm_engine(config, common, recording, device)


def _engine(config: Config, writer: NativeEngine | VllmEngine, recording: Recording) -> RolloutEngine:
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


def _describe_model(model: Decoder) -> str:
    config = model.config
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return (
        f"{config.family}, {parameters / 1e6:.2f} M parameters, {config.num_layers} layers of {config.hidden_size}, "
        f"{config.num_heads} heads ({config.num_kv_heads} for keys and values), vocabulary {config.vocab_size}"
    )
