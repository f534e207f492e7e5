"""Trainers and engines in processes of their own, for the tests of the weight stream. Imported by spawned processes."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from tests.distributed.parallel_cases import STUDENTS, make_student
from tests.engines.writing import make_decoder
from tests.helpers.arithmetic import VOCAB_SIZE
from tests.helpers.weights import BUCKET_BYTES, DIGEST_ONLY, answers, engine_on, holds, stored_by_hand
from titan_opd.channel import Address, PayloadFetcher, PayloadStore, ZmqTransport
from titan_opd.config.schema import ParallelConfig, TrainingConfig
from titan_opd.learner import DistillationModel
from titan_opd.models import Decoder
from titan_opd.parallel import open_world, parallelize
from titan_opd.weights.direct import DirectDelivery
from titan_opd.weights.errors import TransferError
from titan_opd.weights.publisher import WeightPublisher
from titan_opd.weights.quantized_source import QuantizedSource
from titan_opd.weights.receiver import WeightReceiver
from titan_opd.weights.source import Source, WeightSource
from titan_opd.weights.transports import (
    WEIGHT_LIMITS,
    ChannelOutlet,
    CudaIpcOutlet,
    InProcess,
    ProcessGroupOutlet,
    SharedMemoryOutlet,
)

TRANSPORTS = ("shared_memory", "channel", "process_group")
__all__ = ["CudaIpcOutlet"]
CPU = torch.device("cpu")
SECONDS = 60.0  # for what does not fail, on a busy machine


def sharded(decoder: Decoder, mesh: DeviceMesh) -> Decoder:
    """The decoder under FSDP."""
    for layer in decoder.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(decoder, mesh=mesh)


def make_source(decoder: Decoder, *, bucket_bytes: int = BUCKET_BYTES, timeout: float = SECONDS) -> WeightSource:
    return WeightSource(decoder, dtype=torch.bfloat16, bucket_bytes=bucket_bytes, timeout=timeout)


def make_outlets(transport: str, store: PayloadStore, folder: Path) -> list[Any]:
    match transport:
        case "shared_memory":
            return [SharedMemoryOutlet(folder / f"memory-{os.getpid()}")]
        case "channel":
            return [ChannelOutlet(store)]
        case "process_group":
            return [ProcessGroupOutlet("127.0.0.1", CPU, timeout=SECONDS)]
        case "auto":
            return [SharedMemoryOutlet(folder / f"memory-{os.getpid()}"), ChannelOutlet(store)]
    raise ValueError(transport)


def make_store(transport: ZmqTransport, name: str = "weights") -> PayloadStore:
    return PayloadStore(transport, name=name, capacity_bytes=1 << 26, consumer="the engines", limits=WEIGHT_LIMITS)


def make_receiver(
    transport: str, name: str, *, timeout: float = SECONDS, local: InProcess | None = None
) -> WeightReceiver:
    fetcher = PayloadFetcher(ZmqTransport(), name=name, limits=WEIGHT_LIMITS)
    return WeightReceiver(
        fetcher, worker=name, checks=DIGEST_ONLY, transport=transport, timeout=timeout, device=CPU, local=local
    )


# ---- Trainers of one and two processes, and an engine beside them ----------------------------------------------------


def stream(num_trainers: int, folder: Path) -> dict[Any, Any]:
    """Every transport, tied and untied: what an engine has after two versions. The last process has the engine."""
    rank = dist.get_rank()
    mesh = DeviceMesh("cpu", torch.arange(num_trainers))
    group = dist.new_group(list(range(num_trainers)))
    results: dict[Any, Any] = {}
    for transport in (*TRANSPORTS, "auto"):
        for tied in (False, True):
            shape = {"tie_word_embeddings": tied}
            case = _train if rank < num_trainers else _follow
            results[transport, tied] = case(transport, shape, mesh, folder, num_trainers)
    if rank < num_trainers:
        for tied in (False, True):
            results["in_process", tied] = _both_in_one(mesh, {"tie_word_embeddings": tied}, group)
    return results


def _train(transport: str, shape: dict[str, Any], mesh: DeviceMesh, folder: Path, num_trainers: int) -> dict[str, Any]:
    is_main = dist.get_rank() == 0
    store = make_store(ZmqTransport()) if is_main else None
    outlets = make_outlets(transport, store, folder) if store is not None else []
    publisher = None
    source = None
    for version, seed in ((1, 1), (2, 2)):
        source = make_source(sharded(make_decoder(seed=seed, **shape), mesh))
        if publisher is None:
            publisher = WeightPublisher(source, outlets, store, bucket_bytes=BUCKET_BYTES)
        publisher.source = source
        publisher.publish(version)
        dist.broadcast_object_list([None if store is None else tuple(_plain(store.address))], src=0)
        dist.barrier()  # the engine has it
    publisher.close()
    if store is not None:
        store.close()
    return {"peak_bytes": source.peak_bytes}


def _plain(address: Address) -> tuple[str, str]:
    return address.endpoint, address.public_key


def _follow(transport: str, shape: dict[str, Any], mesh: DeviceMesh, folder: Path, num_trainers: int) -> dict[str, Any]:
    engine = engine_on(0, **shape)
    receiver = make_receiver(transport, "rollout-0")
    found: dict[str, Any] = {}
    for version, seed in ((1, 1), (2, 2)):
        told: list[Any] = [None]
        dist.broadcast_object_list(told, src=0)
        receiver.take(engine, Address(*told[0]), version)
        found[f"holds {seed}"] = holds(engine, make_decoder(seed=seed, **shape))
        dist.barrier()
    found["transport"] = receiver.transport
    found["answers"] = answers(engine) == answers(engine_on(2, **shape))
    receiver.close()
    return found


def _both_in_one(mesh: DeviceMesh, shape: dict[str, Any], group: dist.ProcessGroup) -> dict[str, Any]:
    """An engine in each trainer's process: straight from the parameters, and from a copy in the process."""
    source = make_source(sharded(make_decoder(seed=1, **shape), mesh))
    engine = engine_on(0, **shape)
    DirectDelivery(source, worker="trainer", checks=DIGEST_ONLY).deliver(engine, 1)
    direct = holds(engine, make_decoder(seed=1, **shape))
    source = make_source(sharded(make_decoder(seed=2, **shape), mesh))
    local, store = InProcess(), make_store(ZmqTransport(), "local")
    WeightPublisher(source, [local], store, bucket_bytes=BUCKET_BYTES).publish(2)
    receiver = make_receiver("in_process", "rollout-in", local=local)
    receiver.take(engine, store.address, 2)
    dist.barrier(group)
    store.close()
    return {"direct": direct, "copy": holds(engine, make_decoder(seed=2, **shape)), "peak_bytes": source.peak_bytes}


# ---- Placements other than FSDP's alone; more than two ranks ---------------------------------------------------------


def placements(folder: Path) -> dict[str, Any]:
    """A decoder whose parameters are split in every way over a mesh of two by two, walked through twice."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    ways = [
        [Shard(0), Shard(0)],
        [Shard(0), Shard(1)],
        [Replicate(), Shard(0)],
        [Shard(0), Replicate()],
        [Replicate(), Replicate()],
        [Shard(1), Replicate()],
    ]
    decoder, whole = make_decoder(seed=3), make_decoder(seed=3)
    for i, (name, value) in enumerate(list(decoder.named_parameters())):
        way = ways[i % len(ways)] if value.dim() == 2 else [Replicate(), Shard(0)] if i % 2 else [Replicate()] * 2
        module = decoder.get_submodule(name.rpartition(".")[0])
        setattr(module, name.rpartition(".")[2], nn.Parameter(distribute_tensor(value.detach(), mesh, way)))
    found: dict[str, Any] = {}
    sources: dict[str, Source] = {
        str(size): make_source(decoder, bucket_bytes=size) for size in (700, BUCKET_BYTES, 1 << 24)
    }
    for kind, source in (sources | {"int8": QuantizedSource(make_source(decoder), "int8")}).items():
        got = {name: torch.full(spec.shape, -1, dtype=spec.dtype) for name, spec in source.specs.items()}
        for pieces in source.buckets():
            time.sleep(0.001 * dist.get_rank())  # ranks that are at different places of the walk
            for piece in pieces:
                piece.rows_of(got[piece.name]).copy_(piece.tensor)
        expected = stored_by_hand(whole, torch.bfloat16, "int8" if kind == "int8" else "none")
        found[kind] = [name for name, value in expected.items() if not torch.equal(value, got[name])]
    return found


def fsdp_and_tp(folder: Path) -> dict[str, Any]:
    """Students on a mesh of two by two: the names of the tensors that come out wrong, and the memory that it took."""
    found: dict[str, Any] = {}
    parallel = ParallelConfig(tp=2)
    with open_world(parallel) as world:
        for student in STUDENTS:
            model = DistillationModel(make_student(student), vocab_size=VOCAB_SIZE, logits_chunk_mb=0.01)
            parallelize(model, model.decoder, world.mesh, TrainingConfig(steps=1), parallel)
            source = make_source(model.decoder)
            got = {name: torch.full(spec.shape, -1, dtype=spec.dtype) for name, spec in source.specs.items()}
            for pieces in source.buckets():
                for piece in pieces:
                    piece.rows_of(got[piece.name]).copy_(piece.tensor)
            expected = {name: value.detach() for name, value in make_student(student).named_parameters()}
            wrong = [name for name, value in expected.items() if not torch.equal(value.to(source.dtype), got[name])]
            found[student] = {"wrong": wrong, "peak_bytes": source.peak_bytes}
    return found


def late(folder: Path) -> str:
    """The first process gathers, the second does not come."""
    mesh = init_device_mesh("cpu", (2,))
    source = make_source(sharded(make_decoder(), mesh), timeout=1.0)
    if dist.get_rank() == 1:
        time.sleep(4)
        return ""
    try:
        for _ in source.buckets():
            pass
    except TransferError as error:
        return str(error)
    return "no error"


# ---- To be killed ----------------------------------------------------------------------------------------------------


def serve(transport: str, folder: Path, seed: int, version: int, pipe: Any) -> None:
    """A trainer that publishes one version, says where, and serves it until it is killed."""
    torch.set_num_threads(1)
    store = make_store(ZmqTransport())
    source = make_source(make_decoder(seed=seed))
    WeightPublisher(source, make_outlets(transport, store, folder), store, bucket_bytes=BUCKET_BYTES).publish(version)
    pipe.send(_plain(store.address))
    time.sleep(600)


def take_and_die(transport: str, address: tuple[str, str], version: int) -> None:
    """An engine that dies, as by kill -9, while it writes its second bucket."""
    torch.set_num_threads(1)
    engine = engine_on(0)
    dying = Dying(engine, on_write=2, action=lambda: os.kill(os.getpid(), signal.SIGKILL))
    make_receiver(transport, "rollout-9").take(dying, Address(*address), version)


def take_on_gpu(address: tuple[str, str], version: int, pipe: Any) -> None:
    """Says whether an engine on the trainer's GPU holds what was published."""
    device = torch.device("cuda", 0)
    engine = engine_on(0)
    engine._decoder.to(device)
    fetcher = PayloadFetcher(ZmqTransport(), name="rollout-0", limits=WEIGHT_LIMITS)
    receiver = WeightReceiver(
        fetcher, worker="rollout-0", checks=DIGEST_ONLY, transport="cuda_ipc", timeout=SECONDS, device=device
    )
    receiver.take(engine, Address(*address), version)
    engine._decoder.cpu()
    pipe.send(holds(engine, make_decoder(seed=1)))


class Dying:
    """An engine in whose n-th write something happens."""

    takes_rows = True

    def __init__(self, engine: Any, *, on_write: int, action: Any) -> None:
        self.engine, self.left, self.action = engine, on_write, action

    def weight_specs(self) -> Any:
        return self.engine.weight_specs()

    def update_weights(self, version: int) -> Any:
        context = self.engine.update_weights(version)
        enter = context.__enter__

        class Entered:
            def __enter__(_):
                update = enter()
                write = update.write

                def counted(pieces):
                    self.left -= 1
                    if self.left == 0:
                        self.action()
                    write(pieces)

                update.write = counted
                return update

            def __exit__(_, *details):
                return context.__exit__(*details)

        return Entered()
