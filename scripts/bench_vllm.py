"""Measures vLLM against the native rollout engine, on the same weights and prompts, in one process.

    .venv-vllm/bin/python scripts/bench_vllm.py [--rounds 3] [--threads 1]      (scripts/setup_vllm_cpu.sh makes it)

Prints its definition, the machine, and a table in Markdown. Greedy answers of the two are compared first.
"""

from __future__ import annotations

import argparse
import os
import time

import torch
from bench_gather_stats import cpu_model, spread
from bench_rollout import WORKLOADS, Workload

from titan_opd.config.schema import RolloutConfig, RolloutVllmConfig, SamplingConfig
from titan_opd.data.records import Prompt, Sample
from titan_opd.models import Decoder
from titan_opd.rollout import RECORD_NOTHING, NativeEngine, Recording, RolloutEngine
from titan_opd.rollout.vllm import VllmEngine

DEFINITION = """\
New tokens per second: tokens written, stop tokens included, over the wall time of `generate` for all prompts, prompts
read included. At most `rows` sequences are written at the same time. Stop 0: all answers have the greatest length. Stop
1/20: a twentieth of the vocabulary ends an answer. Float32, random weights, temperature 1. "own draws": the tokens, and
{num_samples} samples at each of them, are drawn by titan_opd.rollout.vllm_draws inside vLLM. Update: `load_weights` of
all weights, from tensors in this process, verified. {rounds} rounds after one for warm-up, all columns of a round one
after the other. Median (slowest - fastest)."""
NUM_SAMPLES = 8


def bench(workload: Workload, rounds: int) -> str:
    """One row of the table."""
    generator = torch.Generator().manual_seed(0)
    decoder = Decoder(workload.config)
    decoder.init_weights(generator)
    prompts = torch.randint(
        workload.config.vocab_size, (workload.num_prompts, workload.prompt_tokens), generator=generator
    )
    samples = [Sample(i, 0, 0, Prompt(str(i), prompt)) for i, prompt in enumerate(prompts)]
    common = {
        "stop_ids": workload.stop_ids,
        "vocab_size": workload.config.vocab_size,
        "max_prompt_tokens": workload.prompt_tokens,
        "seed": 0,
    }
    native = NativeEngine(decoder, config=RolloutConfig(max_concurrent=workload.rows), **common)
    vllm = VllmEngine(
        workload.config,
        config=RolloutConfig(engine="vllm", max_concurrent=workload.rows, vllm=RolloutVllmConfig(kv_cache_mb=1024)),
        max_new_tokens=workload.new_tokens,
        draws=True,
        device=torch.device("cpu"),
        **common,
    )
    weights = dict(decoder.named_parameters())
    vllm.load_weights(weights, 0)
    greedy = SamplingConfig(temperature=0.0, max_new_tokens=2)
    pairs = zip(native.generate(samples, greedy), vllm.generate(samples, greedy), strict=True)
    assert all(torch.equal(left.response_ids, right.response_ids) for left, right in pairs), "greedy answers differ"

    sides: list[tuple[RolloutEngine, Recording]] = [
        (native, RECORD_NOTHING),
        (vllm, RECORD_NOTHING),
        (native, Recording(num_samples=NUM_SAMPLES)),
        (vllm, Recording(num_samples=NUM_SAMPLES)),
    ]
    sampling = SamplingConfig(max_new_tokens=workload.new_tokens)
    rates: list[list[float]] = [[] for _ in sides]
    updates = []
    for round_number in range(1 + rounds):
        for (engine, recording), found in zip(sides, rates, strict=True):
            start = time.perf_counter()
            answers = engine.generate(samples, sampling, recording)
            rate = sum(len(answer.response_ids) for answer in answers) / (time.perf_counter() - start)
            if round_number:
                found.append(rate)
        start = time.perf_counter()
        vllm.load_weights(weights, 1 + round_number)
        if round_number:
            updates.append(time.perf_counter() - start)
    cells = [
        workload.name,
        "1/20" if workload.stops else "0",
        f"{workload.num_prompts} / {workload.rows}",
        f"{workload.prompt_tokens} + {workload.new_tokens}",
        *(spread(found, 0) for found in rates),
        spread(updates, 2),
    ]
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="timed rounds (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=1, help="of both engines (default: %(default)s)")
    arguments = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = str(arguments.threads)
    torch.set_num_threads(arguments.threads)

    print(DEFINITION.format(rounds=arguments.rounds, num_samples=NUM_SAMPLES))
    print(f"\n{cpu_model()}, {arguments.threads} thread(s), torch {torch.__version__}\n")
    columns = ("native", "vLLM", f"native, {NUM_SAMPLES} samples", f"vLLM, own draws, {NUM_SAMPLES} samples")
    print("| model | stop | prompts / rows | prompt + most new |", " | ".join(columns), "| update, s |")
    print("|---" * 9 + "|")
    for workload in WORKLOADS:
        print(bench(workload, arguments.rounds), flush=True)


if __name__ == "__main__":
    main()
