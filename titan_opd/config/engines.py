"""Who writes the answers and who scores them: the sections [rollout] and [teacher], with vLLM's own settings in each.

What is common to all sections stands in `schema.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

from titan_opd.config.cores import parse_cores
from titan_opd.config.options import check_section, option

DTYPES = ("float32", "bfloat16")

# The options of worker processes, the same for those that write and those that score.
_WORKERS = {
    "default": 0,
    "doc": "worker processes that `titan-opd train` starts on this machine, and starts anew when they die",
    "minimum": 0,
}
_PYTHON = {
    "default": "",
    "doc": "interpreter of these workers, such as '.venv-vllm/bin/python'; empty: the one that runs the trainer",
}
_CORES = {"default": (), "doc": "cores of each of these workers, such as ['0-3', '4-7']; empty: any"}
_DEVICES = {"default": (), "doc": "the CUDA device of each of these workers; empty: any", "minimum": 0}


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
    workers: int = option(**_WORKERS)
    python: str = option(**_PYTHON)
    cores: tuple[str, ...] = option(**_CORES)
    devices: tuple[int, ...] = option(**_DEVICES)
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
    workers: int = option(**_WORKERS)
    python: str = option(**_PYTHON)
    cores: tuple[str, ...] = option(**_CORES)
    devices: tuple[int, ...] = option(**_DEVICES)
    fixed_shapes: bool = option(
        False, "answers that do not depend, to the last bit, on which are written together; slower"
    )
    vllm: RolloutVllmConfig = option(RolloutVllmConfig, "of the engine 'vllm'")

    def __post_init__(self) -> None:
        check_section(self, "rollout")
        check_workers(self, "rollout")
        check_vllm(self, "rollout")
