"""The TOML schema: one dataclass per section, every option documented in place with its unit.

`[section.subsection]` in the TOML is `section.subsection` here and `--section.subsection.key value` on the command
line.
"""

from __future__ import annotations

from dataclasses import dataclass

from titan_opd.config.cores import parse_cores
from titan_opd.config.float8 import Float8Config
from titan_opd.config.objective import Objective
from titan_opd.config.observe import ObserveConfig, ProfileConfig
from titan_opd.config.options import check_section, option

DTYPES = ("float32", "bfloat16")


@dataclass(frozen=True)
class RunConfig:
    """Where a run lives and what makes it repeatable."""

    directory: str = option("runs/default", "folder of everything the run writes; refused when it holds another run")
    seed: int = option(0, "seed of weights, data order and sampling", minimum=0)
    threads: int = option(0, "CPU threads of torch in each process; 0 leaves torch's own choice", minimum=0)
    cores: str = option("", "cores of the trainer's processes, such as '0-3,8'; empty: any")

    def __post_init__(self) -> None:
        check_section(self, "run")
        parse_cores(self.cores, "run.cores")
        if not self.directory:
            raise ValueError("run.directory = '' names no folder; name a new one")


@dataclass(frozen=True)
class StudentConfig:
    """The model that learns."""

    path: str = option(doc="folder in Hugging Face format, or a run's folder: its newest checkpoint")
    initialize: str = option(
        "checkpoint",
        "read the weights from `path`, or draw them from `run.seed`",
        choices=("checkpoint", "random"),
    )
    tokenizer: str = option(
        "", "folder with the tokenizer's files, or 'arithmetic' for the built-in one; empty: `path`"
    )

    def __post_init__(self) -> None:
        check_section(self, "student")


def check_workers(section: TeacherConfig | RolloutConfig, name: str) -> None:
    """Raise a ValueError when cores or devices do not belong to the workers that are started."""
    if section.workers and section.placement != "workers":
        raise ValueError(
            f"{name}.workers = {section.workers} starts processes that {name}.placement = {section.placement!r} has no "
            "use for; set placement = 'workers'"
        )
    for option_name in ("cores", "devices"):
        given = getattr(section, option_name)
        if given and len(given) != section.workers:
            raise ValueError(
                f"{name}.{option_name} = {list(given)} names {len(given)} places for {name}.workers = "
                f"{section.workers}; give one for each worker that is started here"
            )
    for cores in section.cores:
        parse_cores(cores, f"{name}.cores")
    if section.python and not section.workers:
        raise ValueError(
            f"{name}.python = {section.python!r} is the interpreter of worker processes, and {name}.workers = 0 starts "
            "none here; leave it out, or say how many"
        )


def check_vllm(section: TeacherConfig | RolloutConfig, name: str) -> None:
    """Raise a ValueError when options of vLLM are given to another engine."""
    if section.engine != "vllm" and section.vllm != type(section.vllm)():
        raise ValueError(
            f"[{name}.vllm] has no effect with {name}.engine = {section.engine!r}; set it to 'vllm', or remove the "
            "table"
        )


@dataclass(frozen=True)
class VllmConfig:
    """vLLM's own settings; titan_opd/rollout/README.md says what of it has run where."""

    kv_cache_mb: float = option(
        1024.0, "memory of the KV cache on each device, MiB; 0: as `gpu_memory_utilization` says", minimum=0
    )
    gpu_memory_utilization: float = option(
        0.9,
        "share of a device's memory for weights, activations and KV cache, when `kv_cache_mb` is 0",
        above=0,
        maximum=1,
    )
    max_model_len: int = option(
        0, "most tokens of a sequence, when more than the longest prompt and answer are wanted", minimum=0
    )
    enforce_eager: bool = option(False, "no CUDA graphs and no compilation; on a CPU it is always so")
    tensor_parallel_size: int = option(
        1,
        "devices that share one engine: a worker's, or as many of the trainer's processes where the answers are "
        'written in them (`placement = "colocated"` in a schedule without overlap)',
        minimum=1,
    )

    def __post_init__(self) -> None:
        check_section(self, "vllm")


@dataclass(frozen=True)
class RolloutVllmConfig(VllmConfig):
    """vLLM's settings where it writes the answers."""

    sleep: bool = option(
        False, "after each batch of answers give the GPU's memory to the trainer, in whose process the engine lives"
    )
    quantization: str = option(
        "none",
        "vLLM's own, on a GPU: its linear layers store and multiply in float8, quantised anew by vLLM at each update "
        "from `rollout.dtype` = 'bfloat16', with one scale for each output row ('fp8_per_channel') or matrix. Saves "
        "its memory and time, as `rollout.quantization` does not in vLLM; the trainer cannot tell its bytes",
        choices=("none", "fp8_per_channel", "fp8_per_tensor"),
    )


@dataclass(frozen=True)
class TeacherVllmConfig(VllmConfig):
    """vLLM's settings where it scores."""

    search_k: int = option(
        1024,
        "candidates a token among which the student's tokens are looked for, where the objective compares more than "
        "the written one; a token that is not among them stops the run",
        minimum=1,
    )


@dataclass(frozen=True)
class TeacherConfig:
    """The model that scores."""

    engine: str = option(
        "native",
        "how the teacher runs: in this package, in vLLM (an extra, scripts/setup_vllm_cpu.sh), or 'none' for "
        "cross-entropy",
        choices=("native", "vllm", "none"),
    )
    path: str = option(
        "", "folder in Hugging Face format, or a run's folder: its newest checkpoint; it has the student's tokenizer"
    )
    dtype: str = option("float32", "of the teacher's weights and products", choices=DTYPES)
    top_k: int = option(64, "candidates a token for the support 'teacher_topk'", minimum=1, maximum=256)
    num_samples: int = option(
        64, "Monte Carlo samples that the teacher draws at each token for the kind 'mc_forward_kl'", minimum=1
    )
    tokens_per_forward: int = option(8192, "most packed tokens in one forward pass of the scorer", minimum=1)
    sharded: bool = option(
        False,
        "spread the teacher over the trainer's processes, in which it is colocated, as [parallel] does the student; "
        "false: each has a whole copy",
    )
    placement: str = option(
        "colocated",
        "scores are made in the trainer's processes, or in worker processes that dial in",
        choices=("colocated", "workers"),
    )
    workers: int = option(
        0, "worker processes that `titan-opd train` starts on this machine, and starts anew when they die", minimum=0
    )
    python: str = option(
        "", "interpreter of these workers, such as '.venv-vllm/bin/python'; empty: the one that runs the trainer"
    )
    cores: tuple[str, ...] = option((), "cores of each of these workers, such as ['0-3', '4-7']; empty: any")
    devices: tuple[int, ...] = option((), "the CUDA device of each of these workers; empty: any", minimum=0)
    fixed_shapes: bool = option(
        False, "scores that do not depend, to the last bit, on which answers are scored together; slower"
    )
    vllm: TeacherVllmConfig = option(TeacherVllmConfig, "of the engine 'vllm'")

    def __post_init__(self) -> None:
        check_section(self, "teacher")
        check_workers(self, "teacher")
        check_vllm(self, "teacher")


@dataclass(frozen=True)
class SamplingConfig:
    """How a token is drawn: the logits are divided by the temperature, then top-k, then top-p cut what is left."""

    temperature: float = option(1.0, "divides the logits; 0 takes the most likely token", minimum=0)
    top_k: int = option(0, "keep the k most likely tokens; 0 keeps all", minimum=0)
    top_p: float = option(1.0, "keep the smallest set of most likely tokens whose mass reaches p", above=0, maximum=1)
    max_new_tokens: int = option(256, "longest answer, in tokens with the stop token", minimum=1)
    stop_ids: tuple[int, ...] = option((), "token ids that end an answer, beside the tokenizer's own", minimum=0)

    def __post_init__(self) -> None:
        check_section(self, "sampling")

    @property
    def truncated(self) -> bool:
        """Whether tokens can be cut from the distribution before it is sampled from."""
        return self.temperature > 0 and (self.top_k > 0 or self.top_p < 1)


@dataclass(frozen=True)
class RolloutConfig:
    """Who writes the answers."""

    engine: str = option(
        "native",
        "'native': the student writes, in this package; 'vllm': it writes in vLLM (an extra, "
        "scripts/setup_vllm_cpu.sh); 'answers': the data's own expert responses are used (and read by the student "
        "where the objective compares its samples or its most likely tokens)",
        choices=("native", "vllm", "answers"),
    )
    dtype: str = option("float32", "of the engine's copy of the weights and its products", choices=DTYPES)
    quantization: str = option(
        "none",
        "8 bits for the weights of the linear layers of the decoder's blocks, in the engine and on the way to it, one "
        "scale for each output row ('fp8': e4m3); embedding, output projection, norms and biases stay in `dtype`, in "
        "which all products are taken. Answers, evaluations' among them, are the quantised model's, and so are their "
        "log-probabilities (titan_opd/weights/README.md)",
        choices=("none", "int8", "fp8"),
    )
    sampling: SamplingConfig = option(SamplingConfig, "how the student's tokens are drawn")
    max_concurrent: int = option(64, "answers written at the same time; each holds a row of the KV cache", minimum=1)
    num_samples: int = option(
        1, "Monte Carlo samples a token for the kind 'policy_gradient', the written token among them", minimum=1
    )
    student_top_k: int = option(64, "candidates a token for the support 'student_topk'", minimum=1, maximum=256)
    placement: str = option(
        "colocated",
        "answers are written in the trainer's processes, or in worker processes that dial in",
        choices=("colocated", "workers"),
    )
    workers: int = option(
        0, "worker processes that `titan-opd train` starts on this machine, and starts anew when they die", minimum=0
    )
    python: str = option(
        "", "interpreter of these workers, such as '.venv-vllm/bin/python'; empty: the one that runs the trainer"
    )
    cores: tuple[str, ...] = option((), "cores of each of these workers, such as ['0-3', '4-7']; empty: any")
    devices: tuple[int, ...] = option((), "the CUDA device of each of these workers; empty: any", minimum=0)
    fixed_shapes: bool = option(
        False, "answers that do not depend, to the last bit, on which are written together; slower"
    )
    vllm: RolloutVllmConfig = option(RolloutVllmConfig, "of the engine 'vllm'")

    def __post_init__(self) -> None:
        check_section(self, "rollout")
        check_workers(self, "rollout")
        check_vllm(self, "rollout")


@dataclass(frozen=True)
class ArithmeticConfig:
    """The built-in task: sums with the carries written out."""

    min_digits: int = option(2, "fewest digits of a summand", minimum=1)
    max_digits: int = option(3, "most digits of a summand", minimum=1, maximum=9)
    num_train: int = option(100_000, "generated training prompts, all different from the evaluation's", minimum=1)
    num_eval: int = option(200, "generated evaluation prompts", minimum=1)
    seed: int = option(0, "seed of the generated problems; the evaluation prompts depend on it too", minimum=0)
    skip_train: int = option(
        0,
        "leave out this many problems at the start of the training stream: disjoint sets from one seed",
        minimum=0,
    )

    def __post_init__(self) -> None:
        check_section(self, "data.arithmetic")
        if self.min_digits > self.max_digits:
            raise ValueError(
                f"data.arithmetic.min_digits = {self.min_digits} is above max_digits = {self.max_digits}; "
                "raise max_digits or lower min_digits"
            )


@dataclass(frozen=True)
class DataConfig:
    """The prompts."""

    task: str = option(
        "files",
        "'files' reads `train` and `evaluation`; 'arithmetic' is built in",
        choices=("files", "arithmetic"),
    )
    train: str = option("", "JSONL or Parquet file of training prompts")
    evaluation: str = option("", "JSONL or Parquet file of evaluation prompts; empty: none")
    prompt_field: str = option("prompt", "column with the question: a text, or a list of chat messages")
    answer_field: str = option("answer", "column with the reference answer that grading compares with; may be absent")
    response_field: str = option(
        "response", "column with an expert's whole response, for rollout.engine = 'answers'; may be absent"
    )
    template: str = option(
        "chat", "'chat': the tokenizer's chat template; 'plain': `plain_template`", choices=("chat", "plain")
    )
    plain_template: str = option("{prompt}", "text of the plain template; {prompt} stands for the question")
    system_prompt: str = option("", "system message put before a question under the chat template")
    max_prompt_tokens: int = option(1024, "longest prompt, in tokens with its template", minimum=1)
    overlong: str = option(
        "error",
        "a prompt above the limit stops the run, or is skipped and counted",
        choices=("error", "skip"),
    )
    shuffle: bool = option(True, "a new order of the prompts in each epoch, from `run.seed`")
    arithmetic: ArithmeticConfig = option(ArithmeticConfig, "the built-in task's settings")

    def __post_init__(self) -> None:
        check_section(self, "data")


@dataclass(frozen=True)
class ScheduleConfig:
    """Who may start which prompt when; titan_opd/schedule/README.md explains the rule."""

    mode: str = option(
        "sync",
        "'sync': write, score, train, one after the other; 'step_off': whole batches ahead; 'async': sample by sample",
        choices=("sync", "step_off", "async"),
    )
    batch: int = option(64, "answers per policy version", minimum=1)
    max_staleness: int | None = option(
        None,
        "no token is trained more than this many policy versions after the one that wrote it (default: 0 for 'sync', "
        "1 for the others)",
        minimum=0,
    )
    on_limit: str = option(
        "wait",
        "what a step does about unfinished answers that would miss their deadline: it waits for them, trains them "
        "later with weight 0 on tokens that are too old, or gives them up (both favour short answers)",
        choices=("wait", "mask", "drop"),
    )
    in_flight: str = option(
        "keep",
        "what an engine does with new weights while it writes: it takes them at once and writes on, it finishes its "
        "answers first, or, as 'keep', but writes answers that would miss their deadline anew, each at most once",
        choices=("keep", "wait", "restart"),
    )
    recompute_kv: bool = option(
        True, "after new weights in flight, rebuild the keys and values of unfinished answers under them"
    )
    samples_per_prompt: int = option(1, "answers written to the same prompt; divides `batch`", minimum=1)
    minibatches: int = option(1, "optimizer steps per batch; divides `batch`", minimum=1)

    def __post_init__(self) -> None:
        check_section(self, "schedule")
        for name in ("samples_per_prompt", "minibatches"):
            if self.batch % getattr(self, name):
                raise ValueError(
                    f"schedule.{name} = {getattr(self, name)} does not divide schedule.batch = {self.batch}; "
                    "choose a divisor"
                )
        if self.max_staleness is None:
            object.__setattr__(self, "max_staleness", 0 if self.mode == "sync" else 1)


@dataclass(frozen=True)
class ChannelConfig:
    """How the processes of a run find and trust each other; titan_opd/channel/README.md."""

    address: str = option(
        "",
        "where the conductor listens: tcp://HOST:PORT or ipc:///PATH; empty: a socket that only this user's processes "
        "on this machine can reach",
    )
    keys: str = option("", "folder of CURVE keys, needed by every address that other machines can reach")
    heartbeat_seconds: float = option(2.0, "between the signs of life of each process", above=0)
    silence_seconds: float = option(30.0, "a process that is silent for so long is taken for dead", above=0)
    lease_seconds: float = option(
        600.0, "a worker that does nothing for so long while it holds work loses it to others", above=0
    )
    clock_skew_seconds: float = option(60.0, "most difference between the clocks of two machines", above=0)
    store_mb: float = option(4096.0, "most memory for answers, or scores, that wait in a worker, MiB", above=0)
    cores: str = option("", "cores of the conductor's process, such as '0'; empty: any")

    def __post_init__(self) -> None:
        check_section(self, "channel")
        parse_cores(self.cores, "channel.cores")
        if self.heartbeat_seconds >= self.silence_seconds:
            raise ValueError(
                f"channel.heartbeat_seconds = {self.heartbeat_seconds} must be below channel.silence_seconds = "
                f"{self.silence_seconds}, which is what a missing beat is noticed by"
            )


@dataclass(frozen=True)
class WeightsConfig:
    """How new weights get into the engines, and how that is checked; titan_opd/weights/README.md."""

    transport: str = option(
        "auto",
        "'in_process' for colocated engines; for workers 'shared_memory' on the trainer's machine, 'channel' anywhere, "
        "'process_group' (gloo or NCCL; unencrypted), 'cuda_ipc' on the trainer's GPU; 'auto': in_process, or "
        "shared_memory where it leads and channel elsewhere",
        choices=("auto", "in_process", "shared_memory", "channel", "process_group", "cuda_ipc"),
    )
    verify: str = option(
        "both",
        "after every update: 'digest': the engine's stored bytes against the trainer's; 'probe': log-probabilities of "
        "a fixed text in both; 'both'; 'none': names, shapes and types only, which are always checked",
        choices=("digest", "probe", "both", "none"),
    )
    delta: bool = option(
        False,
        "send engines that have the version before only what changed, bit for bit, where that is at most half of the "
        "bytes; for workers on other machines, with `rollout.dtype` of 16 bits",
    )
    bucket_mb: float = option(64.0, "weights are gathered and sent in buckets of this size, MiB", above=0)
    timeout_seconds: float = option(
        120.0, "longest gathering of a bucket in the trainer, and longest update of an engine", above=0
    )

    def __post_init__(self) -> None:
        check_section(self, "weights")
        if self.delta and self.verify not in ("digest", "both"):
            raise ValueError(
                f"weights.delta = true needs the digests of what the engine then stores, and weights.verify = "
                f"{self.verify!r} makes none; set it to 'digest' or 'both'"
            )


@dataclass(frozen=True)
class JournalConfig:
    """`run.directory`/journal.jsonl: which samples each step trained."""

    payload: bool = option(
        False, "also keep each step's tokens, log-probabilities and scores, for `titan-opd train --replay`"
    )

    def __post_init__(self) -> None:
        check_section(self, "journal")


@dataclass(frozen=True)
class TrainingConfig:
    """The size of a step."""

    steps: int = option(doc="batches to train on; the policy version rises once a batch", minimum=1)
    tokens_per_microbatch: int = option(8192, "packed tokens, prompts included, in one forward-backward", minimum=1)
    compute_dtype: str = option(
        "float32",
        "of the student's layers while training; weights, gradients and optimizer stay float32",
        choices=DTYPES,
    )
    recompute_activations: str = option(
        "none",
        "what the backward pass computes again instead of keeping it: 'full': all of a layer but its input (least "
        "memory, a third more computation); 'selective': all but attention and what crosses processes",
        choices=("none", "full", "selective"),
    )
    compile: bool = option(False, "compile each layer with torch.compile: slow first steps, fewer kernels after them")
    logits_chunk_mb: float = option(
        256.0, "memory of one chunk of logits in the loss head and the scorer, MiB", above=0
    )
    float8: Float8Config = option(Float8Config, "8-bit products")

    def __post_init__(self) -> None:
        check_section(self, "training")
        if self.float8.recipe != "none" and not self.float8.emulate and self.compute_dtype != "bfloat16":
            raise ValueError(
                f"training.float8.recipe = {self.float8.recipe!r} has products in bfloat16, and training.compute_dtype "
                f"= {self.compute_dtype!r}; set it to 'bfloat16', or leave float8 out"
            )
        if self.compile and self.recompute_activations == "selective":
            raise ValueError(
                "training.compile = true decides by itself which products a layer keeps, so "
                "training.recompute_activations = 'selective' has no effect; set it to 'none' or 'full'"
            )


@dataclass(frozen=True)
class ParallelConfig:
    """How the trainer's processes share the student; titan_opd/parallel/README.md says what each way costs.

    The processes that torchrun starts are dp_replicate x dp_shard x tp.
    """

    dp_replicate: int = option(1, "copies of the sharded student; each trains other samples (HSDP)", minimum=1)
    dp_shard: int = option(
        -1, "processes that share one copy's parameters, each with samples of its own (FSDP); -1: all that are left"
    )
    tp: int = option(
        1,
        "processes that split every matrix and work on the same samples (tensor parallel); divides the heads",
        minimum=1,
    )
    sequence_parallel: bool = option(
        False, "between the matrices the processes of `tp` have tokens of their own: less memory, the same traffic"
    )
    reshard_after_forward: bool = option(
        True,
        "free a layer's gathered parameters after its forward pass; false: they stay until the last backward pass of "
        "the step: more memory, one gather a step",
    )
    prefetch: int = option(0, "layers gathered ahead of their use; 0: FSDP's own choice", minimum=0)
    reduce_gradients: str = option(
        "last",
        "when gradients are summed over processes: after a step's last micro-batch (each process holds a whole "
        "gradient until then), or after each (shards of it only)",
        choices=("last", "each"),
    )
    cpu_offload: bool = option(False, "parameters, gradients and optimizer state live in the host's memory")
    timeout_seconds: float = option(
        1800.0,
        "a process that has waited so long for the others ends and says for whom; above the longest time that one of "
        "them writes or scores answers alone",
        above=0,
    )

    def __post_init__(self) -> None:
        check_section(self, "parallel")
        if self.dp_shard != -1 and self.dp_shard < 1:
            raise ValueError(f"parallel.dp_shard = {self.dp_shard} must be a number of processes, or -1 for the rest")
        if self.sequence_parallel and self.tp == 1:
            raise ValueError(
                "parallel.sequence_parallel = true splits tokens among the processes of parallel.tp, which is 1; "
                "set parallel.tp, or leave it out"
            )


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW or Muon with warm-up and decay."""

    name: str = option(
        "adamw",
        "'adamw', fused; 'adamw_8bit': the same with moments of 8 bits (torchao, an extra); 'muon': orthogonalised "
        "momentum for the matrices within layers, AdamW for the rest",
        choices=("adamw", "adamw_8bit", "muon"),
    )
    learning_rate: float = option(1e-4, "peak learning rate", minimum=0)
    betas: tuple[float, float] = option((0.9, 0.95), "decay of the first and second moments", minimum=0, maximum=1)
    eps: float = option(1e-8, "added to the root of the second moment", above=0)
    momentum: float = option(0.95, "of 'muon'", minimum=0, maximum=1)
    muon_dtype: str = option("bfloat16", "of the products by which 'muon' orthogonalises", choices=DTYPES)
    weight_decay: float = option(0.0, "decoupled decay of the matrices; norms and biases have none", minimum=0)
    max_grad_norm: float = option(1.0, "the gradient's global 2-norm is clipped to this; 0 does not clip", minimum=0)
    warmup_steps: int = option(0, "optimizer steps of linear warm-up from 0", minimum=0)
    decay: str = option("cosine", "shape after the warm-up", choices=("constant", "linear", "cosine"))
    final_fraction: float = option(0.1, "learning rate at the last step over its peak", minimum=0, maximum=1)

    def __post_init__(self) -> None:
        check_section(self, "optimizer")
        plain = OptimizerConfig.__dataclass_fields__
        for option_name in ("momentum", "muon_dtype"):
            value = getattr(self, option_name)
            if self.name != "muon" and value != plain[option_name].default:
                raise ValueError(
                    f"optimizer.{option_name} = {value!r} has no effect with optimizer.name = {self.name!r}; leave it "
                    "out, or set the name to 'muon'"
                )


@dataclass(frozen=True)
class EvaluationConfig:
    """Held-out prompts, answered and graded."""

    every: int = option(0, "steps between evaluations; 0: only before the first and after the last step", minimum=0)
    num_prompts: int = option(200, "evaluation prompts used, from the start of the file", minimum=1)
    grader: str = option("exact", "how an answer is compared with the reference", choices=("exact",))
    sampling: SamplingConfig = option(lambda: SamplingConfig(temperature=0.0), "how evaluation answers are drawn")

    def __post_init__(self) -> None:
        check_section(self, "evaluation")


@dataclass(frozen=True)
class CheckpointConfig:
    """Weights on disk, in Hugging Face format, under `run.directory`/checkpoints."""

    every: int = option(0, "steps between checkpoints; the last step is always saved", minimum=0)
    keep: int = option(2, "newest checkpoints kept; older ones are deleted", minimum=1)
    asynchronous: bool = option(
        False,
        "training waits for a copy of its state in the main memory only (12 bytes per float32 parameter with AdamW, "
        "shared by the processes) and goes on while it is written",
    )

    def __post_init__(self) -> None:
        check_section(self, "checkpoint")


@dataclass(frozen=True)
class Config:
    """A whole run."""

    student: StudentConfig = option(doc="the model that learns")
    training: TrainingConfig = option(doc="the size of a step")
    objective: Objective = option(doc="what is minimised")
    run: RunConfig = option(RunConfig, "where the run lives")
    teacher: TeacherConfig = option(TeacherConfig, "the model that scores")
    rollout: RolloutConfig = option(RolloutConfig, "who writes the answers")
    data: DataConfig = option(DataConfig, "the prompts")
    schedule: ScheduleConfig = option(ScheduleConfig, "who may start which prompt when")
    channel: ChannelConfig = option(ChannelConfig, "how the processes of a run find each other")
    weights: WeightsConfig = option(WeightsConfig, "how new weights get into the engines")
    journal: JournalConfig = option(JournalConfig, "which samples each step trained")
    parallel: ParallelConfig = option(ParallelConfig, "how the trainer's processes share the student")
    optimizer: OptimizerConfig = option(OptimizerConfig, "AdamW or Muon with warm-up and decay")
    evaluation: EvaluationConfig = option(EvaluationConfig, "held-out prompts, answered and graded")
    checkpoint: CheckpointConfig = option(CheckpointConfig, "weights on disk")
    observe: ObserveConfig = option(ObserveConfig, "what a person sees")
    profile: ProfileConfig = option(ProfileConfig, "a few steps under torch's profiler")
