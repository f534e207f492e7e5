"""Measures gather_stats against torch.logsumexp, alone and with the gather that it replaces.

    python scripts/bench_gather_stats.py [--rounds 30] [--threads 1]

Prints its definition, the machine, and a table in Markdown. The outputs are checked against each other first.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

from titan_opd import ops

DEFINITION = """\
One call over all rows, wall time in ms; {rounds} rounds after {warmup} for warm-up, the calls of a round one after the
other, so that all meet the same machine. Median (fastest - slowest). gather_stats: maximum, sum-exp, both over the
tail, and {num_ids} gathered logits a row. logsumexp: torch.logsumexp(logits, 1). + gather: with logits.gather(1, ids).
Speed-up: median over rounds of logsumexp's time over gather_stats' in the same round (smallest - largest)."""

SHAPES = [(64, 32_000), (512, 49_152), (64, 151_936)]
WARMUP_ROUNDS = 3


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


def bench(num_rows: int, vocab: int, dtype: torch.dtype, num_ids: int, rounds: int) -> str:
    """One row of the table."""
    generator = torch.Generator().manual_seed(0)
    logits = (torch.randn(num_rows, vocab, generator=generator) * 4).to(dtype)
    ids = torch.randint(vocab, (num_rows, num_ids), generator=generator)
    torch.testing.assert_close(ops.gather_stats(logits, ids).lse, torch.logsumexp(logits.float(), 1))
    calls: dict[str, Callable[[], object]] = {
        "gather_stats": lambda: ops.gather_stats(logits, ids),
        "logsumexp": lambda: torch.logsumexp(logits, 1),
        "+ gather": lambda: (torch.logsumexp(logits, 1), logits.gather(1, ids)),
    }
    times: dict[str, list[float]] = {name: [] for name in calls}
    for round_number in range(WARMUP_ROUNDS + rounds):
        for name, call in calls.items():
            elapsed = milliseconds(call)
            if round_number >= WARMUP_ROUNDS:
                times[name].append(elapsed)
    speedups = [theirs / ours for theirs, ours in zip(times["logsumexp"], times["gather_stats"], strict=True)]
    cells = [f"[{num_rows} x {vocab}]", str(dtype).removeprefix("torch."), *(spread(t, 2) for t in times.values())]
    return "| " + " | ".join([*cells, spread(speedups, 1)]) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30, help="timed rounds (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="torch's threads (default: all)")
    parser.add_argument("--num-ids", type=int, default=64, help="ids a row (default: %(default)s)")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)

    print(DEFINITION.format(rounds=arguments.rounds, warmup=WARMUP_ROUNDS, num_ids=arguments.num_ids))
    kernels = ops.describe(torch.device("cpu"))
    print(f"\n{cpu_model()}, {arguments.threads} thread(s), torch {torch.__version__}, {kernels}\n")
    print("| logits | dtype | gather_stats | logsumexp | + gather | speed-up over logsumexp |")
    print("|---|---|---|---|---|---|")
    for num_rows, vocab in SHAPES:
        for dtype in (torch.float32, torch.bfloat16):
            print(bench(num_rows, vocab, dtype, arguments.num_ids, arguments.rounds), flush=True)


if __name__ == "__main__":
    main()
