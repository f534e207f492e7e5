"""What a step changes of the weights, and what it saves to send only that: `python scripts/bench_weight_delta.py`.

For each learning rate SmolLM2-135M (`scripts/fetch_smollm2.py`) learns from the guides of this repository: AdamW as a
run has it, float32 masters, 64 tokens a step (with AdamW a step's size hardly depends on them). After each step its
weights are published in bfloat16, once without and once with changes, in turns, and taken by an engine of each kind,
digests at both ends. Trainer and engines are one process; `shared_memory` and `channel` (ZeroMQ) lie in between.

    first       share of the bfloat16 elements that the first step changes. A checkpoint in bfloat16 lies on the
                rounding's grid, so a small step moves nothing over an edge
    changed     the same later: the masters were spread evenly over what rounds to the same number, as long training
                does, and some steps were made since; the mean of the counted steps
    tensors     unchanged, sparse, whole
    bytes       of the changes, against the whole tensors
    publish     seconds of the trainer, without and with changes
    take        seconds of an engine by a transport, whole tensors and changes; "-" where no changes are published

Seconds are medians, with the least and the greatest.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import torch
from bench_weights import BUCKET_BYTES, DIGEST, make_engine, make_source
from fetch_smollm2 import cache_root
from torch import Tensor

from titan_opd.channel import PayloadFetcher, PayloadStore, ZmqTransport
from titan_opd.config.schema import OptimizerConfig
from titan_opd.data import load_tokenizer
from titan_opd.models import Decoder, PackedAttention, load_decoder
from titan_opd.weights.delta import compare
from titan_opd.weights.publisher import WeightPublisher
from titan_opd.weights.receiver import WeightReceiver
from titan_opd.weights.transports import WEIGHT_LIMITS, ChannelOutlet, SharedMemoryOutlet

LEARNING_RATES = (1e-6, 3e-6, 1e-5, 3e-5, 1e-4, 1e-3)
TRANSPORTS = ("shared_memory", "channel")
DTYPE = torch.bfloat16
TOKENS = 64  # of a step


class Student:
    """The model, its optimizer, and a text that it goes on reading."""

    def __init__(self, folder: Path, learning_rate: float) -> None:
        self.decoder = load_decoder(folder, dtype=torch.float32)
        config = OptimizerConfig()
        self._optimizer = torch.optim.AdamW(
            self.decoder.parameters(),
            lr=learning_rate,
            betas=config.betas,
            eps=config.eps,
            weight_decay=config.weight_decay,
            fused=True,
        )
        guides = sorted(Path(__file__).parents[1].glob("titan_opd/*/README.md"))
        text = " ".join(guide.read_text() for guide in guides)
        self._ids = torch.tensor(load_tokenizer(str(folder))(text)["input_ids"])
        self._begin = 0

    def step(self) -> None:
        ids = self._ids[self._begin : self._begin + TOKENS + 1]
        self._begin += TOKENS
        attention = PackedAttention(torch.tensor([0, TOKENS], dtype=torch.int32), TOKENS)
        hidden = self.decoder(ids[:-1], torch.arange(TOKENS), attention)
        torch.nn.functional.cross_entropy(hidden @ self.decoder.lm_head_weight.T, ids[1:]).backward()
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)

    def cast(self) -> list[Tensor]:
        return [value.detach().to(DTYPE) for value in self.decoder.parameters()]

    @torch.no_grad()
    def spread(self) -> None:
        """Move each master somewhere into the interval that rounds to its present bfloat16 number."""
        for value in self.decoder.parameters():
            value.copy_(value.to(DTYPE))
            noise = torch.randint(-(1 << 15) + 1, 1 << 15, value.shape, dtype=torch.int32)
            value.view(torch.int32).add_(noise * (value != 0))


class Ends:
    """A publisher, and an engine that follows it by each transport."""

    def __init__(self, decoder: Decoder, *, delta: bool) -> None:
        transport = ZmqTransport()
        self.store = PayloadStore(
            transport, name="weights", capacity_bytes=4 << 30, consumer="the engine", limits=WEIGHT_LIMITS
        )
        folder = Path("/dev/shm") / f"titan-opd-bench-{os.getpid()}-{delta}"
        outlets = [SharedMemoryOutlet(folder), ChannelOutlet(self.store)]
        source = make_source(decoder, DTYPE)
        self.publisher = WeightPublisher(source, outlets, self.store, bucket_bytes=BUCKET_BYTES, delta=delta)
        self.engine = make_engine(DTYPE)
        self.receivers = {
            name: WeightReceiver(
                PayloadFetcher(transport, name=name, limits=WEIGHT_LIMITS),
                worker="rollout-0",
                checks=DIGEST,
                transport=name,
                timeout=120,
                device=torch.device("cpu"),
                delta=delta,
            )
            for name in TRANSPORTS
        }

    def close(self) -> None:
        self.publisher.close()
        self.store.close()


def measure(folder: Path, learning_rate: float, warmup: int, updates: int) -> tuple[float, dict[str, list[float]]]:
    """The share of the first step, and the metrics and seconds of each counted one by name."""
    student = Student(folder, learning_rate)
    before = student.cast()
    student.step()
    counts = [compare(old, new, most=0)[0] for old, new in zip(before, student.cast(), strict=True)]
    first = sum(counts) / sum(one.numel() for one in before)
    student.spread()
    kinds = {"whole": Ends(student.decoder, delta=False), "delta": Ends(student.decoder, delta=True)}
    found: dict[str, list[float]] = defaultdict(list)
    for version in range(1, warmup + updates + 1):
        student.step()
        counted = version > warmup
        for kind, ends in list(kinds.items())[:: 1 if version % 2 else -1]:
            seconds = {f"publish {kind}": _seconds(ends.publisher.publish, version)}
            for name, receiver in ends.receivers.items():
                spent = _seconds(receiver.take, ends.engine, ends.store.address, version)
                if receiver.took_delta == (kind == "delta"):
                    seconds[f"take {kind} {name}"] = spent
            for what, value in (seconds | ends.publisher.metrics).items() if counted else ():
                found[what].append(value)
    for ends in kinds.values():
        ends.close()
    return first, found


def _seconds(action: Callable[..., object], *arguments: object) -> float:
    begin = time.perf_counter()
    action(*arguments)
    return time.perf_counter() - begin


def _range(values: list[float]) -> str:
    if not values:
        return "-"
    return f"{statistics.median(values):.2f} ({min(values):.2f}-{max(values):.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--learning-rates", nargs="*", type=float, default=LEARNING_RATES)
    parser.add_argument("--warmup", type=int, default=4, help="steps before the counted ones, at each rate")
    parser.add_argument("--updates", type=int, default=5, help="counted steps at each rate")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print(__doc__)
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, one thread\n")
    columns = ["learning rate", "first", "changed", "tensors", "bytes", "publish", "with changes"]
    columns += [f"take, {name}, {form}" for name in TRANSPORTS for form in ("whole", "changes")]
    print("| " + " | ".join(columns) + " |\n|" + "---|" * len(columns))
    for rate in arguments.learning_rates:
        first, found = measure(cache_root() / "smollm2-135m-instruct", rate, arguments.warmup, arguments.updates)
        kinds = [round(statistics.median(found[f"weights/tensors_{one}"])) for one in ("unchanged", "sparse", "whole")]
        cells = [f"{rate:g}", f"{first:.1%}", f"{statistics.mean(found['weights/changed_share']):.1%}"]
        cells += [" / ".join(map(str, kinds)), f"{statistics.mean(found['weights/delta_share']):.1%}"]
        cells += [_range(found["publish whole"]), _range(found["publish delta"])]
        cells += [_range(found[f"take {form} {name}"]) for name in TRANSPORTS for form in ("whole", "delta")]
        print("| " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
