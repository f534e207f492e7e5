"""Attention as the decoder sees it, and causal attention within packed sequences.

Shape suffixes: T packed tokens, N query heads, M key-value heads, D dimensions of a head, B sequences,
S tokens of one sequence, P places of the tokens in batches of equally long, padded sequences.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable


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

    - `"sdpa"`: PyTorch's scaled_dot_product_attention, short sequences in batches, long ones by themselves. On the
      CPU, and on a GPU for float32, which the variable-length kernels do not take.
    - `"flash_attn"`: flash-attn's variable-length kernel, where the package is installed.
    - `"torch_varlen"`: PyTorch's own variable-length kernel (`torch.nn.attention.varlen`).
    """
    if torch.device(device).type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        return "sdpa"
    return "flash_attn" if _has_flash_attn() else "torch_varlen"


@functools.cache
def _has_flash_attn() -> bool:
    return importlib.util.find_spec("flash_attn") is not None


@functools.cache
def _takes_groups(varlen_attn: Callable[..., Tensor]) -> bool:
    return "enable_gqa" in inspect.signature(varlen_attn).parameters


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
        self._batches: _Batches | None = None

    @torch.compiler.disable  # sequences' lengths are numbers of the program here: a graph for each would be compiled
    def __call__(self, layer: int, query_TND: Tensor, key_TMD: Tensor, value_TMD: Tensor) -> Tensor:
        backend = attention_backend(query_TND.device, query_TND.dtype)
        if backend == "flash_attn":
            return self._flash_attn(query_TND, key_TMD, value_TMD)
        if backend == "torch_varlen":
            return self._torch_varlen(query_TND, key_TMD, value_TMD)
        return self._sdpa(query_TND, key_TMD, value_TMD)

    def _sdpa(self, query_TND: Tensor, key_TMD: Tensor, value_TMD: Tensor) -> Tensor:
        if self._batches is None:  # made once a pass, not once a layer: on a GPU it waits for the device
            self._batches = _Batches.of(self.cu_seqlens, numbers_per_token=query_TND[0].numel())
        batches = self._batches
        inputs = (query_TND, key_TMD, value_TMD)
        if batches.token_of_place is not None:
            inputs = (_Places.apply(x, batches.token_of_place, batches.place_of_token) for x in inputs)
        padded = zip(*(x.split([rows * length for rows, length in batches.shapes]) for x in inputs), strict=True)
        outputs = [
            _causal(*(x.unflatten(0, shape) for x in batch)).flatten(0, 1)
            for shape, batch in zip(batches.shapes, padded, strict=True)
        ]
        output_PND = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        if batches.token_of_place is None:
            return output_PND
        return _Tokens.apply(output_PND, batches.place_of_token)

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

        grouped = {"enable_gqa": True} if _takes_groups(varlen_attn) else {}
        if not grouped:  # torch 2.11 wants as many heads on both sides
            copies = query_TND.shape[1] // key_TMD.shape[1]
            key_TMD, value_TMD = (x.repeat_interleave(copies, 1) for x in (key_TMD, value_TMD))
        return varlen_attn(
            query_TND,
            key_TMD,
            value_TMD,
            self.cu_seqlens,
            self.cu_seqlens,
            self.max_seqlen,
            self.max_seqlen,
            window_size=(-1, 0),  # causal
            **grouped,
        )


def _causal(query_BSND: Tensor, key_BSMD: Tensor, value_BSMD: Tensor) -> Tensor:
    """Causal attention within each of B sequences of S tokens, [B, S, N, D]."""
    heads_first = (x.transpose(1, 2) for x in (query_BSND, key_BSMD, value_BSMD))
    return F.scaled_dot_product_attention(*heads_first, is_causal=True, enable_gqa=True).transpose(1, 2)


# A call of SDPA costs about as much as copying this many numbers of its query (README.md has the measurement).
SHORT = 1 << 15
PADDED_TO = 8


@dataclass(frozen=True)
class _Batches:
    """Packed sequences as batches of equal lengths.

    Short sequences are padded at their end to a multiple of `PADDED_TO` and share a call with those that come out as
    long. No mask is needed: a causal row never sees what follows it. The padded length depends on the sequence alone,
    not on what it is packed with. Long sequences stay as they are.

    Attributes:
        shapes: (sequences, tokens of each with their padding) of every batch.
        token_of_place: [P] the token that stands at each place of the batches, in the padding the sequence's last; None
            when the batches are the packed tokens as they are.
        place_of_token: [T] the way back.
    """

    shapes: list[tuple[int, int]]
    token_of_place: Tensor | None = None
    place_of_token: Tensor | None = None

    @classmethod
    def of(cls, cu_seqlens: Tensor, *, numbers_per_token: int) -> _Batches:
        """The batches of packed sequences.

        Args:
            cu_seqlens: as of `PackedAttention`.
            numbers_per_token: N * D.
        """
        lengths = [length for length in cu_seqlens.diff().tolist() if length]
        padded = [-(-length // PADDED_TO) * PADDED_TO for length in lengths]
        places = [
            long if long * numbers_per_token <= SHORT else length for long, length in zip(padded, lengths, strict=True)
        ]
        if places == lengths:
            return cls(_runs(lengths))
        order = sorted(range(len(lengths)), key=places.__getitem__)
        lengths_B, places_B = torch.tensor(lengths)[order], torch.tensor(places)[order]
        starts_B = torch.tensor([0, *lengths]).cumsum(0)[order]
        sequence_P = torch.arange(len(order)).repeat_interleave(places_B)
        offset_P = torch.arange(len(sequence_P)) - (places_B.cumsum(0) - places_B)[sequence_P]
        is_token_P = offset_P < lengths_B[sequence_P]
        token_of_place = starts_B[sequence_P] + torch.minimum(offset_P, lengths_B[sequence_P] - 1)
        place_of_token = torch.empty(sum(lengths), dtype=torch.int64)
        place_of_token[token_of_place[is_token_P]] = is_token_P.nonzero().squeeze(-1)
        device = cu_seqlens.device
        return cls(_runs(places_B.tolist()), token_of_place.to(device), place_of_token.to(device))


def _runs(lengths: list[int]) -> list[tuple[int, int]]:
    """How often each length stands one after the other."""
    return [(len(list(equal)), length) for length, equal in groupby(lengths)]


class _Places(torch.autograd.Function):
    """Tokens [T, ...] to their places [P, ...]; the padding's gradient is dropped, for it is zero."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, token_of_place: Tensor, place_of_token: Tensor) -> Tensor:
        ctx.place_of_token = place_of_token
        return x.index_select(0, token_of_place)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad.index_select(0, ctx.place_of_token), None, None


class _Tokens(torch.autograd.Function):
    """Places [P, ...] back to their tokens [T, ...]; the padding's gradient is zero."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, place_of_token: Tensor) -> Tensor:
        ctx.place_of_token, ctx.num_places = place_of_token, len(x)
        return x.index_select(0, place_of_token)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor, None]:
        places = grad.new_zeros(ctx.num_places, *grad.shape[1:])
        return places.index_copy_(0, ctx.place_of_token, grad), None
