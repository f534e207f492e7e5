"""What an update of the weights costs, by transport and part: `python scripts/bench_weights.py`.

The weights are random, of SmolLM2-135M's shapes: 272 tensors, 134.5 million elements, 538 MB in float32 (the trainer's
masters) and 269 MB in bfloat16. Trainer and engine are two processes of this machine (for in_process and direct: one).
All columns of a round one after the other, median (least - most) of the rounds after two that are not counted, seconds:

    memcpy    as many bytes as the engine stores, from one place in memory to another, by as many threads
    publish   cast, gather and lay out all tensors, without digests
    take      bytes from the publication into the engine's storage, without digests
    plain     publish and take without digests (direct: there is nothing to publish)
    verified  the same with digests at both ends: what a run does

Of memcpy: the bytes that an update reads and writes in a second, against those of memcpy; with a cast it reads float32.
Extra memory: the highest resident memory of the engine's process during its updates, above that before, MiB; the
published bytes that it maps are in it.

A probe adds one forward pass of 31 tokens at each end. With --vllm (in .venv-vllm) the engine is vLLM in this process,
float32, and is compared with vLLM's own reload of a checkpoint from the page cache, which verifies nothing.
"""

from __future__ import annotations

import argparse
import ctypes
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from bench_gather_stats import cpu_model, spread
from bench_rollout import SMOLLM2_135M

from titan_opd.channel import Address, PayloadFetcher, PayloadStore, ZmqTransport
from titan_opd.config.schema import RolloutConfig, RolloutVllmConfig
from titan_opd.models import Decoder, save_decoder
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

BUCKET_BYTES = 64 << 20
NOTHING, DIGEST = Checks(digest=False, probe=False), Checks(digest=True, probe=False)
WARMUP = 2
COLUMNS = ("memcpy", "publish", "take", "plain", "verified", "extra memory")
Times = dict[str, list[float]]
TRANSPORTS = ("in_process", "shared_memory", "channel", "process_group")


def make_decoder(dtype: torch.dtype) -> Decoder:
    decoder = Decoder(SMOLLM2_135M)
    decoder.init_weights(torch.Generator().manual_seed(0))
    return decoder.to(dtype).requires_grad_(False)


def make_engine(dtype: torch.dtype) -> NativeEngine:
    config = RolloutConfig(max_concurrent=1)
    vocab_size = SMOLLM2_135M.vocab_size
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
    """An engine's process: takes what it is told to, and says how long that took and how much memory."""
    torch.set_num_threads(threads)
    engine = make_engine(dtype)
    receivers = {checks: make_receiver(transport, checks, local) for checks in (NOTHING, DIGEST)}
    pipe.send("ready")
    while (told := pipe.recv()) is not None:
        address, version, verified = told
        before = resident_mb(reset_peak=True)
        receivers[DIGEST if verified else NOTHING].take(engine, Address(*address), version)
        pipe.send(peak_mb() - before)


def resident_mb(*, reset_peak: bool = False) -> float:
    """Memory of this process, MiB."""
    if reset_peak:
        Path("/proc/self/clear_refs").write_text("5")
    return status_mb("VmRSS")


def peak_mb() -> float:
    """The most since the last reset, MiB."""
    return status_mb("VmHWM")


def status_mb(name: str) -> float:
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) / 1024


class Memcpy:
    """Copies as many bytes as an engine stores, by several threads.

    Args:
        num_bytes: of one copy.
        threads: which share it.
    """

    def __init__(self, num_bytes: int, threads: int) -> None:
        self._source = torch.full((num_bytes,), 7, dtype=torch.uint8)  # zeros would all be one page
        self._destination = torch.ones(num_bytes, dtype=torch.uint8)
        self._pool = ThreadPoolExecutor(threads)
        self._threads = threads

    def __call__(self) -> None:
        pairs = zip(self._source.chunk(self._threads), self._destination.chunk(self._threads), strict=True)
        list(self._pool.map(lambda pair: ctypes.memmove(pair[1].data_ptr(), pair[0].data_ptr(), pair[0].nbytes), pairs))


def timed(call: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def measure(transport: str, decoder: Decoder, dtype: torch.dtype, rounds: int, threads: int, memcpy: Memcpy) -> Times:
    """What a transport takes, by column."""
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
    process = None
    if transport == "in_process":
        engine = make_engine(dtype)
        receivers = {checks: make_receiver(transport, checks, local) for checks in (NOTHING, DIGEST)}
    else:
        process = context.Process(target=follow, args=(transport, dtype, threads, there))
        process.start()
        here.recv()
    address = (store.address.endpoint, store.address.public_key)
    times: Times = {name: [] for name in COLUMNS}
    source = make_source(decoder, dtype)
    publishers = {
        verified: WeightPublisher(source, [outlet], store, bucket_bytes=BUCKET_BYTES, digests=verified)
        for verified in (False, True)
    }
    version = 0

    def take(verified: bool) -> None:
        if process is None:
            receivers[DIGEST if verified else NOTHING].take(engine, store.address, version)
        else:
            here.send((address, version, verified))
            times["extra memory"].append(here.recv())

    for _ in range(WARMUP + rounds):
        times["memcpy"].append(timed(memcpy))
        for verified, publisher in publishers.items():
            version += 1
            published = timed(lambda: publisher.publish(version))  # noqa: B023 (called at once)
            taken = timed(lambda: take(verified))  # noqa: B023
            if not verified:
                times["publish"].append(published)
                times["take"].append(taken)
            times["verified" if verified else "plain"].append(published + taken)
    for publisher in publishers.values():
        for known in publisher._published:
            publisher._forget(known)
    outlet.close()
    if process is not None:
        here.send(None)
        process.join()
    store.close()
    return times


def measure_direct(decoder: Decoder, dtype: torch.dtype, rounds: int, memcpy: Memcpy) -> Times:
    """From the parameters straight into the engine: there is no publication."""
    engine = make_engine(dtype)
    times: Times = {name: [] for name in COLUMNS}
    source = make_source(decoder, dtype)
    deliveries = {
        name: DirectDelivery(source, worker="trainer-0", checks=checks)
        for name, checks in (("plain", NOTHING), ("verified", DIGEST))
    }
    version = 0
    for _ in range(WARMUP + rounds):
        times["memcpy"].append(timed(memcpy))
        before = resident_mb(reset_peak=True)
        for name, delivery in deliveries.items():
            version += 1
            times[name].append(timed(lambda: delivery.deliver(engine, version)))  # noqa: B023
        times["extra memory"].append(peak_mb() - before)
    return times


def measure_vllm(decoder: Decoder, rounds: int) -> Times:
    """vLLM in this process: our update of it, and its own reload of a checkpoint."""
    from titan_opd.rollout.vllm import VllmEngine

    engine = VllmEngine(
        decoder.config,
        config=RolloutConfig(engine="vllm", max_concurrent=1, vllm=RolloutVllmConfig(kv_cache_mb=64)),
        stop_ids=(),
        vocab_size=SMOLLM2_135M.vocab_size,
        max_prompt_tokens=8,
        max_new_tokens=8,
        seed=0,
        draws=False,
        device=torch.device("cpu"),
    )
    # Its weights come from a trainer, and vLLM would refuse to look for them in files.
    engine._llm.llm_engine.vllm_config.load_config.load_format = "auto"
    source = make_source(decoder, torch.float32)
    deliveries = {
        name: DirectDelivery(source, worker="trainer-0", checks=checks)
        for name, checks in (("plain", NOTHING), ("verified", DIGEST))
    }
    times: Times = {name: [] for name in ("reload", *deliveries)}
    version = 0
    with tempfile.TemporaryDirectory() as folder:
        save_decoder(decoder, folder)
        reload = {"weights_path": folder}
        for _ in range(WARMUP + rounds):
            times["reload"].append(timed(lambda: engine._llm.collective_rpc("reload_weights", kwargs=reload)))
            for name, delivery in deliveries.items():
                version += 1
                times[name].append(timed(lambda: delivery.deliver(engine, version)))  # noqa: B023
    return times


def row(title: str, times: Times, moved: float) -> str:
    """Of the table; `moved`: bytes that an update reads and writes, for each that memcpy does."""
    counted = {name: values[WARMUP:] for name, values in times.items()}
    shares = (
        moved * statistics.median(counted["memcpy"]) / statistics.median(counted[n]) for n in ("plain", "verified")
    )
    seconds = (spread(counted[name], 3) if counted[name] else "-" for name in COLUMNS[:-1])
    memory = f"{max(counted['extra memory']):.0f}" if counted["extra memory"] else "-"
    return "| " + " | ".join([title, *seconds, *(f"{share:.0%}" for share in shares), memory]) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7, help="counted updates of each kind")
    parser.add_argument("--transports", nargs="*", default=list(TRANSPORTS), choices=TRANSPORTS)
    parser.add_argument("--threads", type=int, default=1, help="of torch, in each process")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--vllm", action="store_true", help="vLLM against its own reload, and nothing else")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    dtype = torch.float32 if arguments.vllm else getattr(torch, arguments.dtype)
    decoder = make_decoder(torch.float32)
    num_bytes = sum(value.numel() for value in decoder.parameters()) * dtype.itemsize
    print(__doc__)
    print(
        f"{cpu_model()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, {arguments.threads} thread(s) a "
        f"process, {str(dtype).removeprefix('torch.')}: {num_bytes / 1e6:.0f} MB, in buckets of "
        f"{BUCKET_BYTES / 1e6:.0f}\n"
    )
    if arguments.vllm:
        print("| vLLM's own reload | plain | verified |\n|---|---|---|")
        times = measure_vllm(decoder, arguments.rounds)
        print("| " + " | ".join(spread(values[WARMUP:], 3) for values in times.values()) + " |")
        return
    memcpy = Memcpy(num_bytes, arguments.threads)
    moved = (4 + dtype.itemsize) / (2 * dtype.itemsize)
    print(f"| transport | {' | '.join(COLUMNS[:-1])} | plain of memcpy | verified of memcpy | extra memory, MiB |")
    print("|" + "---|" * (len(COLUMNS) + 3))
    print(row("direct", measure_direct(decoder, dtype, arguments.rounds, memcpy), moved), flush=True)
    for transport in arguments.transports:
        found = measure(transport, decoder, dtype, arguments.rounds, arguments.threads, memcpy)
        print(row(transport, found, moved), flush=True)


if __name__ == "__main__":
    main()
