"""Time of the loss head over the whole vocabulary: by the operators on pairs of logits, and by elementwise passes.

    python scripts/bench_dense_loss.py [--tokens 1024] [--threads 2]

One call from hidden states to both gradients, the teacher's logits among it; the ways of a round take turns, so that a
change of the machine's speed meets all of them. products: the four bare matrix products (both sides' logits, the two
gradients), in the head's chunks. Wall time in ms, median [smallest .. largest], the first (warming) round left out;
with --cpu-time, which on a busy machine is steadier, the time that this process was computing (take one thread then:
threads that wait for each other count as computing).
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable

import torch

from titan_opd.losses import Objective, TeacherScores
from titan_opd.losses.dense_route import dense_route
from titan_opd.losses.elementwise_route import ElementwiseRoute
from titan_opd.losses.head import run_head
from titan_opd.losses.inputs import build_inputs
from titan_opd.ops import describe


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--hidden", type=int, default=576)
    parser.add_argument("--vocabulary", type=int, default=49152)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--logits-chunk-mb", type=float, default=256.0)
    parser.add_argument("--cpu-time", action="store_true")
    options = parser.parse_args()
    clock, kind_of_time = (time.process_time, "CPU") if options.cpu_time else (time.perf_counter, "wall")
    torch.set_num_threads(options.threads)
    shape = f"N={options.tokens} H={options.hidden} V={options.vocabulary}"
    print(f"{shape}, {options.threads} threads, torch {torch.__version__}, {describe(torch.device('cpu'))}")
    load = f"load {os.getloadavg()[0]:.1f} of {os.cpu_count()} cores"
    print(f"median [min .. max] of {options.repeats}, {kind_of_time} ms; {load}")
    print("| | objective | products | elementwise | operators | over products | speed-up |")
    print("|---|---|---|---|---|---|---|")
    for dtype in (torch.float32, torch.bfloat16):
        for kind in ("forward_kl", "jsd"):
            times = measure(ways(options, kind, dtype), options.repeats, clock)
            cells = [f"{statistics.median(t):.0f} [{min(t):.0f} .. {max(t):.0f}]" for t in times.values()]
            ratios = [
                statistics.median(a / b for a, b in zip(times[one], times[other], strict=True))
                for one, other in (("operators", "products"), ("elementwise", "operators"))
            ]
            cells = [str(dtype).removeprefix("torch."), kind, *cells, *(f"{ratio:.2f}" for ratio in ratios)]
            print("| " + " | ".join(cells) + " |", flush=True)


def ways(options: argparse.Namespace, kind: str, dtype: torch.dtype) -> dict[str, Callable[[], None]]:
    """The three ways, each a function that computes both gradients once."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(options.tokens, options.hidden, generator=generator).to(dtype)
    weight = (torch.randn(options.vocabulary, options.hidden, generator=generator) * 0.05).to(dtype)
    teacher_hidden = hidden + (0.3 * torch.randn(hidden.shape, generator=generator)).to(dtype)
    objective = Objective(kind, support="dense")
    inputs, teacher = build_inputs(
        hidden,
        weight,
        objective,
        TeacherScores(hidden=teacher_hidden, lm_head_weight=weight),
        torch.ones(options.tokens),
        vocab_size=None,
        tp_group=None,
        logits_chunk_mb=options.logits_chunk_mb,
    )

    logits, teacher_logits = (hidden.new_empty(inputs.rows_per_chunk, len(weight)) for _ in range(2))
    grad_hidden, grad_weight = torch.empty_like(hidden), torch.empty_like(weight)

    def products() -> None:
        for first in range(0, options.tokens, inputs.rows_per_chunk):
            rows = slice(first, min(first + inputs.rows_per_chunk, options.tokens))
            count = rows.stop - rows.start
            torch.mm(hidden[rows], weight.T, out=logits[:count])
            torch.mm(teacher_hidden[rows], weight.T, out=teacher_logits[:count])
            torch.mm(logits[:count], weight, out=grad_hidden[rows])
            torch.mm(logits[:count].T, hidden[rows], out=grad_weight)

    def elementwise() -> None:
        run_head(inputs, ElementwiseRoute(objective, teacher), for_hidden=True, for_weight=True)

    def operators() -> None:
        run_head(inputs, dense_route(objective, teacher), for_hidden=True, for_weight=True)

    return {"products": products, "elementwise": elementwise, "operators": operators}


def measure(
    functions: dict[str, Callable[[], None]], repeats: int, clock: Callable[[], float]
) -> dict[str, list[float]]:
    """Milliseconds of each repeat of each function, the functions taking turns."""
    times: dict[str, list[float]] = {name: [] for name in functions}
    for round_number in range(repeats + 1):
        for name, function in functions.items():
            start = clock()
            function()
            if round_number:
                times[name].append((clock() - start) * 1e3)
    return times


if __name__ == "__main__":
    main()
