"""What an update of the weights costs, by transport and part: `python scripts/bench_weights.py`.

The weights are random, of SmolLM2-135M's shapes: 272 tensors, 134.5 million elements, 538 MB in float32 (the trainer's
masters) and 269 MB in bfloat16 (what travels and what the engine stores). Trainer and engine are two processes of this
machine (for in_process and direct: one). Each number is the least of several updates after two that are not counted,
for others may use the machine too:

    publish   cast, gather and lay out all tensors, without digests
    digest    of all tensors, at one end
    take      bytes from the publication into the engine's storage, without digests
    update    publish and take with digests at both ends: what a run does

A probe adds one forward pass of 31 tokens at each end.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import platform
import time
from pathlib import Path
from typing import Any

import torch

from titan_opd.channel import Address, PayloadFetcher, PayloadStore, ZmqTransport
from titan_opd.config.schema import RolloutConfig
from titan_opd.models import Decoder, DecoderConfig
from titan_opd.rollout import NativeEngine
from titan_opd.weights.direct import DirectDelivery
from titan_opd.weights.publisher import WeightPublisher
from titan_opd.weights.receiver import Checks, WeightReceiver
from titan_opd.weights.source import WeightSource
from titan_opd.weights.transports import (
    WEIGHT_LIMITS,
    ChannelOutlet,
    InProcess,
    Outlet,
    ProcessGroupOutlet,
    SharedMemoryOutlet,
)
from titan_opd.weights.verify import digest

SMOLLM2 = {
    "model_type": "llama",
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
}
BUCKET_BYTES = 64 << 20
NOTHING, DIGEST = Checks(digest=False, probe=False), Checks(digest=True, probe=False)
WARMUP = 2
TRANSPORTS = ("in_process", "shared_memory", "channel", "process_group")


def make_decoder(dtype: torch.dtype) -> Decoder:
    decoder = Decoder(DecoderConfig.from_dict(SMOLLM2))
    decoder.init_weights(torch.Generator().manual_seed(0))
    return decoder.to(dtype).requires_grad_(False)


def make_engine(dtype: torch.dtype) -> NativeEngine:
    config = RolloutConfig(max_concurrent=1)
    vocab_size = SMOLLM2["vocab_size"]
    return NativeEngine(
        make_decoder(dtype), config=config, stop_ids=(), vocab_size=vocab_size, max_prompt_tokens=8, seed=0
    )


def make_source(decoder: Decoder, dtype: torch.dtype) -> WeightSource:
    return WeightSource(decoder, dtype=dtype, bucket_bytes=BUCKET_BYTES, timeout=120)


def make_receiver(transport: str, checks: Checks, local: InProcess | None) -> WeightReceiver:
    fetcher = PayloadFetcher(ZmqTransport(), name="rollout-0", limits=WEIGHT_LIMITS)
    device = torch.device("cpu")
    return WeightReceiver(
        fetcher, worker="rollout-0", checks=checks, transport=transport, timeout=120, device=device, local=local
    )


def follow(transport: str, dtype: torch.dtype, threads: int, pipe: Any, local: InProcess | None = None) -> None:
    """An engine's process: takes what it is told to, and says how long that took."""
    torch.set_num_threads(threads)
    engine = make_engine(dtype)
    receivers = {checks: make_receiver(transport, checks, local) for checks in (NOTHING, DIGEST)}
    pipe.send("ready")
    while (told := pipe.recv()) is not None:
        address, version, verified = told
        begin = time.perf_counter()
        receivers[DIGEST if verified else NOTHING].take(engine, Address(*address), version)
        pipe.send(time.perf_counter() - begin)


def measure(transport: str, decoder: Decoder, dtype: torch.dtype, updates: int, threads: int) -> dict[str, float]:
    """The least of each, seconds."""
    store = PayloadStore(
        ZmqTransport(), name="weights", capacity_bytes=4 << 30, consumer="the engine", limits=WEIGHT_LIMITS
    )
    local = InProcess()
    memory = Path("/dev/shm") / f"titan-opd-bench-{os.getpid()}"
    makers: dict[str, Any] = {
        "in_process": lambda: local,
        "shared_memory": lambda: SharedMemoryOutlet(memory),
        "channel": lambda: ChannelOutlet(store),
        "process_group": lambda: ProcessGroupOutlet("127.0.0.1", torch.device("cpu"), timeout=120),
    }
    outlet: Outlet = makers[transport]()
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    engine, receivers = None, {}
    process = None
    if transport == "in_process":
        engine = make_engine(dtype)
        receivers = {checks: make_receiver(transport, checks, local) for checks in (NOTHING, DIGEST)}
    else:
        process = context.Process(target=follow, args=(transport, dtype, threads, there))
        process.start()
        here.recv()
    address = (store.address.endpoint, store.address.public_key)
    version = 0
    times: dict[str, list[float]] = {"publish": [], "take": [], "update": []}
    for verified in (False, True):
        source = make_source(decoder, dtype)
        publisher = WeightPublisher(source, [outlet], store, bucket_bytes=BUCKET_BYTES, digests=verified)
        for round_number in range(WARMUP + updates):
            version += 1
            begin = time.perf_counter()
            publisher.publish(version)
            published = time.perf_counter()
            if process is None:
                receivers[DIGEST if verified else NOTHING].take(engine, store.address, version)
            else:
                here.send((address, version, verified))
                here.recv()
            end = time.perf_counter()
            if round_number < WARMUP:
                continue
            if verified:
                times["update"].append(end - begin)
            else:
                times["publish"].append(published - begin)
                times["take"].append(end - published)
        for known in (version - 1, version):
            publisher._forget(known)
    outlet.close()
    if process is not None:
        here.send(None)
        process.join()
    store.close()
    return {name: min(values) for name, values in times.items()}


def measure_direct(decoder: Decoder, dtype: torch.dtype, updates: int) -> dict[str, float]:
    """From the parameters straight into the engine: there is no publication."""
    engine = make_engine(dtype)
    result = {}
    version = 0
    for name, checks in (("take", NOTHING), ("update", DIGEST)):
        source = make_source(decoder, dtype)
        delivery = DirectDelivery(source, worker="trainer-0", checks=checks, bucket_bytes=BUCKET_BYTES)
        times = []
        for _ in range(WARMUP + updates):
            version += 1
            begin = time.perf_counter()
            delivery.deliver(engine, version)
            times.append(time.perf_counter() - begin)
        result[name] = min(times[WARMUP:])
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--updates", type=int, default=5, help="counted updates of each kind")
    parser.add_argument("--transports", nargs="*", default=list(TRANSPORTS), choices=TRANSPORTS)
    parser.add_argument("--threads", type=int, default=1, help="of torch, in each process")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    dtype = getattr(torch, arguments.dtype)
    decoder = make_decoder(torch.float32)
    num_bytes = sum(value.numel() for value in decoder.parameters()) * dtype.itemsize
    print(__doc__)
    print(
        f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, "
        f"{arguments.threads} thread(s) a process, {arguments.dtype}: {num_bytes / 1e6:.0f} MB; seconds\n"
    )
    stored = make_decoder(dtype)
    digests = []
    for _ in range(WARMUP + arguments.updates):
        begin = time.perf_counter()
        for value in stored.parameters():
            digest(value)
        digests.append(time.perf_counter() - begin)
    print(f"digest of all tensors: {min(digests[WARMUP:]):.2f}\n")
    print("| transport | publish | take | update, verified |\n|---|---|---|---|")
    found = measure_direct(decoder, dtype, arguments.updates)
    print(f"| direct | - | {found['take']:.2f} | {found['update']:.2f} |", flush=True)
    for transport in arguments.transports:
        found = measure(transport, decoder, dtype, arguments.updates, arguments.threads)
        print(f"| {transport} | {found['publish']:.2f} | {found['take']:.2f} | {found['update']:.2f} |", flush=True)


if __name__ == "__main__":
    main()
