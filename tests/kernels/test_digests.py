"""Digests of bytes: every kernel against plain integers, what they must notice, and copies that take them."""

from __future__ import annotations

import functools

import pytest
import torch
from backends import BEST_ISA, DTYPES, ISAS
from hypothesis import example, given, settings
from hypothesis import strategies as st
from test_multi_copy import assert_same_bits, problems, views

from titan_opd import ops
from titan_opd.ops.digests import digest_reference

ANY_DTYPE = (*DTYPES, torch.uint8, torch.int64, torch.bool, torch.float8_e4m3fn)
BLOCK = 4096  # bytes
per_isa = pytest.mark.parametrize(
    "isa",
    [
        pytest.param(isa, marks=pytest.mark.skipif(i > BEST_ISA, reason=f"this machine has no {isa}"))
        for i, isa in enumerate(ISAS)
    ],
)


def splitmix(state, number):
    mask = (1 << 64) - 1
    mixed = (state + 0x9E3779B97F4A7C15 * (number + 1)) & mask
    mixed = ((mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9) & mask
    mixed = ((mixed ^ mixed >> 27) * 0x94D049BB133111EB) & mask
    return mixed ^ mixed >> 31


@functools.cache
def word_key(place):
    return splitmix(0x7174616E, place) >> 32 | 1


def definition(tensor):
    """In integers of any size."""
    data = bytes(tensor.contiguous().view(-1).view(torch.uint8).tolist())
    total = len(data)
    data += bytes(-len(data) % 4)
    for i in range(len(data) // 4):
        word = int.from_bytes(data[4 * i : 4 * i + 4], "little")
        total += word * word_key(i % 1024) * (splitmix(0x6F70645F, i // 1024) | 1)
    total %= 1 << 64
    return total - (1 << 64) if total >> 63 else total


def digest(tensor):
    return ops.multi_digest([tensor])[0]


def drawn(dtype, length, generator):
    if dtype.is_floating_point:
        return torch.randn(length, generator=generator).to(dtype)
    return torch.randint(0, 2, (length,), generator=generator).to(dtype)


@per_isa
@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(ANY_DTYPE), st.integers(0, 3000)), min_size=1, max_size=4), st.integers(0, 99)
)
@example([(torch.uint8, BLOCK), (torch.uint8, BLOCK + 1), (torch.bfloat16, BLOCK), (torch.uint8, 3 * BLOCK - 1)], 0)
def test_they_are_what_they_say(isa, tensors, seed):
    generator = torch.Generator().manual_seed(seed)
    tensors = [drawn(dtype, length, generator) for dtype, length in tensors]
    found = torch.ops.titan_opd.multi_digest(tensors, isa).tolist()
    assert found == [definition(one) for one in tensors] == [digest_reference(one) for one in tensors]


@per_isa
@given(pairs=problems())
@settings(max_examples=60, deadline=None)
def test_a_copy_has_the_digests_of_the_cast_sources(isa, pairs):
    sources, destinations = [source for (_, source), _ in pairs], [destination for _, (_, destination) in pairs]
    cast = [source.to(one.dtype).contiguous() for source, one in zip(sources, destinations, strict=True)]
    expected = []
    for (storage, destination), values in zip([pair[1] for pair in pairs], cast, strict=True):
        copy = storage.clone()
        copy.as_strided(destination.shape, destination.stride(), destination.storage_offset()).copy_(values)
        expected.append(copy)
    found = torch.ops.titan_opd.multi_copy_digests(sources, destinations, isa).tolist()
    for (storage, _), wanted in zip([pair[1] for pair in pairs], expected, strict=True):
        assert_same_bits(storage, wanted)  # and nothing around the destination was touched
    assert found == [digest_reference(one) for one in cast]
    assert found == [digest_reference(one, dst.dtype) for one, dst in zip(sources, destinations, strict=True)]


@per_isa
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("offset", [0, 1, 8])
def test_large_copies_past_the_caches(isa, dtype, offset):
    """Above 8 MiB, with destinations that are aligned to a vector and not."""
    source = torch.randn(5_000_011)
    storage = torch.zeros(len(source) + 20, dtype=dtype)
    destination = storage[offset : offset + len(source)]
    (found,) = torch.ops.titan_opd.multi_copy_digests([source], [destination], isa).tolist()
    assert_same_bits(destination, source.to(dtype))
    assert found == digest(destination) == digest_reference(source.to(dtype))
    storage.zero_()
    torch.ops.titan_opd.multi_copy([source], [destination], isa)
    assert_same_bits(destination, source.to(dtype))
    assert not storage[:offset].any()
    assert not storage[offset + len(source) :].any()


def test_threads_share_tensors_of_all_sizes():
    tensors = [torch.randn(n) for n in (1, 70_000, 0, 3, 200_000, 1024, 1025)]
    expected = [digest_reference(one) for one in tensors]
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        assert ops.multi_digest(tensors) == expected
        copies = [torch.zeros_like(one) for one in tensors]
        assert ops.multi_copy_digests(tensors, copies) == expected == ops.multi_digest(copies)
    finally:
        torch.set_num_threads(threads)


def test_types_without_a_kernel_go_by_the_reference():
    source = torch.arange(5000)
    copy = torch.zeros_like(source)
    assert ops.multi_copy_digests([source], [copy]) == [definition(source)]
    assert torch.equal(copy, source)
    assert ops.multi_digest([]) == [] == ops.multi_copy_digests([], [])


def test_what_they_refuse():
    with pytest.raises(ValueError, match=r"destinations\[0\] must have the shape of sources\[0\], \[3\], got \[2\]"):
        ops.multi_copy_digests([torch.zeros(3)], [torch.zeros(2)])
    with pytest.raises(RuntimeError, match="multi_copy_digests has no derivative: bytes have none"):
        ops.multi_copy_digests([torch.zeros(3, requires_grad=True)], [torch.zeros(3)])
    same = torch.zeros(4)
    with pytest.raises(RuntimeError, match="share memory"):
        ops.multi_copy_digests([same[:3]], [same[1:]])
    with pytest.raises(RuntimeError, match=r"tensors\[0\] must be contiguous"):
        torch.ops.titan_opd.multi_digest([torch.zeros(3, 4).T])
    torch.library.opcheck(torch.ops.titan_opd.multi_digest.default, ([torch.randn(3), torch.randn(0)],))
    torch.library.opcheck(torch.ops.titan_opd.multi_copy_digests.default, ([torch.randn(3)], [torch.zeros(3)]))


# ---- What must show ------------------------------------------------------------------------------------------------


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_it_does_not_depend_on_where_the_bytes_lie(data):
    generator = torch.Generator().manual_seed(0)
    _, view = data.draw(
        views(torch.bfloat16, (data.draw(st.integers(1, 40)), data.draw(st.integers(1, 40))), generator)
    )
    assert digest(view) == digest(view.clone().contiguous())
    assert digest(view.T) == digest(view.T.clone().contiguous())


@pytest.mark.parametrize("length", [2, 7, BLOCK + 3])
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
    tensor = torch.randn(4 * BLOCK)  # 16 blocks
    rows = tensor.view(4, -1)
    changed = [rows[[1, 0, 2, 3]], rows[[2, 1, 0, 3]], tensor.roll(1), tensor.roll(1024), -tensor, tensor.flip(0)]
    digests = {digest(tensor), *(digest(one) for one in changed)}
    assert len(digests) == 1 + len(changed)


def test_flips_of_highest_bits_do_not_cancel():
    tensor = torch.randn(256).bfloat16()
    seen = {digest(tensor)}
    for i in range(255):
        changed = tensor.clone()
        changed[[i, i + 1]] *= -1
        seen.add(digest(changed))
    assert len(seen) == 256


def test_length_shows_where_only_zeros_follow():
    assert len({digest(torch.zeros(n, dtype=torch.uint8)) for n in range(20)}) == 20
