"""The digest of a tensor: against plain Python, and what it must notice."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from titan_opd.weights import verify
from titan_opd.weights.verify import digest

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.uint8, torch.int64, torch.bool)


def reference(tensor):
    """The definition in integers of any size."""
    data = bytes(tensor.contiguous().view(-1).view(torch.uint8).tolist())
    size = len(data)
    data += bytes(-size % 4)
    keys = verify._keys(tensor.device).tolist()
    total = size
    for i in range(len(data) // 4):
        word = int.from_bytes(data[4 * i : 4 * i + 4], "little", signed=True)
        total += word * keys[i % 65536] * verify._mixed(i // 65536)
    total %= 1 << 64
    return total - (1 << 64) if total >> 63 else total


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(DTYPES), st.integers(0, 70), st.integers(0, 2**31))
def test_it_is_what_it_says(dtype, length, seed):
    generator = torch.Generator().manual_seed(seed)
    tensor = torch.randint(0, 2, (length,), generator=generator).to(dtype)
    if dtype.is_floating_point:
        tensor = torch.randn(length, generator=generator).to(dtype)
    assert digest(tensor) == reference(tensor)


def test_it_is_what_it_says_across_blocks():
    tensor = torch.randn(3 * 65536 + 5)
    assert digest(tensor) == reference(tensor)


def test_it_does_not_depend_on_where_the_bytes_lie():
    whole = torch.randn(64, 33).bfloat16()
    for view in (whole[:, :7], whole[1:], whole.T, whole.view(-1)[1:], whole.view(-1)[3:8]):
        assert digest(view) == digest(view.clone().contiguous())


@pytest.mark.parametrize("length", [2, 7, 65536 * 2 + 3])
def test_a_change_of_any_one_bit_shows(length):
    tensor = torch.randn(length).bfloat16()
    before = digest(tensor)
    raw = tensor.view(torch.uint8)
    for byte in {0, 1, length, 2 * length - 1}:
        for bit in range(8):
            raw[byte] ^= 1 << bit
            assert digest(tensor) != before
            raw[byte] ^= 1 << bit
    assert digest(tensor) == before


def test_exchanged_and_moved_values_show():
    tensor = torch.randn(4 * 65536)
    rows = tensor.view(4, -1)
    changed = [rows[[1, 0, 2, 3]], rows[[2, 1, 0, 3]], tensor.roll(1), tensor.roll(65536), -tensor, tensor.flip(0)]
    digests = {digest(tensor), *(digest(one) for one in changed)}
    assert len(digests) == 1 + len(changed)


def test_flips_of_highest_bits_do_not_cancel():
    """A plain product with odd keys modulo 2^64 of 64-bit words would not notice two flipped signs."""
    tensor = torch.randn(256).bfloat16()
    seen = {digest(tensor)}
    for i in range(255):
        changed = tensor.clone()
        changed[[i, i + 1]] *= -1
        seen.add(digest(changed))
    assert len(seen) == 256


def test_length_shows_where_only_zeros_follow():
    assert len({digest(torch.zeros(n, dtype=torch.uint8)) for n in range(20)}) == 20
