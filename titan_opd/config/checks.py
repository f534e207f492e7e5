"""Checks that need more than one section: settings that contradict each other are refused before anything starts."""

from __future__ import annotations

from titan_opd.config.schema import Config


def check_config(config: Config) -> None:
    """Raise a ValueError that names the contradicting options and the ways out."""
    _check_teacher(config)
    _check_answers(config)
    _check_candidates(config)
    _check_temperature(config)
    _check_data(config)
    _check_schedule(config)
    _check_weights(config)
    _check_quantization(config)
    _check_vllm(config)
    _check_profile(config)


def _check_teacher(config: Config) -> None:
    kind = config.objective.kind
    if kind == "cross_entropy":
        if config.teacher.engine != "none":
            raise ValueError(
                f"teacher.engine = {config.teacher.engine!r} would score answers that objective.kind = 'cross_entropy' "
                "never looks at; set teacher.engine = 'none'"
            )
    elif config.teacher.engine == "none":
        raise ValueError(
            f"objective.kind = {kind!r} needs a teacher, but teacher.engine = 'none'; use 'native' or 'vllm'"
        )
    elif not config.teacher.path:
        raise ValueError("teacher.path is missing: the folder of the teacher in Hugging Face format")
    _check_sharded_teacher(config)


def _check_sharded_teacher(config: Config) -> None:
    """The processes that share a teacher score in lockstep, as only the synchronous schedule does."""
    if not config.teacher.sharded:
        return
    if config.teacher.engine != "native":
        raise ValueError(
            f"teacher.sharded = true spreads the native teacher, and teacher.engine = {config.teacher.engine!r}; leave "
            "it out (vLLM's teacher is shared by teacher.vllm.tensor_parallel_size)"
        )
    for name, given, needed in (
        ("teacher.placement", config.teacher.placement, "colocated"),
        ("rollout.placement", config.rollout.placement, "colocated"),
        ("schedule.mode", config.schedule.mode, "sync"),
    ):
        if given != needed:
            raise ValueError(
                f"teacher.sharded = true lets all of the trainer's processes score together, between writing and "
                f"training, and {name} = {given!r} does not; set it to {needed!r}, or leave `sharded` out"
            )


def _check_answers(config: Config) -> None:
    kind, engine = config.objective.kind, config.rollout.engine
    if kind == "cross_entropy" and engine != "answers":
        raise ValueError(
            f"objective.kind = 'cross_entropy' would train the student on its own answers (rollout.engine = "
            f"{engine!r}); set rollout.engine = 'answers' to train on the data's responses"
        )
    if kind == "hybrid" and engine != "answers":
        raise ValueError(
            "objective.kind = 'hybrid' weighs an expert's tokens against the student's at the same places, and with "
            f"rollout.engine = {engine!r} there is no expert; set rollout.engine = 'answers'"
        )
    if kind == "policy_gradient" and engine == "answers":
        raise ValueError(
            "objective.kind = 'policy_gradient' weighs what the student wrote, and rollout.engine = 'answers' writes "
            "nothing with it; set rollout.engine = 'native' or 'vllm'"
        )
    if engine == "answers" and config.schedule.samples_per_prompt > 1:
        raise ValueError(
            f"schedule.samples_per_prompt = {config.schedule.samples_per_prompt} would repeat the one expert response "
            "of each prompt (rollout.engine = 'answers'); set it to 1"
        )


def _check_candidates(config: Config) -> None:
    """The tokens that the objective compares must be what the engine or the teacher brings."""
    objective, sampling = config.objective, config.rollout.sampling
    if config.rollout.num_samples > 1 and (objective.kind, objective.support) != ("policy_gradient", "sampled"):
        remedy = "set teacher.num_samples" if objective.kind == "mc_forward_kl" else "leave it out"
        raise ValueError(
            f"rollout.num_samples = {config.rollout.num_samples} has no effect with objective.kind = "
            f"{objective.kind!r}, support = {objective.support!r}; {remedy}"
        )
    if objective.support != "student_topk":
        return
    if sampling.temperature == 0:
        raise ValueError(
            "rollout.sampling.temperature = 0 leaves the student one token a position, and objective.support = "
            "'student_topk' compares several; raise the temperature"
        )
    if objective.kind == "policy_gradient" and sampling.truncated:
        raise ValueError(
            f"rollout.sampling.top_k = {sampling.top_k}, top_p = {sampling.top_p} cut tokens off that the objective's "
            "support 'student_topk' goes on to weigh; set top_k = 0 and top_p = 1.0, or objective.support = 'sampled'"
        )


def _check_temperature(config: Config) -> None:
    objective, sampling = config.objective, config.rollout.sampling
    weighs_samples = objective.kind == "policy_gradient" or (objective.kind, objective.support) == ("hybrid", "sampled")
    if weighs_samples and sampling.temperature != objective.temperature:
        raise ValueError(
            f"{objective.kind} weighs tokens that the student drew by their probability, so objective.temperature = "
            f"{objective.temperature} must equal rollout.sampling.temperature = {sampling.temperature}"
        )


def _check_data(config: Config) -> None:
    if config.data.task == "files" and not config.data.train:
        raise ValueError("data.train is missing: a JSONL or Parquet file of prompts (or set data.task = 'arithmetic')")
    if config.data.task == "arithmetic":
        named = [name for name in ("train", "evaluation") if getattr(config.data, name)]
        if named:
            raise ValueError(
                f"data.{named[0]} = {getattr(config.data, named[0])!r} is not read when data.task = 'arithmetic'; "
                "remove one of the two"
            )


def _check_schedule(config: Config) -> None:
    schedule, objective = config.schedule, config.objective
    if schedule.mode == "sync" and not schedule.recompute_kv:
        raise ValueError(
            "schedule.recompute_kv = false has no effect with schedule.mode = 'sync', where no answer is unfinished "
            "when new weights come; leave it out"
        )
    if config.rollout.engine == "answers":
        for name, value, plain in (
            ("schedule.mode", schedule.mode, "sync"),
            ("rollout.placement", config.rollout.placement, "colocated"),
            ("teacher.placement", config.teacher.placement, "colocated"),
        ):
            if value != plain:
                raise ValueError(
                    f"{name} = {value!r} is for answers that the student writes; with rollout.engine = 'answers' set "
                    f"it to {plain!r}"
                )
    if objective.support == "dense" and config.teacher.placement == "workers":
        raise ValueError(
            "objective.support = 'dense' compares whole vocabularies, which the loss makes from the teacher's weights; "
            "set teacher.placement = 'colocated', or a sparse support"
        )
    if config.journal.payload and objective.support == "dense":
        raise ValueError(
            "journal.payload = true cannot keep the whole vocabularies of objective.support = 'dense'; choose a sparse "
            "support, or leave it out"
        )


def _check_vllm(config: Config) -> None:
    """What vLLM does not do is refused before anything starts."""
    for name, section in (("rollout", config.rollout), ("teacher", config.teacher)):
        if section.engine == "vllm" and section.fixed_shapes:
            raise ValueError(
                f"{name}.fixed_shapes = true is a promise that vLLM does not make; leave it out, or set "
                f"{name}.engine = 'native'"
            )
    _check_vllm_place(config)
    objective = config.objective
    if config.teacher.engine == "vllm" and (objective.support == "dense" or objective.kind == "mc_forward_kl"):
        what = "whole vocabularies" if objective.support == "dense" else "the teacher's own draws"
        raise ValueError(
            f"objective.kind = {objective.kind!r}, support = {objective.support!r} needs {what}, which vLLM does not "
            "hand out; set teacher.engine = 'native', or choose a sparse support"
        )


def _check_vllm_place(config: Config) -> None:
    """What an engine can do only inside the trainer's processes, and what only beside them."""
    inside = "rollout.placement = 'colocated' and schedule.mode = 'sync', with the teacher colocated too"
    if config.rollout.vllm.sleep and config.overlaps:
        raise ValueError(
            "rollout.vllm.sleep = true frees memory while the trainer works, and here answers are written meanwhile; "
            f"leave it out, or set {inside}"
        )
    for name, section in (("rollout", config.rollout), ("teacher", config.teacher)):
        if section.engine != "vllm" or section.placement == "workers" or section.vllm.tensor_parallel_size == 1:
            continue
        if name == "teacher" or config.overlaps:
            otherwise = "" if name == "teacher" else f", or {inside}"
            raise ValueError(
                f"{name}.vllm.tensor_parallel_size = {section.vllm.tensor_parallel_size} needs devices beside those of "
                f"the trainer's processes; set {name}.placement = 'workers'{otherwise}"
            )


def _check_weights(config: Config) -> None:
    transport, placement = config.weights.transport, config.rollout.placement
    if placement == "colocated" and transport not in ("auto", "in_process"):
        raise ValueError(
            f"weights.transport = {transport!r} leads to other processes, and with rollout.placement = 'colocated' the "
            "engine is in the trainer's own; leave it out, or set rollout.placement = 'workers'"
        )
    if config.weights.delta and (placement == "colocated" or transport == "cuda_ipc"):
        where = f"weights.transport = {transport!r}" if placement == "workers" else "rollout.placement = 'colocated'"
        raise ValueError(
            f"weights.delta = true saves traffic, and with {where} the engine reads the trainer's own memory; leave it "
            "out"
        )
    if placement == "workers" and transport == "in_process":
        raise ValueError(
            "weights.transport = 'in_process' stays in the trainer's process, and with rollout.placement = 'workers' "
            "the engines are in others; set it to 'auto'"
        )


def _check_quantization(config: Config) -> None:
    if config.rollout.quantization != "none" and config.rollout.engine == "answers":
        raise ValueError(
            f"rollout.quantization = {config.rollout.quantization!r} makes writing cheaper, and rollout.engine = "
            "'answers' writes nothing; leave it out"
        )
    own = config.rollout.vllm.quantization
    if own == "none":
        return
    for name, given, needed in (
        ("rollout.quantization", config.rollout.quantization, "none"),
        ("rollout.dtype", config.rollout.dtype, "bfloat16"),
    ):
        if given != needed:
            raise ValueError(
                f"rollout.vllm.quantization = {own!r} quantises bfloat16 weights inside vLLM, and {name} = {given!r}; "
                f"set it to {needed!r}, or leave rollout.vllm.quantization out"
            )


def _check_profile(config: Config) -> None:
    if config.profile.first_step and config.profile.last_step > config.training.steps:
        raise ValueError(
            f"profile.first_step = {config.profile.first_step}, num_steps = {config.profile.num_steps} end with step "
            f"{config.profile.last_step}, and training.steps = {config.training.steps}; begin earlier, or take fewer"
        )
