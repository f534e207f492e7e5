"""From a checked configuration to the parts of a run: models, tokenizer, prompts, engine, scorer."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from titan_opd import ops
from titan_opd.assemble.common import Common, read_common
from titan_opd.assemble.engines import build_writer, training_engine, what_to_record
from titan_opd.assemble.prompt_checks import check_prompts
from titan_opd.assemble.teacher import build_scorer, load_teacher, load_vllm_scorer, read_teacher_shape
from titan_opd.checkpoint import model_folder, resuming_from
from titan_opd.config import Config
from titan_opd.data import Prompt, PromptStream
from titan_opd.evaluation import REVERSE_KL, Evaluator
from titan_opd.learner import DistillationModel
from titan_opd.models import Decoder, attention_backend
from titan_opd.parallel import World, describe_float8, init_shards, load_shards, materialize, parallelize
from titan_opd.parallel.cores import pin_to_cores
from titan_opd.rollout import Recording, RolloutEngine
from titan_opd.schedule import ScheduleRules
from titan_opd.teacher import LabelScorer, Scorer, TeacherModel
from titan_opd.weights import named_weights


@dataclass(frozen=True)
class Parts:
    """What a run is made of.

    Attributes:
        model: the student with its loss on top, parallelised; float32.
        teacher: the native teacher, where it is in this process; None where it is elsewhere, or there is none.
        prompts: the training prompts as an endless stream of samples.
        engine: where the training answers come from: the student's engine, or the data's own answers.
        recording: what the engine writes down beside the tokens.
        scorer: what scores the answers in this process.
        evaluator: what evaluates the student; None when there are no evaluation prompts.
        common: what the workers read too.
        float8: lines that say which products of the student are in float8.
    """

    model: DistillationModel
    teacher: TeacherModel | None
    prompts: PromptStream
    engine: RolloutEngine
    recording: Recording
    scorer: Scorer
    evaluator: Evaluator | None
    common: Common
    float8: list[str]

    @property
    def student(self) -> Decoder:
        """The model that learns, without its loss."""
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
    teacher = None
    if config.teacher.placement == "colocated":
        teacher = load_teacher(config, common, world.device, world)
    eval_prompts = common.eval_prompts[: config.evaluation.num_prompts]
    contexts = {"student.path": common.student.max_position_embeddings}
    if config.teacher.engine == "native":  # here or in a worker
        contexts["teacher.path"] = read_teacher_shape(config).max_position_embeddings
    check_prompts(config, common.train_prompts, eval_prompts, contexts=contexts, world_size=world.dp_size)
    recording = what_to_record(config.objective, config.rollout)
    writer = build_writer(config, common, recording, world.device)
    writer.load_weights(named_weights(model.decoder), 0)
    return Parts(
        model=model,
        teacher=teacher,
        prompts=common.stream(config),
        engine=training_engine(config, writer, recording),
        recording=recording,
        scorer=_scorer(config, common, teacher, world),
        evaluator=_evaluator(config, common, eval_prompts, writer, model, teacher, world) if eval_prompts else None,
        common=common,
        float8=describe_float8(model.decoder, config.training.float8, tp=world.tp_size),
    )


def _scorer(config: Config, common: Common, teacher: TeacherModel | None, world: World) -> Scorer:
    """What scores in this process: labels alone where the teacher is a worker, or there is none."""
    if teacher is not None:
        return build_scorer(config, teacher, config.objective, common.vocab_size, world)
    if config.teacher.engine == "vllm" and config.teacher.placement == "colocated":
        return load_vllm_scorer(config, common, world.device)
    return LabelScorer()


def _evaluator(
    config: Config,
    common: Common,
    prompts: list[Prompt],
    writer: RolloutEngine,
    model: DistillationModel,
    teacher: TeacherModel | None,
    world: World,
) -> Evaluator:
    return Evaluator(
        engine=writer,
        prompts=prompts,
        tokenizer=common.tokenizer,
        student=model,
        teacher=None if teacher is None else build_scorer(config, teacher, REVERSE_KL, common.vocab_size, world),
        evaluation=config.evaluation,
        training=config.training,
        world=world,
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


def _describe_model(model: Decoder) -> str:
    config = model.config
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return (
        f"{config.family}, {parameters / 1e6:.2f} M parameters, {config.num_layers} layers of {config.hidden_size}, "
        f"{config.num_heads} heads ({config.num_kv_heads} for keys and values), vocabulary {config.vocab_size}"
    )
