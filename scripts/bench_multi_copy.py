"""Measures multi_copy against a loop of Tensor.copy_, on the parameters of SmolLM2-135M, float32 into bfloat16.

    python scripts/bench_multi_copy.py [--threads 2] [--device cuda]

One weight update: all 272 tensors, 134.5 million elements. The two ways take turns in each round; wall time in ms,
median [smallest .. largest], the first (warming) round left out. With --cpu-time, which on a busy machine is steadier,
the time that this process was computing (take one thread then).
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable

import torch

from titan_opd import ops

NUM_LAYERS, HIDDEN, KEY_VALUE, INTERMEDIATE, VOCABULARY = 30, 576, 192, 1536, 49152
LAYER_SHAPES = [
    (HIDDEN, HIDDEN),
    (KEY_VALUE, HIDDEN),
    (KEY_VALUE, HIDDEN),
    (HIDDEN, HIDDEN),
    (INTERMEDIATE, HIDDEN),
    (INTERMEDIATE, HIDDEN),
    (HIDDEN, INTERMEDIATE),
    (HIDDEN,),
    (HIDDEN,),
]
SHAPES = [(VOCABULARY, HIDDEN), *(LAYER_SHAPES * NUM_LAYERS), (HIDDEN,)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--cpu-time", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    device = torch.device(options.device)
    sources = [torch.randn(shape, device=device) for shape in SHAPES]
    destinations = [torch.empty_like(source, dtype=torch.bfloat16) for source in sources]

    def loop() -> None:
        for source, destination in zip(sources, destinations, strict=True):
            destination.copy_(source)

    ways: dict[str, Callable[[], None]] = {
        "copy_ in a loop": loop,
        "multi_copy": lambda: ops.multi_copy(sources, destinations),
    }
    clock, kind_of_time = (time.process_time, "CPU") if options.cpu_time else (time.perf_counter, "wall")
    times: dict[str, list[float]] = {name: [] for name in ways}
    for round_number in range(options.rounds + 1):
        for name, way in ways.items():
            start = clock()
            way()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            if round_number:
                times[name].append((clock() - start) * 1e3)
    print(
        f"{options.threads} threads, torch {torch.__version__}, {ops.describe(device)}, load {os.getloadavg()[0]:.1f}"
    )
    for name, values in times.items():
        print(f"{name:16} {statistics.median(values):7.2f} [{min(values):.2f} .. {max(values):.2f}] {kind_of_time} ms")
    ratios = [a / b for a, b in zip(times["copy_ in a loop"], times["multi_copy"], strict=True)]
    print(f"speed-up, median over rounds: {statistics.median(ratios):.2f}")


if __name__ == "__main__":
    main()
