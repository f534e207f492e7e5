"""Time and memory of the loss head: forward KL on the teacher's top K with a bucket, forward and backward, on a CPU.

Four ways from hidden states and output projection to the gradients of both take turns, so that a change of the
machine's speed meets all of them:

- products: the bare matrix products that any exact head must do (logits, gradient of the hidden states, gradient of the
  projection). In float32 on whole matrices; in bfloat16 in this head's chunks, with the projection's gradient summed in
  float32, because a sum over all tokens in bfloat16 is another, worse result;
- autograd: log_softmax of all logits, gather, and PyTorch's own backward;
- recompute: the same in this head's chunks, each under torch.utils.checkpoint: logits are computed twice;
- head: `titan_opd.losses.distillation_loss`.

Times are without the first (warming) round: wall time; with --cpu-time, which on a busy machine is steadier, the time
that this process was computing (take one thread then: threads that wait for each other count as computing). The memory
is the highest resident size during one call less that before it: all temporaries, and the gradients.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch.utils.checkpoint import checkpoint

from titan_opd.losses import Objective, TeacherScores, distillation_loss
from titan_opd.ops import describe


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--hidden", type=int, default=576)
    parser.add_argument("--vocabulary", type=int, default=49152)
    parser.add_argument("--candidates", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--logits-chunk-mb", type=float, default=256.0)
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"], choices=["float32", "bfloat16"])
    parser.add_argument("--cpu-time", action="store_true")
    parser.add_argument("--json", type=Path, help="append one line of JSON for each way to this file")
    options = parser.parse_args()
    clock = time.process_time if options.cpu_time else time.perf_counter
    torch.set_num_threads(options.threads)
    operators = describe(torch.device("cpu"))
    machine = f"{options.threads} threads of {cpu_name()}, torch {torch.__version__}, {operators}"
    date, load, clock_name = time.strftime("%Y-%m-%d"), os.getloadavg()[0], "CPU" if options.cpu_time else "wall"
    print(
        f"N = {options.tokens}, H = {options.hidden}, V = {options.vocabulary}, K = {options.candidates}, "
        f"logits_chunk_mb = {options.logits_chunk_mb:g}; {machine}; {date}, load {load:.1f} of {os.cpu_count()} cores\n"
        f"{clock_name} ms, median [least .. most] of {options.repeats}; extra peak memory\n\n"
        "| dtype | way | ms | over products | extra MiB |\n|---|---|---|---|---|"
    )
    for name in options.dtypes:
        functions = ways(options, getattr(torch, name))
        memory = {way: extra_memory(function) for way, function in functions.items()}  # the warming round
        times = measure(functions, options.repeats, clock)
        bare = statistics.median(times["products"])
        for way, values in times.items():
            median, least, most = statistics.median(values), min(values), max(values)
            ratio = median / bare
            print(f"| {name} | {way} | {median:.0f} [{least:.0f} .. {most:.0f}] | {ratio:.2f} | {memory[way]:.0f} |")
            if options.json is not None:
                record = {"date": date, "machine": machine, "dtype": name, "way": way, "ms": values}
                settings = {key: value for key, value in vars(options).items() if key not in ("json", "dtypes")}
                with options.json.open("a") as file:
                    file.write(json.dumps({**record, "extra_mib": memory[way], **settings}) + "\n")


def ways(options: argparse.Namespace, dtype: torch.dtype) -> dict[str, Callable[[], None]]:
    """The four ways, each a function that computes both gradients once."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(options.tokens, options.hidden, generator=generator).to(dtype)
    weight = (torch.randn(options.vocabulary, options.hidden, generator=generator) * 0.05).to(dtype)
    scores = teacher_scores(hidden, weight, options.candidates, generator)
    leaves = (hidden.requires_grad_(), weight.requires_grad_())
    rows_that_fit = int(options.logits_chunk_mb * 2**20 / (options.vocabulary * dtype.itemsize))
    num_chunks = -(-options.tokens // max(1, rows_that_fit))
    rows_per_chunk = -(-options.tokens // num_chunks)
    chunks = [slice(first, first + rows_per_chunk) for first in range(0, options.tokens, rows_per_chunk)]

    @torch.no_grad()
    def products() -> None:
        grad_hidden, grad_weight = torch.empty_like(hidden), torch.zeros(weight.shape)
        logits = hidden.new_empty(options.tokens if dtype == torch.float32 else rows_per_chunk, options.vocabulary)
        if dtype == torch.float32:
            torch.mm(hidden, weight.T, out=logits)
            torch.mm(logits, weight, out=grad_hidden)
            torch.mm(logits.T, hidden, out=grad_weight)
            return
        part = torch.empty_like(weight)
        for rows in chunks:
            chunk = logits[: len(hidden[rows])]
            torch.mm(hidden[rows], weight.T, out=chunk)
            torch.mm(chunk, weight, out=grad_hidden[rows])
            torch.mm(chunk.T, hidden[rows], out=part)
            grad_weight.add_(part)

    def losses(hidden: torch.Tensor, weight: torch.Tensor, rows: slice) -> torch.Tensor:
        log_q, log_q_tail = scores.logprobs[rows], scores.tail_logprobs[rows]
        student = (hidden @ weight.T).float().log_softmax(-1)
        log_p = student.gather(1, scores.ids[rows])
        log_p_tail = torch.log1p(-log_p.exp().sum(-1).clamp(max=1 - 1e-6))
        return (log_q.exp() * (log_q - log_p)).sum(-1) + log_q_tail.exp() * (log_q_tail - log_p_tail)

    def autograd() -> None:
        torch.autograd.grad(losses(*leaves, slice(None)).mean(), leaves)

    def recompute() -> None:
        parts = [checkpoint(losses, hidden[rows], weight, rows, use_reentrant=False).sum() for rows in chunks]
        torch.autograd.grad(sum(parts) / options.tokens, leaves)

    def head() -> None:
        output = distillation_loss(
            *leaves,
            Objective("forward_kl", support="teacher_topk", tail="bucket"),
            scores,
            torch.ones(options.tokens),
            logits_chunk_mb=options.logits_chunk_mb,
        )
        torch.autograd.grad(output.loss, leaves)

    return {"products": products, "autograd": autograd, "recompute": recompute, "head": head}


def teacher_scores(
    hidden: torch.Tensor, weight: torch.Tensor, num_candidates: int, generator: torch.Generator
) -> TeacherScores:
    """Top candidates of a teacher near the student, a few rows at a time."""
    parts = []
    for rows in hidden.float().split(256):
        logits = rows @ weight.float().T
        logits += 0.3 * torch.randn(logits.shape, generator=generator)
        parts.append(logits.log_softmax(-1).topk(num_candidates))
    logprobs, ids = (torch.cat(columns) for columns in zip(*parts, strict=True))
    return TeacherScores(ids=ids, logprobs=logprobs, tail_logprobs=torch.log1p(-logprobs.exp().sum(-1)))


def extra_memory(function: Callable[[], None]) -> float:
    """MiB by which the process's resident memory grows at the most while the function runs, which ran once before."""
    function()
    Path("/proc/self/clear_refs").write_text("5")  # the highest resident size so far becomes the present one
    before = resident("VmRSS")
    function()
    return (resident("VmHWM") - before) / 1024


def resident(field: str) -> int:
    """KiB, of a field of the process's status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:"))


def measure(
    functions: dict[str, Callable[[], None]], repeats: int, clock: Callable[[], float]
) -> dict[str, list[float]]:
    """Milliseconds of each repeat of each function, the functions taking turns."""
    times: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(repeats):
        for name, function in functions.items():
            start = clock()
            function()
            times[name].append((clock() - start) * 1e3)
    return times


def cpu_name() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())


if __name__ == "__main__":
    main()
