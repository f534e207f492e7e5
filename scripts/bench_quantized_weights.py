"""What rollout weights of 8 bits cost, save and do to the policy: `python scripts/bench_quantized_weights.py`.

SmolLM2-135M (`scripts/fetch_smollm2.py`), float32 masters. Trainer and engine are one process.

    bytes       of a published version; weights that are not quantised are in bfloat16
    publish     seconds of the trainer: cast, quantise, lay out, digests
    take        seconds of the engine by shared memory: copy, digests of what is stored
    decode      tokens a second of the native engine with products in float32, 16 answers of 32 tokens to pieces of this
                repository's guides; one run, no median
    gap         of these answers' tokens: absolute difference of the engine's log-probability and the float32 model's,
                mean and largest, in nats
    probe       mean difference of the text that verifies updates (`weights/probe_gap`), with products in float32 and in
                bfloat16, in nats

Kinds are measured in turns; seconds are medians, with the least and the greatest.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections import defaultdict
from pathlib import Path

import torch
from bench_weight_delta import _range, _seconds
from bench_weights import BUCKET_BYTES, DIGEST, make_receiver, make_source
from fetch_smollm2 import cache_root

from titan_opd.channel import PayloadStore, ZmqTransport
from titan_opd.config.schema import RolloutConfig, SamplingConfig
from titan_opd.data import Prompt, Sample, load_tokenizer
from titan_opd.models import Decoder, load_decoder
from titan_opd.rollout import RECORD_NOTHING, NativeEngine, Recording
from titan_opd.rollout.quantized import quantize_linears
from titan_opd.rollout.row_update import RowUpdate
from titan_opd.weights.probe import probe_ids
from titan_opd.weights.publisher import WeightPublisher
from titan_opd.weights.quantized_source import QuantizedSource
from titan_opd.weights.transports import WEIGHT_LIMITS, SharedMemoryOutlet

KINDS = ("none", "int8", "fp8")
SAMPLING = SamplingConfig(max_new_tokens=32)
NUM_ANSWERS, PROMPT_TOKENS = 16, 48


class Kind:
    """A publisher, and an engine that follows it."""

    def __init__(self, folder: Path, student: Decoder, quantization: str) -> None:
        source = make_source(student, torch.bfloat16)
        self.source = source if quantization == "none" else QuantizedSource(source, quantization)
        self.store = PayloadStore(
            ZmqTransport(), name="weights", capacity_bytes=1 << 20, consumer="the engine", limits=WEIGHT_LIMITS
        )
        outlet = SharedMemoryOutlet(Path(tempfile.mkdtemp(dir="/dev/shm", prefix="titan-opd-bench-")) / "weights")
        self.publisher = WeightPublisher(self.source, [outlet], self.store, bucket_bytes=BUCKET_BYTES)
        self.receiver = make_receiver("shared_memory", DIGEST, None)
        self.engine = make_engine(load_engine(folder, quantization, torch.bfloat16))

    def take(self, version: int) -> None:
        self.receiver.take(self.engine, self.store.address, version)


def load_engine(folder: Path, quantization: str, dtype: torch.dtype) -> Decoder:
    decoder = load_decoder(folder, dtype=dtype).requires_grad_(False)
    if quantization != "none":
        quantize_linears(decoder, quantization)
    return decoder


def make_engine(decoder: Decoder) -> NativeEngine:
    size = decoder.config.vocab_size
    config = RolloutConfig(max_concurrent=NUM_ANSWERS)
    return NativeEngine(decoder, config=config, stop_ids=(), vocab_size=size, max_prompt_tokens=PROMPT_TOKENS, seed=0)


def make_samples(folder: Path) -> list[Sample]:
    guides = sorted(Path(__file__).parents[1].glob("titan_opd/*/README.md"))
    ids = torch.tensor(load_tokenizer(str(folder))(" ".join(guide.read_text() for guide in guides))["input_ids"])
    pieces = ids[: len(ids) // NUM_ANSWERS * NUM_ANSWERS].view(NUM_ANSWERS, -1)[:, :PROMPT_TOKENS]
    return [Sample(number, 0, 0, Prompt(str(number), piece)) for number, piece in enumerate(pieces)]


@torch.no_grad()
def probe(decoder: Decoder) -> torch.Tensor:
    size = decoder.config.vocab_size
    return RowUpdate(decoder, {}, 0, size).logprobs(probe_ids(size))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--updates", type=int, default=5, help="counted ones of each kind, after two others")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print(__doc__)
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, one thread\n")
    folder = cache_root() / "smollm2-135m-instruct"
    student = load_decoder(folder, dtype=torch.float32).requires_grad_(False)
    found: dict[str, list[float]] = defaultdict(list)
    kinds = {name: Kind(folder, student, name) for name in KINDS}
    for version in range(1, arguments.updates + 3):
        for name, kind in kinds.items():
            seconds = {"publish": _seconds(kind.publisher.publish, version), "take": _seconds(kind.take, version)}
            for what, value in seconds.items():
                found[f"{name} {what}"] += [value] if version > 2 else []
    num_bytes = {name: sum(spec.num_bytes for spec in kind.source.specs.values()) for name, kind in kinds.items()}
    for kind in kinds.values():
        kind.publisher.close()
        kind.store.close()
    del kinds, kind
    samples, exact, expected = make_samples(folder), make_engine(student), probe(student)
    print("| quantization | MB | publish | take | decode | gap, mean / largest | probe, float32 / bfloat16 |")
    print("|---|---|---|---|---|---|---|")
    for name in KINDS:
        decoder = load_engine(folder, name, torch.float32)
        begin = time.perf_counter()
        answers = make_engine(decoder).generate(samples, SAMPLING, RECORD_NOTHING)
        speed = NUM_ANSWERS * SAMPLING.max_new_tokens / (time.perf_counter() - begin)
        read = exact.read(answers, SAMPLING, Recording(top_k=1))
        gap = torch.cat([a.behavior_logprobs - b.behavior_logprobs for a, b in zip(answers, read, strict=True)]).abs()
        probes = [probe(decoder), probe(load_engine(folder, name, torch.bfloat16))]
        cells = [name, f"{num_bytes[name] / 1e6:.0f}", _range(found[f"{name} publish"]), _range(found[f"{name} take"])]
        cells += [f"{speed:.0f}", f"{gap.mean():.3f} / {gap.max():.2f}"]
        cells += [" / ".join(f"{(one - expected).abs().mean():.3f}" for one in probes)]
        print("| " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
