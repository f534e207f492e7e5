"""The three roles beside the trainer, from the configuration to their loops; in a process of their own or a thread."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

import titan_opd
from titan_opd.assemble import Common, build_stream, load_scorer, what_to_record
from titan_opd.channel import Address, ConductorPort, PayloadFetcher, PayloadStore, Transport, WorkerPort
from titan_opd.channel.messages import PROTOCOL_VERSION, Hello, Role
from titan_opd.checkpoint import model_folder
from titan_opd.config import Config
from titan_opd.rollout import NativeEngine
from titan_opd.schedule.conductor import Conductor
from titan_opd.schedule.rules import ScheduleRules
from titan_opd.schedule.service import ConductorService
from titan_opd.teacher import Scorer
from titan_opd.weights.quantization import describe_quantization
from titan_opd.weights.receiver import Checks, WeightReceiver
from titan_opd.weights.transports import WEIGHT_LIMITS, InProcess
from titan_opd.workers.connection import port_limits
from titan_opd.workers.identity import run_identity
from titan_opd.workers.rollout import RolloutWorker
from titan_opd.workers.teacher import TeacherWorker

logger = logging.getLogger(__name__)
START_SECONDS = 600.0  # how long the roles wait for a conductor: on a busy machine its imports take minutes
_ADDRESS_SECONDS = 15.0  # how long a conductor waits for its address: that of a killed one is free after a while


def serve_conductor(
    config: Config,
    common: Common,
    transport: Transport,
    endpoint: str,
    *,
    num_ranks: int,
    restore: Mapping[str, Any] | None,
    stop: threading.Event,
) -> None:
    """Conduct the run until the trainer leaves or `stop` is set.

    Args:
        config: of the run.
        common: the prompts.
        transport, endpoint: where it listens.
        num_ranks: data-parallel ranks of the trainer.
        restore: `{"state": of a snapshot, "stored": numbers of the kept samples}` when a run goes on.

    Raises:
        ValueError: the address is taken, or the run cannot go on from the snapshot.
    """
    teacher = None if config.teacher.engine == "none" else model_folder(config.teacher.path)
    identity = run_identity(common.tokenizer, common.train_prompts, common.student, teacher)
    port = _listen(transport, endpoint, identity, config)
    store = PayloadStore(transport, name="conductor", capacity_bytes=1 << 30, consumer="the trainer")
    conductor = Conductor(
        ScheduleRules.of(config.schedule),
        common.stream(config),
        lease_seconds=config.channel.silence_seconds * 2,  # the port finds silence first
        incarnation=os.urandom(4).hex(),
    )
    if restore is not None:
        conductor.restore(restore["state"], stored=restore["stored"])
    ConductorService(
        port,
        conductor,
        prompt_indices={prompt.id: index for index, prompt in enumerate(common.train_prompts)},
        num_ranks=num_ranks,
        lease_seconds=config.channel.lease_seconds,
        store=store,
    ).run(stop)


def _join(transport: Transport, conductor: Address, hello: Hello) -> WorkerPort:
    """Say Hello to the conductor, which may still be starting; errors as of `WorkerPort.connect`."""
    logger.info("%s: waits for the conductor at %s, at most %g s", hello.name, conductor.endpoint, START_SECONDS)
    return WorkerPort.connect(transport, conductor, hello, timeout=START_SECONDS)


def serve_rollout(
    config: Config,
    common: Common,
    transport: Transport,
    conductor: Address,
    *,
    name: str,
    device: torch.device,
    local_weights: InProcess | None = None,
    stop: threading.Event | None = None,
) -> None:
    """Write answers until the conductor says Stop or `stop` is set.

    Args:
        local_weights: the published versions of this process, when it is one of the trainer's.

    Raises:
        RefusedError: the conductor does not take this worker; the text says why.
        ChannelError: the conductor is gone.
        WeightError: the trainer's weights do not fit the engine.
    """
    engine = build_stream(config, common, device)
    for line in describe_quantization(engine.weight_specs(), getattr(torch, config.rollout.dtype)):
        logger.info("%s: %s", name, line)
    store = open_store(config, transport, name, consumer="the teachers and the trainer")
    hello = make_hello(config, common, "rollout", name, store.address)
    port = _join(transport, conductor, hello)
    receiver = WeightReceiver(
        PayloadFetcher(transport, name=name, limits=WEIGHT_LIMITS),
        worker=name,
        checks=Checks.of(config.weights.verify),
        transport=config.weights.transport,
        timeout=config.weights.timeout_seconds,
        device=device,
        local=local_weights,
        delta=config.weights.delta,
    )
    worker = RolloutWorker(
        engine,
        port,
        receiver,
        store,
        prompts=common.train_prompts,
        sampling=config.rollout.sampling,
        recording=what_to_record(config.objective, config.rollout),
        finish_first=config.schedule.in_flight == "wait",
    )
    try:
        worker.run(stop)
    finally:
        if not isinstance(engine, NativeEngine):  # it has processes of its own
            engine.close()
        receiver.close()
        store.close()


def serve_teacher(
    config: Config,
    common: Common,
    transport: Transport,
    conductor: Address,
    *,
    name: str,
    device: torch.device,
    scorer: Scorer | None = None,
    stop: threading.Event | None = None,
) -> None:
    """Score answers until the conductor says Stop or `stop` is set.

    Args:
        scorer: one that is there already, in the trainer's process; None: the teacher's model is read.

    Raises:
        RefusedError: the conductor does not take this worker; the text says why.
        ChannelError: the conductor is gone.
        ValueError: the teacher's files are missing or broken.
    """
    if scorer is None:
        scorer = load_scorer(config, common, device)
    store = open_store(config, transport, name, consumer="the trainer")
    hello = make_hello(config, common, "teacher", name, store.address)
    port = _join(transport, conductor, hello)
    worker = TeacherWorker(
        scorer, port, PayloadFetcher(transport, name=name), store, at_a_time=answers_at_a_time(config)
    )
    try:
        worker.run(stop)
    finally:
        store.close()


def answers_at_a_time(config: Config) -> int:
    """Most answers that a teacher takes in one call: a share of the batch, so that the teachers share the work."""
    return max(1, min(16, config.schedule.batch // max(1, 2 * config.teacher.workers)))


def open_store(config: Config, transport: Transport, name: str, *, consumer: str) -> PayloadStore:
    """A role's store, of the size that the configuration gives each."""
    capacity = int(config.channel.store_mb * 2**20)
    return PayloadStore(transport, name=name, capacity_bytes=capacity, consumer=consumer)


def make_hello(config: Config, common: Common, role: Role, name: str, store: Address | None) -> Hello:
    """How a role introduces itself. Reads all prompts for their digest: make it once."""
    teacher: Path | None = model_folder(config.teacher.path) if role == "teacher" else None
    identity = run_identity(common.tokenizer, common.train_prompts, common.student, teacher)
    return Hello(
        protocol=PROTOCOL_VERSION,
        package_version=titan_opd.__version__,
        role=role,
        name=name,
        vocabulary_digest=identity.vocabulary_digest,
        model_digest=identity.model_digests.get(role, ""),
        prompts_digest=identity.prompts_digest,
        teachers=["default"] if role == "teacher" else [],
        store=store,
        wall_time=time.time(),
    )


def _listen(transport: Transport, endpoint: str, identity: Any, config: Config) -> ConductorPort:
    end = time.monotonic() + _ADDRESS_SECONDS
    while True:
        try:
            return ConductorPort(transport, endpoint, identity, port_limits(config))
        except ValueError:
            if time.monotonic() > end:
                raise
            time.sleep(0.2)
