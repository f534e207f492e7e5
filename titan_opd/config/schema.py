"""The TOML schema: one dataclass per section, every option documented in place with its unit.

`[section.subsection]` in the TOML is `section.subsection` here and `--section.subsection.key value` on the command
line.
"""

from __future__ import annotations

from dataclasses import dataclass

from titan_opd.config.cores import parse_cores
from titan_opd.config.engines import (
    RolloutConfig,
    RolloutVllmConfig,
    SamplingConfig,
    TeacherConfig,
    TeacherVllmConfig,
    VllmConfig,
)
from titan_opd.config.objective import Objective
from titan_opd.config.observe import ObserveConfig, ProfileConfig
from titan_opd.config.options import MAX_SECONDS, check_section, option
from titan_opd.config.trainer import OptimizerConfig, ParallelConfig, TrainingConfig

__all__ = [
    "ArithmeticConfig",
    "ChannelConfig",
    "CheckpointConfig",
    "Config",
    "DataConfig",
    "EvaluationConfig",
    "JournalConfig",
    "ObserveConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "ProfileConfig",
    "RolloutConfig",
    "RolloutVllmConfig",
    "RunConfig",
    "SamplingConfig",
    "ScheduleConfig",
    "StudentConfig",
    "TeacherConfig",
    "TeacherVllmConfig",
    "TrainingConfig",
    "VllmConfig",
    "WeightsConfig",
]


@dataclass(frozen=True)
class RunConfig:
    """Where a run lives and what makes it repeatable."""

    directory: str = option("runs/default", "folder of everything the run writes; refused when it holds another run")
    seed: int = option(0, "seed of weights, data order and sampling", minimum=0)
    threads: int = option(
        0, "CPU threads of torch in each process; 0 leaves torch's own choice", minimum=0, maximum=1024
    )
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
        if not self.path:
            raise ValueError(
                "student.path is empty; name the student's folder in Hugging Face format, or a run's folder"
            )


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
    heartbeat_seconds: float = option(2.0, "between the signs of life of each process", above=0, maximum=MAX_SECONDS)
    silence_seconds: float = option(
        30.0, "a process that is silent for so long is taken for dead", above=0, maximum=MAX_SECONDS
    )
    lease_seconds: float = option(
        600.0,
        "a worker that does nothing for so long while it holds work loses it to others",
        above=0,
        maximum=MAX_SECONDS,
    )
    clock_skew_seconds: float = option(
        60.0, "most difference between the clocks of two machines", above=0, maximum=MAX_SECONDS
    )
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
        120.0,
        "longest gathering of a bucket in the trainer, and longest update of an engine",
        above=0,
        maximum=MAX_SECONDS,
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

    @property
    def overlaps(self) -> bool:
        """Whether answers are written and scored while the trainer trains; otherwise all three take turns in it."""
        return self.schedule.mode != "sync" or "workers" in (self.rollout.placement, self.teacher.placement)
