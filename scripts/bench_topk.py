"""Measures topk_logprobs against torch.topk and torch.logsumexp, which together say less: nothing of the tail.

    python scripts/bench_topk.py [--rounds 9] [--threads 2]

Prints its definition, the machine, a table in Markdown, and a line of JSON for each of its rows. Outputs are checked
against each other first.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

from titan_opd import ops

DEFINITION = """\
One call over all rows, wall time in ms; {rounds} rounds after {warmup} for warm-up, the calls of a round one after the
other, so that all meet the same machine. Median (fastest - slowest). topk_logprobs: ids, logits, maximum and sum-exp,
both over the tail too. torch: torch.topk(logits, k) and torch.logsumexp(logits, 1). Speed-up: median over rounds of
torch's time over topk_logprobs' in the same round (smallest - largest). GB/s: the logits' bytes over the median."""

WARMUP_ROUNDS = 2
CASES = [
    ((1024, 49_152), torch.float32, 64),
    ((1024, 49_152), torch.bfloat16, 64),
    ((1024, 49_152), torch.float32, 256),
    ((256, 151_936), torch.bfloat16, 64),
]


def cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()


def milliseconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return (time.perf_counter() - start) * 1e3


def spread(values: list[float], digits: int) -> str:
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f} - {max(values):.{digits}f})"


def check(logits: torch.Tensor, k: int) -> None:
    found = ops.topk_logprobs(logits[:8], k)
    expected = logits[:8].double().log_softmax(1).topk(k).values.float()  # in float32 torch is off by 5e-5
    torch.testing.assert_close(found.logprobs, expected, rtol=1e-5, atol=1e-5)


def bench(shape: tuple[int, int], dtype: torch.dtype, k: int, rounds: int) -> tuple[str, dict[str, object]]:
    """One row of the table, and the same for programs."""
    logits = (torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 4).to(dtype)
    check(logits, k)
    calls: dict[str, Callable[[], object]] = {
        "topk_logprobs": lambda: ops.topk_logprobs(logits, k),
        "torch": lambda: (torch.topk(logits, k), torch.logsumexp(logits, 1)),
    }
    times: dict[str, list[float]] = {name: [] for name in calls}
    for round_number in range(WARMUP_ROUNDS + rounds):
        for name, call in calls.items():
            elapsed = milliseconds(call)
            if round_number >= WARMUP_ROUNDS:
                times[name].append(elapsed)
    speedups = [theirs / ours for theirs, ours in zip(times["torch"], times["topk_logprobs"], strict=True)]
    rate = logits.numel() * logits.element_size() / statistics.median(times["topk_logprobs"]) / 1e6
    dtype_name = str(dtype).removeprefix("torch.")
    cells = [f"[{shape[0]} x {shape[1]}]", dtype_name, str(k), *(spread(t, 1) for t in times.values())]
    record = {"shape": shape, "dtype": dtype_name, "k": k, "ms": times, "speedup": statistics.median(speedups)}
    return "| " + " | ".join([*cells, spread(speedups, 1), f"{rate:.1f}"]) + " |", record


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9, help="timed rounds (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="torch's threads (default: all)")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)

    print(DEFINITION.format(rounds=arguments.rounds, warmup=WARMUP_ROUNDS))
    kernels = ops.describe(torch.device("cpu"))
    print(f"\n{cpu_model()}, {arguments.threads} thread(s), torch {torch.__version__}, {kernels}\n")
    print("| logits | dtype | k | topk_logprobs | torch | speed-up | GB/s |")
    print("|---|---|---|---|---|---|---|")
    records = []
    for shape, dtype, k in CASES:
        line, record = bench(shape, dtype, k, arguments.rounds)
        print(line, flush=True)
        records.append(record)
    print()
    for record in records:
        print(json.dumps(record))


if __name__ == "__main__":
    main()
