"""Time of the loss head on a GPU against the three matrix products that it cannot avoid.

    python scripts/profile_loss_head.py [--tokens 8192] [--hidden 4096] [--vocab 131072] [--candidates 64]

Forward KL on the teacher's top candidates with a bucket, forward and backward, in bfloat16. Needs a CUDA device.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from gpu_timing import WARMUP, Timing, machine, require_gpu, time_in_turn

from titan_opd.losses import Objective, TeacherScores, distillation_loss

DEFINITION = f"""\
By CUDA events, {{rounds}} rounds after {WARMUP} for warm-up, both in turn: median (fastest - slowest), ms.
products: logits = hidden W^T, grad of hidden = logits W, grad of W = logits^T hidden, in bfloat16 on whole matrices.
head: distillation_loss and the gradients of hidden states and projection. Peak: memory above what the inputs take."""


def calls(options: argparse.Namespace, device: torch.device) -> dict[str, Callable[[], object]]:
    """The two ways, on the same inputs."""
    generator = torch.Generator(device).manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16)

    hidden, weight = normal(options.tokens, options.hidden), normal(options.vocab, options.hidden) * 0.02
    noise = torch.rand(options.tokens, options.vocab, generator=generator, device=device, dtype=torch.bfloat16)
    ids = noise.topk(options.candidates).indices
    del noise
    logprobs = (normal(options.tokens, options.candidates).float()).log_softmax(-1) + torch.log(torch.tensor(0.9))
    tail_logprobs = torch.full((options.tokens,), 0.1, device=device).log()
    scores = TeacherScores(ids=ids, logprobs=logprobs, tail_logprobs=tail_logprobs)
    objective = Objective("forward_kl", support="teacher_topk", tail="bucket")
    leaves = (hidden.requires_grad_(), weight.requires_grad_())
    token_weights = torch.ones(options.tokens, device=device)

    def products() -> None:
        with torch.no_grad():
            logits = hidden @ weight.T
            logits @ weight
            logits.T @ hidden

    def head() -> None:
        output = distillation_loss(*leaves, objective, scores, token_weights, logits_chunk_mb=options.logits_chunk_mb)
        torch.autograd.grad(output.loss, leaves)

    return {"products": products, "head": head}


def flops(options: argparse.Namespace) -> int:
    """Of the three products; a multiply-add is two."""
    return 3 * 2 * options.tokens * options.hidden * options.vocab


def record(options: argparse.Namespace, times: dict[str, Timing], peak_bytes: dict[str, int]) -> dict[str, Any]:
    """For a line of JSON and a table."""
    return {
        "tokens": options.tokens,
        "hidden": options.hidden,
        "vocab": options.vocab,
        "candidates": options.candidates,
        "logits_chunk_mb": options.logits_chunk_mb,
        "milliseconds": {name: timing.median for name, timing in times.items()},
        "spread": {name: str(timing) for name, timing in times.items()},
        "peak_bytes": peak_bytes,
        "ratio": times["head"].median / times["products"].median,
        "tflops_of_products": flops(options) / (times["products"].median * 1e-3) / 1e12,
    }


def table(result: dict[str, Any]) -> str:
    lines = ["| | ms | peak, GiB | over the products |", "|---|---|---|---|"]
    for name, median in result["milliseconds"].items():
        ratio = median / result["milliseconds"]["products"]
        lines.append(f"| {name} | {result['spread'][name]} | {result['peak_bytes'][name] / 2**30:.2f} | {ratio:.2f} |")
    return "\n".join(lines) + f"\n\nproducts at {result['tflops_of_products']:.0f} TFLOP/s"


def profile(options: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    ways = calls(options, device)
    peak_bytes = {}
    for name, call in ways.items():
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        torch.cuda.synchronize()
        peak_bytes[name] = torch.cuda.max_memory_allocated() - before
    return record(options, time_in_turn(ways, options.rounds), peak_bytes)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--vocab", type=int, default=131072)
    parser.add_argument("--candidates", type=int, default=64)
    parser.add_argument("--logits-chunk-mb", type=float, default=256.0)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--json", type=Path, help="append a line to this file")
    return parser.parse_args(arguments)


def main() -> None:
    options = parse()
    device = require_gpu()
    facts = machine(device)
    print(DEFINITION.format(rounds=options.rounds), "\n")
    print(", ".join(f"{name}: {value}" for name, value in facts.items()), "\n")
    result = profile(options, device)
    print(table(result))
    if options.json is not None:
        with options.json.open("a") as file:
            file.write(json.dumps({**result, "machine": facts}) + "\n")


if __name__ == "__main__":
    main()
