"""The trainer's end of the weights, from the configuration: which transports serve the engines of a run."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import torch

from titan_opd.assemble import Parts
from titan_opd.channel import PayloadStore
from titan_opd.config import Config
from titan_opd.parallel import World
from titan_opd.weights.direct import DirectDelivery
from titan_opd.weights.probe import TrainerProbe
from titan_opd.weights.publisher import WeightPublisher
from titan_opd.weights.quantization import describe_quantization
from titan_opd.weights.quantized_source import QuantizedSource
from titan_opd.weights.receiver import Checks
from titan_opd.weights.source import Source, WeightSource
from titan_opd.weights.transports import (
    ChannelOutlet,
    CudaIpcOutlet,
    InProcess,
    Outlet,
    ProcessGroupOutlet,
    SharedMemoryOutlet,
)
from titan_opd.weights.transports.shared_memory import MEMORY
from titan_opd.weights.version_delta import MOST_BYTES
from titan_opd.workers.connection import local_name

logger = logging.getLogger(__name__)


def build_source(config: Config, parts: Parts) -> Source:
    """The student's weights, as the engines store them."""
    source = WeightSource(
        parts.student,
        dtype=getattr(torch, config.rollout.dtype),
        bucket_bytes=_bucket_bytes(config),
        timeout=config.weights.timeout_seconds,
    )
    quantization = config.rollout.quantization
    return source if quantization == "none" else QuantizedSource(source, quantization)


def build_probe(config: Config, parts: Parts) -> TrainerProbe | None:
    """What makes the trainer's side of the probe; None where `weights.verify` does not ask for it."""
    if not Checks.of(config.weights.verify).probe:
        return None
    return TrainerProbe(
        parts.model,
        vocab_size=parts.model.vocab_size,
        engine_dtype=getattr(torch, config.rollout.dtype),
        compute_dtype=getattr(torch, config.training.compute_dtype),
        quantization="fp8" if config.rollout.vllm.quantization != "none" else config.rollout.quantization,
    )


def build_delivery(config: Config, parts: Parts, world: World) -> DirectDelivery:
    """From the trainer straight into this process's engine."""
    return DirectDelivery(
        build_source(config, parts),
        worker=f"trainer-{world.rank}",
        checks=Checks.of(config.weights.verify),
    )


def build_publisher(
    config: Config, parts: Parts, world: World, store: PayloadStore | None, local: InProcess | None
) -> WeightPublisher:
    """What keeps new versions for the engines.

    Args:
        store: of the main process, for manifests and for what goes by the channel; None in the others.
        local: where this process's own engine reads them; None where the engines are workers.

    Raises:
        ValueError: a transport that this machine does not have.
    """
    outlets: list[Outlet] = []
    if local is not None:
        outlets = [local]
    elif store is not None:
        outlets = _outlets(config, parts, world, store)
    checks = Checks.of(config.weights.verify)
    source = build_source(config, parts)
    delta = config.weights.delta and bool(outlets)
    return WeightPublisher(
        source, outlets, store, bucket_bytes=_bucket_bytes(config), digests=checks.digest, delta=delta
    )


def version_bytes(config: Config, parts: Parts) -> int:
    """Of one version, with room for the gaps between its tensors, and for what changed where that is published."""
    whole = sum(spec.num_bytes + 4096 for spec in build_source(config, parts).specs.values())
    return whole + int(MOST_BYTES * whole) if config.weights.delta else whole


def describe_weights(config: Config, parts: Parts) -> list[str]:
    """Lines that say how weights travel and what is checked, and which of them are quantised."""
    transport = config.weights.transport
    if config.rollout.placement == "colocated":
        transport = "in_process"
    elif transport == "auto":
        transport = "shared_memory on this machine, channel to others"
    form = ", only what changed" if config.weights.delta else ""
    line = f"weights: {config.rollout.dtype}, by {transport}{form}; verified: {config.weights.verify}"
    specs = build_source(config, parts).specs
    return [line, *describe_quantization(specs, getattr(torch, config.rollout.dtype))]


def _outlets(config: Config, parts: Parts, world: World, store: PayloadStore) -> list[Outlet]:
    device = world.device
    match config.weights.transport:
        case "auto":
            needed = 3 * version_bytes(config, parts)
            if MEMORY.is_dir() and shutil.disk_usage(MEMORY).free > needed:
                return [SharedMemoryOutlet(shared_folder(config)), ChannelOutlet(store)]
            logger.warning(
                "%s has no room for %d bytes (three versions of the weights): engines on this machine fetch them by "
                "the channel, with two copies more; enlarge it (a container's --shm-size)",
                MEMORY,
                needed,
            )
            return [ChannelOutlet(store)]
        case "shared_memory":
            return [SharedMemoryOutlet(shared_folder(config))]
        case "channel":
            return [ChannelOutlet(store)]
        case "process_group":
            return [ProcessGroupOutlet(_host(store), device, timeout=config.weights.timeout_seconds)]
        case "cuda_ipc":
            if device.type != "cuda":
                raise ValueError(
                    f"weights.transport = 'cuda_ipc' shares memory of a GPU, and the trainer runs on {device.type}; "
                    "set it to 'auto'"
                )
            return [CudaIpcOutlet(device)]
    raise AssertionError(config.weights.transport)


def shared_folder(config: Config) -> Path:
    """Where a run's weights lie in memory: the run's own, as `run.directory` is."""
    return MEMORY / local_name(config)


def _host(store: PayloadStore) -> str:
    """This machine's address, as the engines reach the store."""
    endpoint = store.address.endpoint
    if not endpoint.startswith("tcp://"):
        return "127.0.0.1"
    return endpoint.removeprefix("tcp://").rpartition(":")[0].strip("[]")


def _bucket_bytes(config: Config) -> int:
    return max(1, int(config.weights.bucket_mb * 2**20))
