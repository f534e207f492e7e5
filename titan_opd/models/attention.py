"""Attention as the decoder sees it, and causal attention within packed sequences.

Shape suffixes: T packed tokens, N query heads, M key-value heads, D dimensions of a head, B sequences,
S tokens of one sequence.
"""

from __future__ import annotations

import functools
import importlib.util
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor


class Attention(Protocol):
    """How a layer's queries meet keys: packed training attention, or an engine's KV cache."""

    def __call__(self, layer: int, query_TND: Tensor, key_TMD: Tensor, value_TMD: Tensor) -> Tensor:
        """Attend, scaled by 1 / sqrt(D).

        Args:
            layer: index of the layer, from 0.
            query_TND: [T, N, D], rotated.
            key_TMD: [T, M, D], rotated; query head n uses key-value head n // (N / M).
            value_TMD: [T, M, D].

        Returns:
            [T, N, D].
        """
        ...


def attention_backend(device: torch.device | str, dtype: torch.dtype) -> str:
    """Which implementation `PackedAttention` uses.

    - `"sdpa"`: PyTorch's scaled_dot_product_attention, sequence by sequence. On the CPU, and on a GPU for
      float32, which the variable-length kernels do not take.
    - `"flash_attn"`: flash-attn's variable-length kernel, where the package is installed.
    - `"torch_varlen"`: PyTorch's own variable-length kernel (`torch.nn.attention.varlen`).
    """
    if torch.device(device).type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        return "sdpa"
    return "flash_attn" if _has_flash_attn() else "torch_varlen"


@functools.cache
def _has_flash_attn() -> bool:
    return importlib.util.find_spec("flash_attn") is not None


class PackedAttention:
    """Causal attention within each packed sequence; one object serves all layers of a forward pass."""

    def __init__(self, cu_seqlens: Tensor, max_seqlen: int) -> None:
        """
        Args:
            cu_seqlens: [B + 1] int32 on the model's device; sequence b is the tokens cu_seqlens[b] : cu_seqlens[b + 1].
            max_seqlen: tokens of the longest sequence.
        """
        self.cu_seqlens = cu_seqlens
        self.max_seqlen = max_seqlen
        self._lengths: list[int] | None = None

    @torch.compiler.disable  # sequences' lengths are numbers of the program here: a graph for each would be compiled
    def __call__(self, layer: int, query_TND: Tensor, key_TMD: Tensor, value_TMD: Tensor) -> Tensor:
        backend = attention_backend(query_TND.device, query_TND.dtype)
        if backend == "flash_attn":
            return self._flash_attn(query_TND, key_TMD, value_TMD)
        if backend == "torch_varlen":
            return self._torch_varlen(query_TND, key_TMD, value_TMD)
        return self._sdpa(query_TND, key_TMD, value_TMD)

    def _sdpa(self, query_TND: Tensor, key_TMD: Tensor, value_TMD: Tensor) -> Tensor:
        """One call a sequence: on the CPU faster than padding to a common length (README.md has the numbers).

        Sequences of one length, a single long one among them, need one call, and no copy of its output.
        """
        if self._lengths is None:  # read once a pass, not once a layer: on a GPU this waits for the device
            self._lengths = self.cu_seqlens.diff().tolist()
        inputs = (query_TND, key_TMD, value_TMD)
        if len(set(self._lengths)) == 1:
            return _causal(*(x.unflatten(0, (len(self._lengths), -1)) for x in inputs)).flatten(0, 1)
        sequences = zip(*(x.split(self._lengths) for x in inputs), strict=True)
        return torch.cat([_causal(*(x[None] for x in sequence))[0] for sequence in sequences])

    # The two GPU paths have not been run on the machine this was written on; tests marked `gpu` compare them with SDPA.

    def _flash_attn(self, query_TND: Tensor, key_TMD: Tensor, value_TMD: Tensor) -> Tensor:
        from flash_attn import flash_attn_varlen_func

        return flash_attn_varlen_func(
            query_TND,
            key_TMD,
            value_TMD,
            cu_seqlens_q=self.cu_seqlens,
            cu_seqlens_k=self.cu_seqlens,
            max_seqlen_q=self.max_seqlen,
            max_seqlen_k=self.max_seqlen,
            causal=True,
        )

    def _torch_varlen(self, query_TND: Tensor, key_TMD: Tensor, value_TMD: Tensor) -> Tensor:
        from torch.nn.attention.varlen import varlen_attn

        return varlen_attn(
            query_TND,
            key_TMD,
            value_TMD,
            self.cu_seqlens,
            self.cu_seqlens,
            self.max_seqlen,
            self.max_seqlen,
            window_size=(-1, 0),  # causal
            enable_gqa=True,
        )


def _causal(query_BSND: Tensor, key_BSMD: Tensor, value_BSMD: Tensor) -> Tensor:
    """Causal attention within each of B sequences of S tokens, [B, S, N, D]."""
    heads_first = (x.transpose(1, 2) for x in (query_BSND, key_BSMD, value_BSMD))
    return F.scaled_dot_product_attention(*heads_first, is_causal=True, enable_gqa=True).transpose(1, 2)
