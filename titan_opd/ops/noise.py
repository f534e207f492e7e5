"""Counter-based uniforms: what a sample draws is a function of its name, not of a generator's history.

A uniform is a hash of (seed, sample number, position in the answer, column). So an answer does not depend on which
other sequences share the batch, on the order in which they join and leave, or on a restart. The noise of
`gumbel_sample`, csrc/noise.h, is a hash of (row key, draw, id): here are its keys, and the same bits in PyTorch.

Shape suffixes: R sequences, C columns (uniforms a sequence draws at one position), m draws a row, V ids.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor


def _as_int64(word: int) -> int:
    """The signed integer with the same low 64 bits: torch's arithmetic on int64 wraps as unsigned arithmetic does."""
    word &= 2**64 - 1
    return word - 2**64 if word >= 2**63 else word


# Constants of SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014).
_INCREMENT = _as_int64(0x9E3779B97F4A7C15)
_MULTIPLIER_1 = _as_int64(0xBF58476D1CE4E5B9)
_MULTIPLIER_2 = _as_int64(0x94D049BB133111EB)


def _xor_shifted(words: Tensor, bits: int) -> Tensor:
    """words ^ (words >>> bits). torch shifts the sign in from the left; the mask makes the shift a logical one."""
    return words ^ ((words >> bits) & (2 ** (64 - bits) - 1))


def absorb(state: Tensor | int, word: Tensor) -> Tensor:
    """Output number `word` of the SplitMix64 generator that starts at `state`."""
    mixed = state + _INCREMENT * (word + 1)
    mixed = _xor_shifted(mixed, 30) * _MULTIPLIER_1
    mixed = _xor_shifted(mixed, 27) * _MULTIPLIER_2
    return _xor_shifted(mixed, 31)


def uniforms(seed: int, numbers_R: Tensor, positions_R: Tensor, num_columns: int) -> Tensor:
    """Uniforms of the open interval (0, 1), [R, C] float64.

    Args:
        seed: any integer; its low 64 bits count.
        numbers_R: [R] int64, sample numbers.
        positions_R: [R] int64, position in the answer, from 0.
        num_columns: C, independent uniforms at each position.
    """
    keys_R = row_keys(seed, numbers_R, positions_R)
    words_RC = absorb(keys_R[:, None], torch.arange(num_columns, device=numbers_R.device))
    return _open_uniform((words_RC >> 12) & (2**52 - 1))


def row_keys(seed: int, numbers_R: Tensor, positions_R: Tensor) -> Tensor:
    """[R] int64, a key for all that is drawn at one position of one sample; arguments as `uniforms`."""
    return absorb(absorb(torch.full_like(numbers_R, _as_int64(seed)), numbers_R), positions_R)


def race_uniforms(keys_R: Tensor, num_draws: int, ids_V: Tensor) -> Tensor:
    """[R, m, V] float64 of (0, 1): the v of csrc/noise.h for each row key, draw and id, to the last bit.

    Args:
        keys_R: [R] int64, any.
        num_draws: m.
        ids_V: [V] int64, below 2^31.
    """
    draw_keys_Rm1 = absorb(keys_R[:, None], torch.arange(num_draws, device=keys_R.device))[:, :, None]
    fine_RmV = (absorb(draw_keys_Rm1, ids_V) >> 44) & (2**20 - 1)
    return _open_uniform(_race_words(draw_keys_Rm1, ids_V) << 20 | fine_RmV)


def _race_words(draw_keys: Tensor, ids: Tensor) -> Tensor:
    """The 32 bits of `race_word` in csrc/noise.h, as int64."""
    low_32 = 2**32 - 1
    words = ids ^ (draw_keys & low_32)
    words = ((words ^ (words >> 16)) * 0x7FEB352D) & low_32
    words = ((words ^ (words >> 15)) + (draw_keys >> 32)) & low_32
    words = (words * 0x846CA68B) & low_32
    return words ^ (words >> 16)


def _open_uniform(bits: Tensor) -> Tensor:
    """From 52 bits to float64 of (0, 1)."""
    # 52 bits and a half: every value is exact in float64, neither 0 nor 1 occurs, and u * total < total for any total.
    return (bits.double() + 0.5) * 2.0**-52


def derive_seed(seed: int, purpose: str) -> int:
    """A seed of its own for each purpose of a run: what is drawn for one says nothing about what is drawn for another.

    Args:
        seed: the run's.
        purpose: any name.
    """
    return int.from_bytes(hashlib.sha256(f"{seed}/{purpose}".encode()).digest()[:8], "little")
