"""Measures the native rollout engine against transformers' generate, on the same weights and prompts.

    python scripts/bench_rollout.py [--rounds 5] [--threads 2]

Prints its definition, the machine, and a table in Markdown. Greedy answers of the two are compared first.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import transformers
from bench_gather_stats import cpu_model, spread

from titan_opd.config.schema import RolloutConfig, SamplingConfig
from titan_opd.data.records import Prompt, Sample
from titan_opd.models import Decoder, DecoderConfig, save_decoder
from titan_opd.rollout import NativeEngine

DEFINITION = """\
New tokens per second: tokens written, stop tokens included, over the wall time of answering all prompts, prompts read
included. At most `rows` sequences are written at the same time: the native engine lets a waiting one join when one
leaves, transformers answers `rows` prompts after `rows` prompts. Stop 0: all answers have the greatest length, so
nothing is gained from joining and leaving. Stop 1/20: a twentieth of the vocabulary ends an answer.
Float32, random weights, tokens drawn at temperature 1 from the whole vocabulary. {rounds} rounds after one for warm-up,
the two sides of a round one after the other. Median (slowest - fastest).
Ratio: median over rounds of native's tokens/s over transformers' in the same round (smallest - largest)."""


@dataclass(frozen=True)
class Workload:
    name: str
    config: DecoderConfig
    num_prompts: int
    prompt_tokens: int
    new_tokens: int
    rows: int
    stops: bool

    @property
    def stop_ids(self) -> tuple[int, ...]:
        return tuple(range(0, self.config.vocab_size, 20)) if self.stops else ()


TINY = DecoderConfig(
    family="llama",
    vocab_size=20,
    hidden_size=128,
    intermediate_size=256,
    num_layers=4,
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    max_position_embeddings=512,
)
SMOLLM2_135M = DecoderConfig(
    family="llama",
    vocab_size=49_152,
    hidden_size=576,
    intermediate_size=1536,
    num_layers=30,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    max_position_embeddings=8192,
    rope_theta=100_000.0,
    tie_word_embeddings=True,
)
TINY_NAME, SMOLLM2_NAME = "0.6 M parameters, 4 layers, vocabulary 20", "shape of SmolLM2-135M"
WORKLOADS = (
    Workload(TINY_NAME, TINY, num_prompts=64, prompt_tokens=12, new_tokens=64, rows=64, stops=False),
    Workload(TINY_NAME, TINY, num_prompts=512, prompt_tokens=12, new_tokens=64, rows=64, stops=True),
    Workload(SMOLLM2_NAME, SMOLLM2_135M, num_prompts=16, prompt_tokens=32, new_tokens=64, rows=16, stops=False),
    Workload(SMOLLM2_NAME, SMOLLM2_135M, num_prompts=48, prompt_tokens=32, new_tokens=48, rows=16, stops=True),
)


class Sides:
    """The two engines with one model's weights and one set of prompts; each call returns the answers."""

    def __init__(self, workload: Workload) -> None:
        self.workload = workload
        generator = torch.Generator().manual_seed(0)
        decoder = Decoder(workload.config)
        decoder.init_weights(generator)
        vocab_size = workload.config.vocab_size
        shape = (workload.num_prompts, workload.prompt_tokens)
        self.prompts = torch.randint(vocab_size, shape, generator=generator)
        self.samples = [Sample(i, 0, 0, Prompt(str(i), prompt)) for i, prompt in enumerate(self.prompts)]
        self.engine = NativeEngine(
            decoder,
            config=RolloutConfig(max_concurrent=workload.rows),
            stop_ids=workload.stop_ids,
            vocab_size=vocab_size,
            max_prompt_tokens=workload.prompt_tokens,
            seed=0,
        )
        with tempfile.TemporaryDirectory() as folder:
            save_decoder(decoder, folder)
            self.model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def native(self, new_tokens: int, temperature: float = 1.0) -> list[list[int]]:
        sampling = SamplingConfig(temperature=temperature, max_new_tokens=new_tokens)
        return [answer.response_ids.tolist() for answer in self.engine.generate(self.samples, sampling)]

    def transformers(self, new_tokens: int, temperature: float = 1.0) -> list[list[int]]:
        draw = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}
        answers = []
        for prompts in self.prompts.split(self.workload.rows):
            texts = self.model.generate(
                prompts,
                attention_mask=torch.ones_like(prompts),
                max_new_tokens=new_tokens,
                eos_token_id=list(self.workload.stop_ids) or None,
                pad_token_id=0,
                **draw,
            )
            answers += [self._up_to_stop(text) for text in texts[:, prompts.shape[1] :].tolist()]
        return answers

    def _up_to_stop(self, answer: list[int]) -> list[int]:
        stop_ids = set(self.workload.stop_ids)
        end = next((i for i, token in enumerate(answer) if token in stop_ids), len(answer) - 1)
        return answer[: end + 1]


def tokens_per_second(write: Callable[[int], list[list[int]]], new_tokens: int) -> float:
    start = time.perf_counter()
    answers = write(new_tokens)
    return sum(len(answer) for answer in answers) / (time.perf_counter() - start)


def bench(workload: Workload, rounds: int) -> str:
    """One row of the table."""
    sides = Sides(workload)
    assert sides.native(2, temperature=0.0) == sides.transformers(2, temperature=0.0), "greedy answers differ"
    native, reference = [], []
    for round_number in range(1 + rounds):
        rates = [tokens_per_second(write, workload.new_tokens) for write in (sides.native, sides.transformers)]
        if round_number:
            native.append(rates[0])
            reference.append(rates[1])
    cells = [
        workload.name,
        "1/20" if workload.stops else "0",
        f"{workload.num_prompts} / {workload.rows}",
        f"{workload.prompt_tokens} + {workload.new_tokens}",
        spread(native, 0),
        spread(reference, 0),
        spread([ours / theirs for ours, theirs in zip(native, reference, strict=True)], 2),
    ]
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="timed rounds (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="torch's threads (default: all)")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()

    print(DEFINITION.format(rounds=arguments.rounds))
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
    print(f"\n{cpu_model()}, {arguments.threads} thread(s), {versions}\n")
    print("| model | stop | prompts / rows | prompt + most new | native, tokens/s | transformers, tokens/s | ratio |")
    print("|---|---|---|---|---|---|---|")
    for workload in WORKLOADS:
        print(bench(workload, arguments.rounds), flush=True)


if __name__ == "__main__":
    main()
