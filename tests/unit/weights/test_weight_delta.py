"""The changes of a tensor: exact, whatever its bits are, and refused when they contradict themselves."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from titan_opd.channel import ChannelError
from titan_opd.weights.delta import BLOCK, bits, compare, num_bytes_of, read_change

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
WORDS = {torch.bfloat16: np.uint16, torch.float16: np.uint16, torch.float32: np.uint32}
# 0.0, -0.0, the smallest numbers, 1.0 and its neighbours, infinities, NaNs that differ in their bits.
SPECIAL = {
    2: (0x0000, 0x8000, 0x0001, 0x8001, 0x3F80, 0x3F81, 0x7F80, 0xFF80, 0x7FC0, 0x7FC1, 0xFFFF),
    4: (0, 1 << 31, 1, 0x3F800000, 0x3F800001, 0x7F800000, 0x7FC00000, 0x7FC00001, 0xFFFFFFFF),
}


def of_bits(words: list[int], dtype: torch.dtype) -> torch.Tensor:
    return torch.from_numpy(np.array(words, WORDS[dtype]).view(np.uint8)).view(dtype)


def words_of(tensor: torch.Tensor) -> list[int]:
    return tensor.view(torch.uint8).numpy().view(WORDS[tensor.dtype]).tolist() if tensor.numel() else []


def there_and_back(old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """`old` with the changes that travelled, if there are any."""
    num_changed, elements = compare(old, new, most=old.numel())
    result = old.clone()
    if elements is not None:
        size = num_bytes_of(old.numel(), num_changed, old.dtype)
        memory = torch.empty(size, dtype=torch.uint8)
        assert elements.num_bytes == size
        elements.write(memory)
        change = read_change("w", memory, num_elements=old.numel(), num_changed=num_changed, dtype=old.dtype)
        changed = [index for index, (a, b) in enumerate(zip(words_of(old), words_of(new), strict=True)) if a != b]
        assert change.positions.tolist() == changed
        change.apply(result)
    else:
        assert num_changed == 0
    return result


@st.composite
def versions(draw):
    dtype = draw(st.sampled_from(DTYPES))
    size = dtype.itemsize
    word = st.one_of(st.sampled_from(SPECIAL[size]), st.integers(0, (1 << 8 * size) - 1))
    old = draw(st.lists(word, max_size=40))
    new = [draw(st.one_of(st.just(one), word)) for one in old]
    return of_bits(old, dtype), of_bits(new, dtype)


@settings(max_examples=150, deadline=None)
@given(versions())
def test_base_and_changes_are_the_new_version_bit_for_bit(pair):
    old, new = pair
    assert words_of(there_and_back(old, new)) == words_of(new)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [1, BLOCK - 1, BLOCK, BLOCK + 1, 16 * BLOCK, 17 * BLOCK + 5])
@pytest.mark.parametrize("share", [0.0, 0.01, 1.0])
def test_blocks_of_any_number(dtype, size, share):
    generator = torch.Generator().manual_seed(size)
    old = torch.randn(size, generator=generator).to(dtype)
    new = old.clone()
    chosen = torch.rand(size, generator=generator) < share
    chosen[[0, -1]] = share > 0  # the ends, and those of the blocks
    chosen[BLOCK - 1 :: BLOCK] = share > 0
    bits(new)[chosen] += 1
    assert torch.equal(bits(there_and_back(old, new)), bits(new))


def test_a_tensor_without_elements_and_one_with_rows():
    assert compare(torch.empty(0, 4), torch.empty(0, 4), most=0) == (0, None)
    old, new = torch.zeros(3, 5, 2), torch.zeros(3, 5, 2)
    new[2, 4, 1] = -0.0
    (num_changed, elements) = compare(old, new, most=1)
    assert (num_changed, elements.values.tolist(), elements.offsets.tolist()) == (1, [-(1 << 31)], [29])


@pytest.mark.parametrize("num_changed", [0, 1, 199, 200, 201, 1000, 17 * BLOCK])
def test_more_changes_than_the_limit_are_only_counted(num_changed):
    old = torch.zeros(17 * BLOCK, dtype=torch.bfloat16)
    new = old.clone()
    new[torch.randperm(len(new), generator=torch.Generator().manual_seed(0))[:num_changed]] = 1
    counted, elements = compare(old, new, most=200)
    assert counted == num_changed
    assert (elements is None) == (num_changed in (0, 201, 1000, 17 * BLOCK))


@pytest.mark.parametrize(
    ("byte", "value", "message"),
    [
        (0, 9, "contradict their number, 3"),
        (7, 0x80, "contradict their number, 3"),  # a count below 0
        (5, 1, "contradict their number, 3"),
        (27, 0x80, "lies outside its 65636 elements"),  # an offset in the short last block
    ],
)
def test_changes_that_contradict_themselves_are_refused(byte, value, message):
    old = torch.zeros(BLOCK + 100, dtype=torch.bfloat16)
    new = old.clone()
    new[[3, 70, BLOCK + 99]] = 1
    (num_changed, elements) = compare(old, new, most=3)
    memory = torch.empty(elements.num_bytes, dtype=torch.uint8)
    elements.write(memory)
    memory[byte] = value
    with pytest.raises(ChannelError, match=message):
        read_change("w", memory, num_elements=len(old), num_changed=num_changed, dtype=old.dtype)
