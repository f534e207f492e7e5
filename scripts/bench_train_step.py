"""Time and memory of one training step: this decoder and loss head against transformers' model and plain autograd.

Counted: packed tokens over the wall-clock seconds of one step (forward, loss, backward, clipping, AdamW), the same
packed batch for all, steps interleaved in one process, median and range over the repeats. All have the same loss
(forward KL on the teacher's top 64, the tail as one more outcome; for transformers on the full logits by autograd) and
fused AdamW. transformers stands there twice: as it packs itself, SDPA over the whole pack with a block-diagonal mask,
and with this decoder's `PackedAttention` put into it. Bare products: the matrix products of a step alone, forward and
backward, on random matrices of the same shapes.

Peak memory is the resident set's high-water mark of a process of its own that takes two steps with one model.

    python scripts/bench_train_step.py --model FOLDER --tokens 2048 --repeats 7
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from transformers import AttentionInterface, AutoModelForCausalLM

from titan_opd.config.objective import Objective
from titan_opd.config.schema import OptimizerConfig, TrainingConfig
from titan_opd.data.records import PackedBatch
from titan_opd.learner import DistillationModel, Learner
from titan_opd.losses import TeacherScores
from titan_opd.models import DecoderConfig, PackedAttention, load_decoder
from titan_opd.observe import make_table, print_tables
from titan_opd.optimizer import build_optimizer
from titan_opd.parallel import World, open_world, parallelize

K = 64
TRANSFORMERS, TRANSFORMERS_PACKED = "transformers, SDPA and mask", "transformers, our attention"
MEASURED = (TRANSFORMERS, TRANSFORMERS_PACKED, "ours")
OPTIMIZER = OptimizerConfig(learning_rate=1e-5)
OBJECTIVE = Objective(kind="forward_kl", support="teacher_topk", tail="bucket")


def make_batch(vocab_size: int, num_tokens: int, num_sequences: int) -> PackedBatch:
    """Random tokens and random teacher scores; every token but each sequence's last predicts a trained one."""
    generator = torch.Generator().manual_seed(0)
    length = num_tokens // num_sequences
    positions_T = torch.arange(length).repeat(num_sequences)
    teacher_NV = torch.randn(num_tokens, vocab_size, generator=generator) * 2
    logprobs_NK, ids_NK = teacher_NV.log_softmax(-1).topk(K)
    return PackedBatch(
        input_ids=torch.randint(vocab_size, (num_tokens,), generator=generator),
        positions=positions_T,
        cu_seqlens=torch.arange(0, num_tokens + 1, length, dtype=torch.int32),
        max_seqlen=length,
        loss_positions=torch.arange(num_tokens),
        scores=TeacherScores(ids=ids_NK, logprobs=logprobs_NK, tail_logprobs=(-logprobs_NK.exp().sum(-1)).log1p()),
        token_weights=torch.ones(num_tokens),
        policy_versions=torch.zeros(num_tokens, dtype=torch.int32),
        written_ids=torch.randint(vocab_size, (num_tokens,), generator=generator),
    )


def our_step(folder: str, batch: PackedBatch, world: World, dtype: torch.dtype) -> Callable[[], float]:
    decoder = load_decoder(folder)
    model = DistillationModel(decoder, vocab_size=decoder.config.vocab_size, logits_chunk_mb=256)
    parallelize(model, decoder, world.mesh, TrainingConfig(steps=1, compute_dtype=str(dtype).removeprefix("torch.")))
    learner = Learner(model, OBJECTIVE, OPTIMIZER, num_steps=10_000, seed=0, world=world)
    return lambda: learner.step([batch], current_version=0)["loss"]


def transformers_step(
    folder: str, batch: PackedBatch, dtype: torch.dtype, *, packed_attention: bool
) -> Callable[[], float]:
    """The usual way: logits of all tokens, log-softmax, autograd; masters in float32, autocast for bfloat16."""
    attention = PackedAttention(batch.cu_seqlens, batch.max_seqlen)

    def packed(module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, *_: object, **__: object):
        heads_first = (x[0].transpose(0, 1) for x in (query, key, value))
        return attention(module.layer_idx, *heads_first)[None], None

    AttentionInterface.register("packed", packed)
    implementation = "packed" if packed_attention else "sdpa"
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation=implementation, dtype=torch.float32)
    sequence_T = torch.repeat_interleave(torch.arange(len(batch.cu_seqlens) - 1), batch.cu_seqlens.diff())
    visible_TT = (sequence_T[:, None] == sequence_T[None]).tril()
    mask = {} if packed_attention else {"attention_mask": visible_TT[None, None]}
    optimizer = build_optimizer(model, OPTIMIZER)
    scores = batch.scores

    def step() -> float:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
            outputs = model(batch.input_ids[None], position_ids=batch.positions[None], use_cache=False, **mask)
        logprobs_NV = outputs.logits[0].float().log_softmax(-1)
        logprobs_NK = logprobs_NV.gather(-1, scores.ids)
        tail_N = logprobs_NV.scatter(-1, scores.ids, -torch.inf).logsumexp(-1)
        inside_N = (scores.logprobs.exp() * (scores.logprobs - logprobs_NK)).sum(-1)
        loss = (inside_N + scores.tail_logprobs.exp() * (scores.tail_logprobs - tail_N)).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), OPTIMIZER.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item()

    return step


def bare_products(config: DecoderConfig, num_tokens: int, dtype: torch.dtype) -> Callable[[], float]:
    """The matrix products of a step: for each weight [out, in] one forward and two backward."""
    heads, kv_heads, hidden = (
        config.num_heads * config.head_dim,
        config.num_kv_heads * config.head_dim,
        config.hidden_size,
    )
    layer = [(heads, hidden), (kv_heads, hidden), (kv_heads, hidden), (hidden, heads)]
    layer += [(config.intermediate_size, hidden)] * 2 + [(hidden, config.intermediate_size)]
    shapes = layer * config.num_layers + [(config.vocab_size, hidden)]
    weights = {shape: torch.randn(shape, dtype=dtype) for shape in set(shapes)}
    inputs = {size: torch.randn(num_tokens, size, dtype=dtype) for size in {size for shape in shapes for size in shape}}

    def products() -> float:
        for size_out, size_in in shapes:
            x_TI, weight_OI, grad_TO = inputs[size_in], weights[size_out, size_in], inputs[size_out]
            torch.mm(x_TI, weight_OI.T)
            torch.mm(grad_TO, weight_OI)
            torch.mm(grad_TO.T, x_TI)
        return 0.0

    return products


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="folder in Hugging Face format (scripts/fetch_smollm2.py)")
    parser.add_argument("--tokens", type=int, default=2048, help="packed tokens of a step")
    parser.add_argument("--sequences", type=int, default=8, help="sequences of equal length in the pack")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="compute type")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--memory-of", choices=MEASURED, help="take two steps, print the peak in MiB")
    options = parser.parse_args()
    dtype = getattr(torch, options.dtype)
    config = DecoderConfig.from_directory(options.model)
    batch = make_batch(config.vocab_size, options.tokens, options.sequences)

    with open_world() as world:
        makers = {
            TRANSFORMERS: lambda: transformers_step(options.model, batch, dtype, packed_attention=False),
            TRANSFORMERS_PACKED: lambda: transformers_step(options.model, batch, dtype, packed_attention=True),
            "ours": lambda: our_step(options.model, batch, world, dtype),
            "bare products": lambda: bare_products(config, options.tokens, dtype),
        }
        if options.memory_of:
            step = makers[options.memory_of]()
            step()
            step()
            print(peak_resident_mib())
            return
        seconds = measure({name: make() for name, make in makers.items()}, options.repeats)
    report(options, seconds, {name: peak_memory(name) for name in MEASURED})


def measure(steps: dict[str, Callable[[], float]], repeats: int) -> dict[str, list[float]]:
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    losses = {name: step() for name, step in steps.items()}  # warm-up, and a check that the same thing is measured
    if abs(losses["ours"] - losses[TRANSFORMERS]) > 0.02 * abs(losses[TRANSFORMERS]):
        raise SystemExit(f"the losses differ: {losses}")
    for _ in range(repeats):
        for name, step in steps.items():
            start = time.perf_counter()
            step()
            seconds[name].append(time.perf_counter() - start)
    return seconds


def peak_resident_mib() -> int:
    """Of this program. (`ru_maxrss` would include what the process that started it held.)"""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(status["VmHWM"].split()[0]) // 1024


def peak_memory(name: str) -> int:
    """MiB, of a process of its own."""
    command = [sys.executable, *sys.argv, "--memory-of", name]
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[-1])


def report(options: argparse.Namespace, seconds: dict[str, list[float]], memory: dict[str, int]) -> None:
    base = statistics.median(seconds[TRANSFORMERS])
    rows, records = [], []
    for name, times in seconds.items():
        median = statistics.median(times)
        speeds = sorted(options.tokens / taken for taken in times)
        rows.append(
            (
                name,
                f"{options.tokens / median:.0f} ({speeds[0]:.0f} to {speeds[-1]:.0f})",
                f"{base / median:.2f}",
                f"{memory[name]}" if name in memory else "",
            )
        )
        records.append({"name": name, "tokens_per_second": options.tokens / median, "peak_mib": memory.get(name)})
    title = (
        f"One training step, {Path(options.model).name}, {options.dtype}, {options.tokens} packed tokens, "
        f"{torch.get_num_threads()} threads, {platform.processor() or platform.machine()}, torch {torch.__version__}"
    )
    print_tables([make_table(title, ("", "tokens/s, median (range)", "speed ratio", "peak MiB"), rows)])
    for record in records:
        print(json.dumps(record))


if __name__ == "__main__":
    main()
