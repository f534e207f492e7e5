#!/usr/bin/env python3
"""Compare three ways to attend within packed sequences on this machine: one SDPA call a sequence, `PackedAttention`, in
which short sequences share calls, and one call for all sequences padded to the longest.

Counted: the attention alone, forward and forward with backward, from packed [tokens, heads, head_dim] to the same,
putting tokens into padded batches and taking them out again included. Time: CPU time of one thread, the best of several
repeats, the ways in turn. The padded batches need no mask: causal rows never see the padding behind them.
"""

from __future__ import annotations

import os
import platform
import random
import re
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from titan_opd.models import PackedAttention

REPEATS = 8
SHAPES = ((4, 2, 32), (9, 3, 64))  # query heads, key-value heads, head_dim
RNG = random.Random(0)
LENGTHS = {
    "64 sequences of 50": [50] * 64,
    "64 of 30 to 60": [RNG.randint(30, 60) for _ in range(64)],
    "20 of 8 to 400": [RNG.randint(8, 400) for _ in range(20)],
    "4 of 1000": [1000] * 4,
}


class SeparateAttention:
    """Causal attention by one SDPA call for each sequence."""

    def __init__(self, lengths: list[int]) -> None:
        self.lengths = lengths

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        outputs = []
        for sequence in zip(*(x.split(self.lengths) for x in (query, key, value)), strict=True):
            heads_first = (x.transpose(0, 1)[None] for x in sequence)
            output = F.scaled_dot_product_attention(*heads_first, is_causal=True, enable_gqa=True)
            outputs.append(output[0].transpose(0, 1))
        return torch.cat(outputs)


class PaddedAttention:
    """Causal attention by one SDPA call on sequences padded to the longest."""

    def __init__(self, lengths: list[int]) -> None:
        longest = max(lengths)
        ends = torch.tensor(lengths).cumsum(0)[:, None]
        starts = ends - torch.tensor(lengths)[:, None]
        self.token_of_slot = torch.minimum(starts + torch.arange(longest), ends - 1)
        self.slot_of_token = torch.cat([row * longest + torch.arange(length) for row, length in enumerate(lengths)])

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        query, key, value = (
            x.index_select(0, self.token_of_slot.view(-1)).unflatten(0, self.token_of_slot.shape).transpose(1, 2)
            for x in (query, key, value)
        )
        output = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        return output.transpose(1, 2).flatten(0, 1).index_select(0, self.slot_of_token)


def measure(lengths: list[int], shape: tuple[int, int, int]) -> dict[str, tuple[float, float]]:
    """Milliseconds of the forward pass, and of forward and backward, for each way."""
    num_heads, num_kv_heads, head_dim = shape
    inputs = [
        torch.randn(sum(lengths), heads, head_dim, requires_grad=True) for heads in (num_heads, *[num_kv_heads] * 2)
    ]
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).int()
    ways = {
        "a call a sequence": lambda: SeparateAttention(lengths),
        "PackedAttention": lambda: PackedAttention(cu_seqlens, max(lengths)),
        "padded to the longest": lambda: PaddedAttention(lengths),
    }
    best = dict.fromkeys(ways, (float("inf"), float("inf")))
    for _ in range(REPEATS):
        for way, make in ways.items():
            attention = make()  # once for all layers of a pass, so its own time is not counted
            attention(0, *inputs)
            start = time.process_time()
            with torch.no_grad():
                attention(0, *inputs)
            middle = time.process_time()
            torch.autograd.grad(attention(0, *inputs).sum(), inputs)
            end = time.process_time()
            best[way] = (min(best[way][0], 1000 * (middle - start)), min(best[way][1], 1000 * (end - middle)))
    return best


def main() -> None:
    torch.set_num_threads(1)
    print(__doc__)
    print(f"{cpu_name()}, torch {torch.__version__}, float32; ms forward / forward and backward")
    for shape in SHAPES:
        num_heads, num_kv_heads, head_dim = shape
        print(f"\n{num_heads} query heads, {num_kv_heads} key-value heads, head_dim {head_dim}")
        for name, lengths in LENGTHS.items():
            padding = len(lengths) * max(lengths) / sum(lengths) - 1
            columns = [f"{way}: {forward:.1f} / {both:.1f}" for way, (forward, both) in measure(lengths, shape).items()]
            print(f"{name:20s} {padding:5.0%}   {'   '.join(columns)}")


def cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    names = re.findall(r"model name\s*: (.*)", info.read_text()) if info.exists() else []
    return f"{names[0] if names else platform.machine()}, 1 of {os.cpu_count()} cores"


if __name__ == "__main__":
    main()
