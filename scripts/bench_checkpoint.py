"""Measures how long a save holds training, waited for and in the background: SmolLM2-135M's shape, float32, AdamW.

    python scripts/bench_checkpoint.py FOLDER [--rounds 5] [--tokens 64]
    torchrun --nproc-per-node 2 scripts/bench_checkpoint.py FOLDER

The two kinds take turns in each round; checkpoints (1.6 GB each, one is kept of each kind) go to FOLDER and onto its
disk. All numbers are wall time in seconds, median [smallest .. largest], of process 0:

    step              an optimizer step of --tokens tokens for each process while nothing is written
    held              from the end of one step to the beginning of the next, with a save between them
    write             in the background: from the end of `held` until the checkpoint is complete
    step meanwhile    steps that began while a checkpoint was being written
    cost              held, and by how much the steps until the checkpoint is complete are slower than `step`
    resident          MB by which the process has grown after the copy, before it is written
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections import defaultdict
from pathlib import Path

import torch
from bench_rollout import SMOLLM2_135M

from titan_opd.checkpoint import CheckpointSaver
from titan_opd.config import Objective
from titan_opd.config.schema import CheckpointConfig, OptimizerConfig, TrainingConfig
from titan_opd.data import load_tokenizer, pack
from titan_opd.data.records import Prompt, Sample, Trajectory
from titan_opd.learner import DistillationModel, Learner
from titan_opd.models import Decoder
from titan_opd.parallel import World, open_world, parallelize
from titan_opd.teacher import LabelScorer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=64)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with open_world() as world:
        measured = measure(options.folder, options.rounds, options.tokens, world)
        if world.is_main:
            print(f"{world.size} processes, 1 thread each, load {os.getloadavg()[0]:.1f}")
            for name, values in measured.items():
                low, high = min(values), max(values)
                print(f"{name:32} {statistics.median(values):8.2f} [{low:.2f} .. {high:.2f}]")


def measure(folder: Path, rounds: int, tokens: int, world: World) -> dict[str, list[float]]:
    decoder = Decoder(SMOLLM2_135M)
    model = DistillationModel(decoder, vocab_size=SMOLLM2_135M.vocab_size, logits_chunk_mb=64)
    parallelize(model, decoder, world.mesh, TrainingConfig(steps=1))
    learner = Learner(
        model,
        Objective(kind="cross_entropy"),
        OptimizerConfig(learning_rate=1e-4),
        num_steps=10_000,
        seed=0,
        world=world,
    )
    batches = pack(LabelScorer().score([make_answer(tokens)]), tokens)
    savers = {
        name: CheckpointSaver(
            folder / name,
            CheckpointConfig(keep=1, asynchronous=name == "in the background"),
            student=decoder,
            tokenizer=load_tokenizer("arithmetic"),
            model=model,
            optimizer=learner.optimizer,
            world=world,
            timeout_seconds=600,
        )
        for name in ("waited for", "in the background")
    }
    measured: dict[str, list[float]] = defaultdict(list)

    def step(kind: str) -> float:
        start = time.perf_counter()
        learner.step(batches, current_version=0)
        measured[kind].append(time.perf_counter() - start)
        return measured[kind][-1]

    for number in range(1, rounds + 1):
        for name, saver in savers.items():
            alone = statistics.median(step("step") for _ in range(3))
            world.barrier()
            before, start = resident_mb(), time.perf_counter()
            saver.save(number, {}, [])
            held = cost = time.perf_counter() - start
            measured[f"held, {name}"].append(held)
            measured[f"resident, {name}"].append(resident_mb() - before)
            while not (metrics := saver.poll()) and saver.is_writing:
                cost += step("step meanwhile") - alone
            measured[f"cost, {name}"].append(cost)
            if metrics:
                measured["write"].append(metrics["seconds/checkpoint_write"])
            if world.is_main:
                print(f"round {number}, {name}: held {held:.2f} s", flush=True)
    return dict(measured)


def make_answer(tokens: int) -> Trajectory:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(SMOLLM2_135M.vocab_size, (tokens,), generator=generator)
    return Trajectory(
        sample=Sample(0, 0, 0, Prompt("made up", ids[:1])),
        response_ids=ids[1:],
        policy_versions=torch.zeros(tokens - 1, dtype=torch.int32),
        finish_reason="length",
    )


def resident_mb() -> float:
    fields = Path("/proc/self/statm").read_text().split()
    return int(fields[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


if __name__ == "__main__":
    main()
