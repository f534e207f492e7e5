"""What wrapping a student for FSDP costs where there is nobody to share it with: one process, with and without.

Counted: seconds of one optimizer step (forward, loss, backward, clipping, AdamW) of the same student on the same packed
batch, bare and after `parallelize` in a world of one process, steps interleaved in one process in an order that changes
with each repeat; median and range over the repeats, and of the quotient of the two steps of each repeat.

    python scripts/bench_parallel.py --repeats 9
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
from collections.abc import Callable

import torch
from bench_train_step import OBJECTIVE, OPTIMIZER, make_batch

from titan_opd.config.schema import TrainingConfig
from titan_opd.data.records import PackedBatch
from titan_opd.learner import DistillationModel, Learner
from titan_opd.models import Decoder, DecoderConfig
from titan_opd.observe import make_table, print_tables
from titan_opd.parallel import World, open_world, parallelize

BARE, WRAPPED = "bare", "FSDP of one process"


def make_step(config: DecoderConfig, batch: PackedBatch, world: World, *, wrapped: bool) -> Callable[[], float]:
    decoder = Decoder(config)
    decoder.init_weights(torch.Generator().manual_seed(0))
    model = DistillationModel(decoder, vocab_size=config.vocab_size, logits_chunk_mb=64)
    if wrapped:
        parallelize(model, decoder, world.mesh, TrainingConfig(steps=1))
    learner = Learner(model, OBJECTIVE, OPTIMIZER, num_steps=10_000, seed=0, world=world)
    return lambda: learner.step([batch], current_version=0)["loss"]


def measure(steps: dict[str, Callable[[], float]], repeats: int) -> dict[str, list[float]]:
    """Seconds of each step, by name, after one that does not count."""
    losses = {name: [step()] for name, step in steps.items()}
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for repeat in range(repeats):
        for name in sorted(steps, reverse=repeat % 2 == 1):
            start = time.perf_counter()
            losses[name].append(steps[name]())
            seconds[name].append(time.perf_counter() - start)
    bare, wrapped = losses.values()
    assert bare == wrapped, "wrapping is no computation: the losses must be equal to the bit"
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--vocab", type=int, default=8192)
    parser.add_argument("--tokens", type=int, nargs="+", default=[64, 512], help="packed tokens of a step")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    config = DecoderConfig.from_dict(
        {
            "model_type": "llama",
            "tie_word_embeddings": True,
            "vocab_size": options.vocab,
            "hidden_size": options.hidden,
            "intermediate_size": 3 * options.hidden,
            "num_hidden_layers": options.layers,
            "num_attention_heads": options.hidden // 64,
            "num_key_value_heads": options.hidden // 128,
            "max_position_embeddings": 4096,
        }
    )
    rows = []
    with open_world() as world:
        for num_tokens in options.tokens:
            batch = make_batch(config.vocab_size, num_tokens, num_sequences=4)
            steps = {name: make_step(config, batch, world, wrapped=name == WRAPPED) for name in (BARE, WRAPPED)}
            seconds = measure(steps, options.repeats)
            quotients = [wrapped / bare for bare, wrapped in zip(*seconds.values(), strict=True)]
            for name, values in [*seconds.items(), ("quotient", quotients)]:
                low, high = min(values), max(values)
                rows.append([str(num_tokens), name, f"{statistics.median(values):.3f}", f"{low:.3f} to {high:.3f}"])
    title = f"{config.num_layers} layers of {config.hidden_size}, {platform.machine()}, torch {torch.__version__}"
    print_tables([make_table(title, ["tokens", "step", "median", "range"], rows)])


if __name__ == "__main__":
    main()
