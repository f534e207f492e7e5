"""Time of the loss head: forward KL on the teacher's top K with a bucket, forward and backward, on this machine.

Three ways are timed in turn, so that a change of the machine's speed meets all of them:

- products: the three bare matrix products that any exact head must do (logits, gradient of the hidden states,
  gradient of the output projection), on whole matrices;
- autograd: log_softmax of all logits, gather, and PyTorch's own backward;
- fused: `titan_opd.losses.distillation_loss`.

Counted: from hidden states and output projection to both gradients, without the first (warming) round. Wall time; with
--cpu-time, which on a busy machine is steadier, the time that this process was computing (take one thread then: threads
that wait for each other count as computing).
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable

import torch

from titan_opd.losses import Objective, TeacherScores, distillation_loss
from titan_opd.ops import describe


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--hidden", type=int, default=576)
    parser.add_argument("--vocabulary", type=int, default=49152)
    parser.add_argument("--candidates", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--logits-chunk-mb", type=float, default=256.0)
    parser.add_argument("--cpu-time", action="store_true")
    options = parser.parse_args()
    clock = time.process_time if options.cpu_time else time.perf_counter
    torch.set_num_threads(options.threads)
    shape = f"T={options.tokens} H={options.hidden} V={options.vocabulary} K={options.candidates}"
    kind = "CPU" if options.cpu_time else "wall"
    print(f"{shape}, {options.threads} threads, torch {torch.__version__}, {describe(torch.device('cpu'))}")
    print(
        f"median [min .. max] of {options.repeats}, {kind} ms; load {os.getloadavg()[0]:.1f} of {os.cpu_count()} cores"
    )
    for dtype in (torch.float32, torch.bfloat16):
        times = measure(ways(options, dtype), options.repeats, clock)
        bare = statistics.median(times["products"])
        for name, values in times.items():
            median = statistics.median(values)
            spread = f"[{min(values):6.0f} .. {max(values):6.0f}]"
            print(
                f"{str(dtype).removeprefix('torch.'):9} {name:9} {median:6.0f} {spread}  {median / bare:.2f}x products"
            )


def ways(options: argparse.Namespace, dtype: torch.dtype) -> dict[str, Callable[[], None]]:
    """The three ways, each a function that computes both gradients once."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(options.tokens, options.hidden, generator=generator).to(dtype)
    weight = (torch.randn(options.vocabulary, options.hidden, generator=generator) * 0.05).to(dtype)
    teacher_logits = hidden.float() @ weight.float().T
    teacher_logits += 0.3 * torch.randn(teacher_logits.shape, generator=generator)
    logprobs, ids = teacher_logits.log_softmax(-1).topk(options.candidates)
    del teacher_logits
    tail_logprobs = torch.log1p(-logprobs.exp().sum(-1))
    scores = TeacherScores(ids=ids, logprobs=logprobs, tail_logprobs=tail_logprobs)
    objective = Objective("forward_kl", support="teacher_topk", tail="bucket")
    leaves = (hidden.requires_grad_(), weight.requires_grad_())

    def products() -> None:
        with torch.no_grad():
            logits = hidden @ weight.T
            logits @ weight
            logits.T @ hidden

    def autograd() -> None:
        student = (hidden @ weight.T).float().log_softmax(-1)
        inside = student.gather(1, ids)
        log_tail = torch.log1p(-inside.exp().sum(-1).clamp(max=1 - 1e-6))
        per_token = (logprobs.exp() * (logprobs - inside)).sum(-1) + tail_logprobs.exp() * (tail_logprobs - log_tail)
        torch.autograd.grad(per_token.mean(), leaves)

    def fused() -> None:
        output = distillation_loss(
            *leaves, objective, scores, torch.ones(options.tokens), logits_chunk_mb=options.logits_chunk_mb
        )
        torch.autograd.grad(output.loss, leaves)

    return {"products": products, "autograd": autograd, "fused": fused}


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
