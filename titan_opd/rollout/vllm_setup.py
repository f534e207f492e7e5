"""Finding vLLM, and starting it with a model that gets its weights from a trainer.

vLLM is an extra (scripts/setup_vllm_cpu.sh): nothing of it is imported before an engine of it is asked for.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import random
import tempfile
import uuid
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy
import torch
import torch.distributed as dist

from titan_opd.config.schema import RolloutConfig, VllmConfig
from titan_opd.models import DecoderConfig
from titan_opd.rollout.vllm_shape import ModelShape, check_model, check_split

if TYPE_CHECKING:
    from titan_opd.rollout.vllm_requests import Requests

logger = logging.getLogger(__name__)
VERSIONS = ("0.32.", "0.33.")  # whose interfaces for weights were compared
MAX_LOGPROBS = 256  # candidates a token that an engine can be asked for
RECEIVER = "titan_opd.rollout.vllm_receiver.Receiver"
DRAWS = "titan_opd.rollout.vllm_draws:DrawsProcessor"
_SHORTEST_SEQUENCE = 64  # the text by which updates are checked has to fit, with a token more


def require_vllm(option: str) -> None:
    """Prepare this process for `import vllm`.

    Args:
        option: what asks for it, such as "rollout.engine".

    Raises:
        ValueError: it is not installed, or of a version that this code was not written for.
    """
    found = _vllm_version()
    if found is None or not found.startswith(VERSIONS):
        raise ValueError(
            f"{option} = 'vllm' needs vllm 0.32, and this interpreter has {found or 'none'}: run "
            "scripts/setup_vllm_cpu.sh and name its interpreter to the workers (rollout.python or teacher.python = "
            "'.venv-vllm/bin/python'), or pip install 'titan_opd[vllm]' beside torch 2.13"
        )
    # At the level of warnings each update says of layers without weights of their own that they got none.
    # Read when vLLM and torch's compiler are first imported; what a person has set stays.
    defaults = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1"}
    if not torch.cuda.is_available():
        # Without: one function of the sampler is compiled at its first use, and threads are bound to cores.
        defaults |= {"TORCHDYNAMO_DISABLE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    for name, value in defaults.items():
        os.environ.setdefault(name, value)


def _vllm_version() -> str | None:
    for package in ("vllm", "vllm-cpu"):
        with contextlib.suppress(PackageNotFoundError):
            return version(package)
    return None


def write_model(model: DecoderConfig, *, vocab_size: int, context: int) -> tempfile.TemporaryDirectory:
    """A folder with the config.json of a model whose vocabulary ends with the tokenizer's last token.

    So padding rows of the embedding have no logits in the engine, in either of vLLM's model runners.

    Args:
        model: the shape.
        vocab_size: number of the tokenizer's tokens.
        context: most tokens of a sequence.
    """
    folder = tempfile.TemporaryDirectory(prefix="titan-opd-vllm-")
    content = model.to_dict() | {
        "vocab_size": vocab_size,
        "max_position_embeddings": max(context, model.max_position_embeddings),
        "eos_token_id": None,  # what ends an answer comes with each request
    }
    (Path(folder.name) / "config.json").write_text(json.dumps(content))
    return folder


def engine_arguments(
    options: VllmConfig,
    *,
    folder: str,
    dtype: str,
    max_tokens: int,
    max_concurrent: int,
    prefix_caching: bool,
    max_logprobs: int = MAX_LOGPROBS,
) -> dict[str, Any]:
    """What `LLM` and `AsyncEngineArgs` are made with, but for what only one of them takes.

    Args:
        options: the TOML's section.
        folder: of `write_model`.
        dtype: of weights and products.
        max_tokens: most tokens of a sequence, from `sequence_tokens`.
        max_concurrent: most sequences at a time.
        prefix_caching: whether sequences share the keys and values of equal beginnings.
        max_logprobs: most candidates a token.
    """
    arguments = {
        "model": folder,
        "skip_tokenizer_init": True,  # token ids in, token ids out
        "load_format": "dummy",  # the weights come from the trainer
        "generation_config": "vllm",
        "dtype": dtype,
        "max_model_len": max_tokens,
        "max_num_seqs": max_concurrent,
        "max_logprobs": max_logprobs,
        "enforce_eager": options.enforce_eager or not torch.cuda.is_available(),
        "tensor_parallel_size": options.tensor_parallel_size,
        "enable_prefix_caching": prefix_caching,
        "disable_log_stats": True,
        "worker_extension_cls": RECEIVER,
    }
    if options.kv_cache_mb:
        arguments["kv_cache_memory_bytes"] = int(options.kv_cache_mb * 2**20)
    else:
        arguments["gpu_memory_utilization"] = options.gpu_memory_utilization
    return arguments


@dataclass(frozen=True)
class PreparedEngine:
    """What both forms of the engine begin with.

    Attributes:
        requests: what vLLM is asked, and how its answers are read.
        folder: holds the model's config.json; it is there for as long as this object is.
        arguments: of `LLM` or `AsyncEngineArgs`.
    """

    requests: Requests
    folder: tempfile.TemporaryDirectory
    arguments: dict[str, Any]


def prepare_engine(
    model: DecoderConfig,
    *,
    config: RolloutConfig,
    stop_ids: Collection[int],
    vocab_size: int,
    max_prompt_tokens: int,
    max_new_tokens: int,
    seed: int,
    draws: bool,
    prefix_caching: bool,
    device: torch.device,
) -> PreparedEngine:
    """Check what the student's engine is to be and lay out what it is made with; arguments as of `VllmEngine`.

    Raises:
        ValueError: vLLM is missing, or cannot run this model or these settings here.
    """
    shape = ModelShape.of(model)
    if config.vllm.quantization != "none" and device.type == "cpu":
        raise ValueError(
            f"rollout.vllm.quantization = {config.vllm.quantization!r} is for bfloat16, which vLLM does not run on a "
            "CPU; leave it out, and set rollout.quantization = 'fp8' for weights that are rounded alike"
        )
    check_model(shape, config.dtype, "rollout.dtype", on_cpu=device.type == "cpu")
    check_split(shape, config.vllm.tensor_parallel_size, "rollout.vllm.tensor_parallel_size")
    if draws:
        use_first_runner()
    require_vllm("rollout.engine")
    from titan_opd.rollout.vllm_requests import Requests

    max_model_len = sequence_tokens(config.vllm, max_prompt_tokens + max_new_tokens)
    requests = Requests(
        model,
        stop_ids=stop_ids,
        vocab_size=vocab_size,
        max_prompt_tokens=max_prompt_tokens,
        max_model_len=max_model_len,
        seed=seed,
        draws=draws,
    )
    folder = write_model(model, vocab_size=vocab_size, context=max_model_len)
    arguments = engine_arguments(
        config.vllm,
        folder=folder.name,
        dtype=config.dtype,
        max_tokens=max_model_len,
        max_concurrent=config.max_concurrent,
        prefix_caching=prefix_caching,
    )
    if config.vllm.quantization != "none":
        arguments["quantization"] = config.vllm.quantization
    if draws:
        arguments |= {"logits_processors": [DRAWS], "async_scheduling": False}
    return PreparedEngine(requests, folder, arguments)


def log_quantized(summaries: list[str], quantization: str) -> None:
    """Log which layers vLLM says it has quantised.

    Raises:
        ValueError: none, though `quantization` (`rollout.vllm.quantization`) asks for it.
    """
    if quantization == "none":
        return
    if not summaries:
        raise ValueError(
            f"rollout.vllm.quantization = {quantization!r}: vLLM has quantised no layer of this model; leave it out"
        )
    logger.info("quantised weights (vLLM's own %s): %s", quantization, "; ".join(summaries))


def open_llm(**arguments: Any) -> Any:
    """An `LLM` in this process, for as long as the process lives.

    In the trainer's processes it joins their process group, with one engine in every `tensor_parallel_size` of them;
    elsewhere it is on its own. What vLLM changes for the whole process is put back.

    Args:
        arguments: of `LLM`. A `distributed_executor_backend` among them is kept.
    """
    from vllm import LLM

    with _inside_this_process() as place:
        llm = LLM(**(place | arguments))
    # At its end vLLM destroys the process group, which is the trainer's.
    llm.llm_engine.engine_core._finalizer.detach()
    return llm


@contextlib.contextmanager
def _inside_this_process() -> Iterator[dict[str, Any]]:
    """What an `LLM` needs to know of its place; the process's own state is put back afterwards."""
    set_num_threads = torch.set_num_threads  # vLLM replaces it by a function that does nothing
    random_states = random.getstate(), numpy.random.get_state()  # and it seeds all generators
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
    before = {name: os.environ.get(name) for name in names}
    place: dict[str, Any] = {"distributed_executor_backend": "uni"}
    if dist.is_initialized():
        # Not as vLLM's data-parallel ranks, which take every step together: each writes its own answers.
        place = {"distributed_executor_backend": "external_launcher"}
        os.environ.update({"RANK": str(dist.get_rank()), "WORLD_SIZE": str(dist.get_world_size())})
        os.environ.setdefault("LOCAL_RANK", "0")
    try:
        with torch.random.fork_rng(devices), _own_shared_memory():
            yield place
    finally:
        torch.set_num_threads = set_num_threads
        random.setstate(random_states[0])
        numpy.random.set_state(random_states[1])
        for name, value in before.items():
            os.environ.pop(name, None) if value is None else os.environ.update({name: value})


@contextlib.contextmanager
def _own_shared_memory() -> Iterator[None]:
    """Let the trainer's processes on a CPU find the shared memory of their own engines.

    vLLM's tensor-parallel ranks exchange activations there, and under an external launcher it names that memory after
    the ranks' numbers alone: two runs on one machine would write into one another's.
    """
    if torch.cuda.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        yield
        return
    from vllm.distributed.device_communicators.cpu_communicator import _CPUSHMDistributed

    names = [uuid.uuid4().hex]
    dist.broadcast_object_list(names, src=0)
    by_ranks = _CPUSHMDistributed.make_group_name
    _CPUSHMDistributed.make_group_name = staticmethod(lambda communicator: f"{by_ranks(communicator)}-{names[0]}")
    try:
        yield
    finally:
        _CPUSHMDistributed.make_group_name = staticmethod(by_ranks)


def sequence_tokens(options: VllmConfig, wanted: int) -> int:
    """Tokens of the longest sequence in an engine that answers need `wanted` for."""
    return max(wanted, options.max_model_len, _SHORTEST_SEQUENCE)


def use_first_runner() -> None:
    """Let vLLM use its V1 model runner on a GPU too: `vllm_draws` is made for it. Before vLLM is imported."""
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"
