"""Digests of tensors' bytes, alone or taken while the bytes are copied.

The digest of a tensor whose bytes are the 32-bit words w_0 .. w_(n-1) (the last one filled up with zeros) is

    sum_i w_i k_(i mod B) K_(i div B) + c   modulo 2^64,    B = 1024,

with c the number of bytes, fixed odd keys k of 32 bits and K of 64. It depends on where a byte stands, so tensors whose
halves are exchanged differ. A change within one word always changes it, because an odd number below 2^32 times one
below 2^32 is not 0. For other changes that know nothing of the keys the odds of the same digest are at most 2^-30 (the
worst: the changed words' differences are multiples of high powers of 2), and 2^-64 for scattered ones (multilinear
hashing: Carter and Wegman, 1979). It is a check against faults, not against an attacker.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from titan_opd.ops.extension import has_kernel
from titan_opd.ops.multi_copy import check_pairs, multi_copy
from titan_opd.ops.no_derivative import refuse_to_differentiate, register_without_derivative
from titan_opd.ops.noise import absorb

_BLOCK_WORDS = 1024
_WORD_KEY, _BLOCK_KEY = 0x7174616E, 0x6F70645F
_CHUNK_BYTES = 1 << 22  # of the reference, a multiple of a block
_NO_DERIVATIVE = "bytes have none"


@torch.no_grad()
def multi_digest(tensors: Sequence[Tensor]) -> list[int]:
    """The digest of each tensor, as signed 64-bit integers; equal on every device.

    Args:
        tensors: of any dtype and shape, on one device. One that is not contiguous is copied.
    """
    contiguous = [tensor.detach().contiguous() for tensor in tensors]
    if not contiguous:
        return []
    if contiguous[0].device.type == "cpu":
        return torch.ops.titan_opd.multi_digest(contiguous).tolist()
    return [digest_reference(tensor) for tensor in contiguous]


def multi_copy_digests(sources: Sequence[Tensor], destinations: Sequence[Tensor]) -> list[int]:
    """`multi_copy`, and the digest of each source's bytes as they were cast, on their way.

    What is stored in the end is not read: whoever compares it with these digests finds what went wrong in between.

    Args, raises: as `multi_copy`.
    """
    check_pairs(sources, destinations)
    refuse_to_differentiate("multi_copy_digests", _NO_DERIVATIVE, *sources, *destinations)
    pairs = list(zip(sources, destinations, strict=True))
    fused = [all(one.device.type == "cpu" and has_kernel(one) for one in pair) for pair in pairs]
    digests = iter(_copy_digests([pair for pair, is_fused in zip(pairs, fused, strict=True) if is_fused]))
    others = [pair for pair, is_fused in zip(pairs, fused, strict=True) if not is_fused]
    multi_copy([source for source, _ in others], [destination for _, destination in others])
    return [next(digests) if is_fused else _digest_of_cast(*pair) for pair, is_fused in zip(pairs, fused, strict=True)]


def _copy_digests(pairs: Sequence[tuple[Tensor, Tensor]]) -> list[int]:
    """By the kernel."""
    if not pairs:
        return []
    sources, destinations = ([pair[side] for pair in pairs] for side in (0, 1))
    return torch.ops.titan_opd.multi_copy_digests(sources, destinations).tolist()


def _digest_of_cast(source: Tensor, destination: Tensor) -> int:
    if source.dtype == destination.dtype:
        return multi_digest([source])[0]
    return digest_reference(source, destination.dtype)


def digest_reference(tensor: Tensor, dtype: torch.dtype | None = None) -> int:
    """The digest for any device, of the tensor cast to `dtype`; None: as it is."""
    dtype = dtype or tensor.dtype
    flat = tensor.detach().contiguous().view(-1)
    step = _CHUNK_BYTES // dtype.itemsize
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    places = torch.arange(_BLOCK_WORDS, device=flat.device)
    keys = absorb(_WORD_KEY, places) >> 32 & 0xFFFFFFFF | 1
    for first in range(0, len(flat), step):
        raw = flat[first : first + step].to(dtype).view(torch.uint8)
        whole = raw.new_zeros(-(-len(raw) // (4 * _BLOCK_WORDS)) * 4 * _BLOCK_WORDS)
        whole[: len(raw)] = raw
        words = whole.view(torch.int32).view(-1, _BLOCK_WORDS).to(torch.int64) & 0xFFFFFFFF
        numbers = torch.arange(len(words), device=flat.device) + first * dtype.itemsize // (4 * _BLOCK_WORDS)
        total += ((words * keys).sum(1) * (absorb(_BLOCK_KEY, numbers) | 1)).sum()
    return int(total + len(flat) * dtype.itemsize)


@torch.library.register_fake("titan_opd::multi_copy_digests")
def _multi_copy_digests_fake(sources: list[Tensor], *_: Any, **__: Any) -> Tensor:
    return sources[0].new_empty(len(sources), dtype=torch.int64)


@torch.library.register_fake("titan_opd::multi_digest")
def _multi_digest_fake(tensors: list[Tensor], *_: Any, **__: Any) -> Tensor:
    return tensors[0].new_empty(len(tensors), dtype=torch.int64)


register_without_derivative("multi_copy_digests", _NO_DERIVATIVE)
