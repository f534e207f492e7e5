"""A configuration's plan: its workload, and from it memory, operations, communication and the balance of its roles."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from titan_opd.checkpoint import model_folder
from titan_opd.config import Config
from titan_opd.config.schema import RolloutConfig, TeacherConfig
from titan_opd.losses.chunks import rows_per_chunk
from titan_opd.models import DecoderConfig
from titan_opd.models.flops import model_flops_per_token
from titan_opd.ops import DensePairSums
from titan_opd.planning.activations import FLOAT32, ITEMSIZE, Workload
from titan_opd.planning.communication import INT64, Traffic, step_traffic
from titan_opd.planning.devices import Device
from titan_opd.planning.layout import RankLayout, try_layout
from titan_opd.planning.memory import GATHERED, GRADIENTS, OPTIMIZER, PARAMETERS, Moment, StepMemory, TeacherShape
from titan_opd.planning.parts import Grid, divide, whole_shapes
from titan_opd.planning.roles import Answers, RoleWork, rollout_work, teacher_work, trainer_work
from titan_opd.rollout.stream import PREFILL_TOKENS
from titan_opd.schedule import ScheduleRules
from titan_opd.weights.pieces import WeightSpec
from titan_opd.weights.quantization import quantized_specs

MIB = 2**20


@dataclass(frozen=True)
class ProcessMemory:
    """Bytes of one kind of process.

    Attributes:
        process: which.
        resident: what stays, by what it is.
        moments: what comes and goes, at each moment that can be the peak.
        in_host: whether this is of the host's memory, not of the device's.
    """

    process: str
    resident: Mapping[str, int]
    moments: tuple[Moment, ...]
    in_host: bool = False

    @property
    def peak(self) -> Moment:
        return max(self.moments, key=lambda moment: moment.total)

    @property
    def total(self) -> int:
        return sum(self.resident.values()) + self.peak.total


@dataclass(frozen=True)
class Plan:
    """What a configuration needs.

    Attributes:
        num_processes: of the trainer.
        answers: of a batch, as assumed.
        work: of one process in an optimizer step.
        layouts: of the first and the last process.
        memory: of each kind of process.
        traffic: of the trainer's processes, an optimizer step.
        weight_bytes: that each engine gets with a policy version.
        score_bytes: of a batch's scores.
        flops_per_token: of training on one token of an answer's length.
        roles: their work for a batch.
        device, utilization: what seconds are computed with.
        uncounted: sections whose workers join from elsewhere, in a number that the configuration does not say.
    """

    num_processes: int
    answers: Answers
    work: Workload
    layouts: tuple[RankLayout, RankLayout]
    memory: tuple[ProcessMemory, ...]
    traffic: tuple[Traffic, ...]
    weight_bytes: int
    score_bytes: int
    flops_per_token: float
    roles: tuple[RoleWork, ...]
    device: Device
    utilization: float
    uncounted: tuple[str, ...]


def make_plan(
    config: Config,
    *,
    num_processes: int | None,
    prompt_tokens: int | None,
    answer_tokens: int | None,
    device: Device,
    utilization: float,
) -> Plan:
    """Plan a run from its models' shapes; no weights are read.

    Args:
        config: of the run.
        num_processes: of the trainer; None: what `[parallel]` asks for.
        prompt_tokens, answer_tokens: of each answer; None: the longest that the configuration allows.
        device: of every role.
        utilization: share of the device's rates that is reached.

    Raises:
        ValueError: a model's config.json is missing or unsupported, the processes do not fit the mesh, the model or the
            batch, or a number is out of range.
    """
    ScheduleRules.of(config.schedule)
    student = DecoderConfig.from_directory(model_folder(config.student.path))
    teacher = None
    if config.teacher.engine != "none":
        teacher = DecoderConfig.from_directory(model_folder(config.teacher.path))
    if not 0 < utilization <= 1:
        raise ValueError(f"--utilization {utilization:g} must be above 0 and at most 1")
    if num_processes is None:
        num_processes = _num_processes(config)
    elif num_processes < 1:
        raise ValueError(f"--world {num_processes} must be at least 1")
    layouts = try_layout(config, student, num_processes)
    answers = _answers(config, prompt_tokens, answer_tokens)
    grid = layouts[0].grid
    work = _workload(config, answers, grid.dp)
    dense = config.objective.support == "dense"
    dense_teacher = TeacherShape(teacher.vocab_size, ITEMSIZE[config.teacher.dtype]) if dense and teacher else None
    sections = {"training": config.training, "parallel": config.parallel, "optimizer": config.optimizer}
    step = StepMemory(student, work, grid, **sections, dense_teacher=dense_teacher)
    numbers = len(DensePairSums._fields) if dense else _num_candidates(config)
    num_parameters = sum(math.prod(shape) for shape in whole_shapes(student).values())
    rows = answers.count * answers.response
    row_scores = numbers * (INT64 + FLOAT32) + FLOAT32  # ids, log-probabilities, the tail's
    if dense and teacher:
        row_scores = teacher.hidden_size * ITEMSIZE[config.teacher.dtype]
    return Plan(
        num_processes=num_processes,
        answers=answers,
        work=work,
        layouts=layouts,
        memory=tuple(_memory(config, student, teacher, step, answers, grid, device)),
        traffic=tuple(step_traffic(student, work, grid, **sections, numbers=numbers, dense=dense)),
        weight_bytes=_weight_bytes(config, student, config.rollout.quantization),
        score_bytes=rows * row_scores if teacher else 0,
        flops_per_token=model_flops_per_token(student, answers.inputs),
        roles=tuple(_roles(config, student, teacher, answers, num_processes, num_parameters)),
        device=device,
        utilization=utilization,
        uncounted=tuple(
            name
            for name in ("rollout", "teacher")
            if getattr(config, name).placement == "workers" and not getattr(config, name).workers
        ),
    )


def _num_processes(config: Config) -> int:
    """The least that the axes make up."""
    parallel = config.parallel
    return parallel.dp_replicate * max(parallel.dp_shard, 1) * parallel.tp


def _answers(config: Config, prompt_tokens: int | None, answer_tokens: int | None) -> Answers:
    for option, value in (("--prompt-tokens", prompt_tokens), ("--answer-tokens", answer_tokens)):
        if value is not None and value < 1:
            raise ValueError(f"{option} {value} must be at least 1")
    return Answers(
        count=config.schedule.batch,
        prompt=prompt_tokens or config.data.max_prompt_tokens,
        response=answer_tokens or config.rollout.sampling.max_new_tokens,
    )


def _workload(config: Config, answers: Answers, num_shares: int) -> Workload:
    share = config.schedule.batch // config.schedule.minibatches // num_shares
    capacity = config.training.tokens_per_microbatch
    if answers.inputs > capacity:
        raise ValueError(
            f"a prompt of {answers.prompt} tokens and an answer of {answers.response} have {answers.inputs} input "
            f"tokens, more than training.tokens_per_microbatch = {capacity}; raise that, or give lengths that fit with "
            "--prompt-tokens and --answer-tokens"
        )
    each = min(share, capacity // answers.inputs)
    return Workload(
        num_tokens=each * answers.inputs,
        num_rows=each * answers.response,
        num_microbatches=math.ceil(share / each),
        separate_calls=each > 1 and config.training.compute_dtype == "float32",
    )


def _num_candidates(config: Config) -> int:
    """K of the objective: columns of the teacher's scores."""
    match config.objective.support:
        case "teacher_topk":
            return config.teacher.top_k
        case "student_topk":
            return config.rollout.student_top_k
        case "labels":
            return 1
    match config.objective.kind:
        case "mc_forward_kl":
            return config.teacher.num_samples
        case "hybrid":
            return 2  # the expert's token and the student's
    return config.rollout.num_samples


def _memory(
    config: Config,
    student: DecoderConfig,
    teacher: DecoderConfig | None,
    step: StepMemory,
    answers: Answers,
    grid: Grid,
    device: Device,
) -> list[ProcessMemory]:
    here = {"engine": config.rollout.placement == "colocated", "teacher": config.teacher.placement == "colocated"}
    engine = _engine(config, student, answers, grid.dp if here["engine"] else 1, device)
    sharers = grid if config.teacher.sharded else Grid()
    scorer = None if teacher is None else _scorer(config, teacher, answers, sharers)
    states = {PARAMETERS: step.parameters, OPTIMIZER: step.optimizer_state}
    offload = config.parallel.cpu_offload
    resident = engine.resident if offload else states | engine.resident
    moments = [step.peak, *(engine.moments if here["engine"] else ()), *_evaluation(config, student, grid.dp)]
    if scorer is not None and here["teacher"]:
        resident |= scorer.resident
        moments += scorer.moments
    weights = sum(engine.resident.values())
    moments.append(Moment("weight stream", {"two buckets": min(weights, int(2 * config.weights.bucket_mb * MIB))}))
    found = [ProcessMemory("trainer, process 0", resident, tuple(moments))]
    if offload:
        gradients = Moment("optimizer", {GRADIENTS: step.reduced_gradients})
        found.append(ProcessMemory("trainer, process 0, in the host's memory", states, (gradients,), in_host=True))
    if not here["engine"]:
        found.append(engine)
    if scorer is not None and not here["teacher"]:
        found.append(scorer)
    return found


def _weight_bytes(config: Config, student: DecoderConfig, quantization: str) -> int:
    dtype = getattr(torch, config.rollout.dtype)
    specs = {name: WeightSpec(shape, dtype) for name, shape in whole_shapes(student).items()}
    return sum(spec.num_bytes for spec in quantized_specs(specs, quantization).values())


def _engine(
    config: Config, student: DecoderConfig, answers: Answers, num_engines: int, device: Device
) -> ProcessMemory:
    """Of the native engine, or what vLLM is told to take."""
    rollout, vllm = config.rollout, config.rollout.vllm
    is_vllm = rollout.engine == "vllm"
    # vLLM stores what quantised weights stand for.
    weights = _weight_bytes(config, student, "none" if is_vllm else rollout.quantization)
    if is_vllm:
        free = int(vllm.gpu_memory_utilization * device.memory) - weights
        cache = int(vllm.kv_cache_mb * MIB) if vllm.kv_cache_mb else max(free, 0)
    else:
        # Room is made for the longest answers, however long they are.
        cache = _cache(config, student, -(-answers.count // num_engines), rollout.sampling.max_new_tokens)
    tokens = min(PREFILL_TOKENS, answers.count * answers.prompt)
    writing = {"KV cache": cache, "reading prompts": _forward_pass(student, tokens, ITEMSIZE[rollout.dtype])}
    return ProcessMemory("rollout worker", {"engine's weights": weights}, (Moment("writing", writing),))


def _evaluation(config: Config, student: DecoderConfig, num_shares: int) -> list[Moment]:
    """Of the trainer's own engine, which writes evaluations wherever the answers are written.

    None without evaluation prompts, and where it is a vLLM whose cache is there anyway.
    """
    is_vllm = config.rollout.engine == "vllm" and not config.overlaps
    if is_vllm or (config.data.task == "files" and not config.data.evaluation):
        return []
    prompts = -(-config.evaluation.num_prompts // num_shares)
    cache = _cache(config, student, prompts, config.evaluation.sampling.max_new_tokens)
    return [Moment("evaluation", {"KV cache": cache})]


def _cache(config: Config, student: DecoderConfig, num_answers: int, max_new_tokens: int) -> int:
    """Of a native engine that writes so many answers."""
    rows = min(config.rollout.max_concurrent, num_answers)
    positions = min(config.data.max_prompt_tokens + max_new_tokens, student.max_position_embeddings)
    numbers = 2 * student.num_layers * student.num_kv_heads * student.head_dim
    return numbers * rows * positions * ITEMSIZE[config.rollout.dtype]


def _scorer(config: Config, teacher: DecoderConfig, answers: Answers, grid: Grid) -> ProcessMemory:
    """Of the native teacher on each process of `grid`, which all score their share of the answers."""
    itemsize = ITEMSIZE[config.teacher.dtype]
    parts = divide(teacher, grid)
    weights = sum(part.held for part in parts.all) * itemsize
    count = answers.count // grid.dp
    tokens = min(config.teacher.tokens_per_forward, count * answers.inputs)
    row_bytes = -(-teacher.vocab_size // grid.tp) * itemsize
    rows = rows_per_chunk(min(tokens, count * answers.response), row_bytes, config.training.logits_chunk_mb)
    scoring = {"forward pass": _forward_pass(teacher, tokens, itemsize), "logits": rows * row_bytes}
    if grid.shard > 1:
        scoring[GATHERED] = (parts.root.gathered + max(layer.gathered for layer in parts.layers)) * itemsize
    return ProcessMemory("teacher worker", {"teacher's weights": weights}, (Moment("scoring", scoring),))


def _forward_pass(config: DecoderConfig, num_tokens: int, itemsize: int) -> int:
    """A layer without autograd at its widest: the stream before and after attention and normed; gate, up, product."""
    return num_tokens * (3 * config.hidden_size + 3 * config.intermediate_size) * itemsize


def _roles(
    config: Config,
    student: DecoderConfig,
    teacher: DecoderConfig | None,
    answers: Answers,
    num_processes: int,
    num_parameters: int,
) -> list[RoleWork]:
    def devices(section: RolloutConfig | TeacherConfig) -> int:
        if section.placement == "colocated":  # processes of one tp axis do the same work
            return num_processes // config.parallel.tp
        return max(section.workers, 1)

    roles = []
    if config.rollout.engine != "answers":
        roles.append(
            rollout_work(
                student,
                answers,
                num_devices=devices(config.rollout),
                num_parameters=num_parameters,
                itemsize=ITEMSIZE[config.rollout.dtype],
                concurrent=config.rollout.max_concurrent,
            )
        )
    if teacher is not None:
        roles.append(teacher_work(teacher, answers, num_devices=devices(config.teacher)))
    recompute = config.training.recompute_activations
    roles.append(trainer_work(student, answers, num_devices=num_processes, recompute=recompute))
    return roles
