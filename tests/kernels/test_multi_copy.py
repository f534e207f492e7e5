"""multi_copy against Tensor.copy_: every kernel, every pair of types, views, what it must refuse."""

from __future__ import annotations

import math

import pytest
import torch
from backends import DTYPES, per_backend
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from titan_opd import ops
from titan_opd.ops.multi_copy import multi_copy_reference


def assert_same_bits(actual: Tensor, expected: Tensor) -> None:
    assert actual.dtype == expected.dtype
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)


@st.composite
def views(draw, dtype: torch.dtype, shape: tuple[int, ...], generator: torch.Generator):
    """A tensor of this shape: contiguous, at an odd offset, or rows of a wider matrix; and what it lies in."""
    offset = draw(st.integers(0, 9))
    last = shape[-1] if shape else 1
    rows = math.prod(shape[:-1])
    gap = draw(st.sampled_from([0, 0, 1, 4, 8])) if len(shape) >= 2 else 0
    storage = (torch.randn(offset + rows * (last + gap), generator=generator) * 100).to(dtype)
    if gap == 0:
        return storage, storage[offset : offset + rows * last].view(shape)
    return storage, storage[offset:].view(*shape[:-1], last + gap)[..., :last]


@st.composite
def problems(draw):
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    dimension = st.one_of(st.integers(0, 9), st.sampled_from([33, 64, 1030]))
    pairs = []
    for _ in range(draw(st.integers(1, 5))):  # without tensors torch finds no device: the Python face returns
        shape = tuple(draw(st.lists(dimension, max_size=3).filter(lambda sizes: math.prod(sizes) < 40_000)))
        pairs.append([draw(views(draw(st.sampled_from(DTYPES)), shape, generator)) for _ in range(2)])
    return pairs


@per_backend
@given(pairs=problems())
@settings(max_examples=60, deadline=None)
def test_equals_copies_one_by_one(backend, pairs):
    expected = []
    for (_, source), (storage, destination) in pairs:
        copy = storage.clone()
        copy.as_strided(destination.shape, destination.stride(), destination.storage_offset()).copy_(source)
        expected.append(copy)
    sources = [source for (_, source), _ in pairs]
    backend.call("multi_copy", sources, [destination for _, (_, destination) in pairs])
    for (_, (storage, _)), wanted in zip(pairs, expected, strict=True):
        assert_same_bits(storage, wanted)  # and nothing around the destination was touched


@per_backend
@pytest.mark.parametrize("destination_dtype", DTYPES)
@pytest.mark.parametrize("source_dtype", DTYPES)
def test_rounds_once_to_the_nearest_even(backend, source_dtype, destination_dtype):
    """All 16-bit values, and float32 values beside and at the middle between two of the narrower type."""
    bits = torch.arange(2**16, dtype=torch.int32)
    if source_dtype == torch.float32:
        low = {torch.bfloat16: [0, 0x7FFF, 0x8000, 0x8001], torch.float16: [0, 0x0FFF, 0x1000, 0x1001, 0x3000]}
        upper = (bits << 16)[:, None]
        source = (upper + torch.tensor(low.get(destination_dtype, [0, 1, 0x1234]), dtype=torch.int32)).flatten()
        source = source.view(torch.float32)
    else:
        source = bits.to(torch.int16).view(source_dtype)
    destination = torch.empty(len(source), dtype=destination_dtype)
    backend.call("multi_copy", [source], [destination])
    assert_same_bits(destination, source.to(destination_dtype))


@per_backend
def test_a_copy_of_one_type_keeps_every_bit(backend):
    source = torch.tensor([0x7FC01234, -1, 1, -(2**31)], dtype=torch.int32).view(torch.float32)
    destination = torch.zeros(4)
    backend.call("multi_copy", [source], [destination])
    assert destination.view(torch.int32).tolist() == source.view(torch.int32).tolist()


@per_backend
def test_more_tensors_than_one_launch_describes(backend):
    """Of very different sizes, some empty, more than two tables of the CUDA kernel."""
    sources = [torch.randn(size) for size in [0, 1, 7, 300, 20_000, 3] * 25]
    destinations = [torch.zeros(len(source), dtype=torch.bfloat16) for source in sources]
    backend.call("multi_copy", sources, destinations)
    for source, destination in zip(sources, destinations, strict=True):
        assert_same_bits(destination, source.bfloat16())


@per_backend
def test_nothing_to_copy(backend):
    backend.call("multi_copy", [torch.zeros(0, 5)], [torch.zeros(0, 5)])
    copied = torch.zeros(2)
    backend.call("multi_copy", [torch.zeros(0, 5), torch.ones(2)], [torch.zeros(0, 5), copied])
    assert copied.tolist() == [1, 1]


@per_backend
@pytest.mark.usefixtures("two_threads")
def test_large_tensors_are_shared_among_threads(backend):
    sources = [torch.randn(1000, 333), torch.randn(70_000).half(), torch.randn(500, 100)[:, 3:90]]
    destinations = [torch.zeros(source.shape, dtype=torch.bfloat16) for source in sources]
    backend.call("multi_copy", sources, destinations)
    for source, destination in zip(sources, destinations, strict=True):
        assert_same_bits(destination, source.bfloat16())


@per_backend
def test_slices_of_one_matrix_are_apart(backend):
    """Columns of a fused projection: each lies within the others' extent and shares nothing with them."""
    fused = torch.zeros(10, 12, dtype=torch.bfloat16)
    parts = [torch.randn(10, width) for width in (3, 4, 5)]
    backend.call("multi_copy", parts, list(fused.split([3, 4, 5], dim=1)))
    assert_same_bits(fused, torch.cat(parts, 1).bfloat16())


def overlapping() -> dict[str, tuple[list[Tensor], list[Tensor], str]]:
    line, matrix = torch.zeros(20), torch.zeros(6, 8)
    return {
        "itself": ([line], [line], r"share memory"),
        "shifted": ([line[:10]], [line[5:15]], r"sources\[0\] and destinations\[0\] share memory"),
        "another pair": (
            [torch.zeros(3), line[:3]],
            [line[2:5], torch.zeros(3)],
            r"sources\[1\] and destinations\[0\]",
        ),
        "two destinations": ([torch.zeros(3)] * 2, [line[:3], line[2:5]], r"destinations\[0\] and destinations\[1\]"),
        "columns": ([matrix[:, :4]], [matrix[:, 3:7]], r"sources\[0\] and destinations\[0\] share memory"),
        "own rows": ([torch.zeros(3, 4)], [line.as_strided((3, 4), (2, 1))], r"destinations\[0\] shares memory among"),
    }


@per_backend
@pytest.mark.parametrize("case", overlapping())
def test_shared_memory_is_refused(backend, case):
    sources, destinations, message = overlapping()[case]
    if backend.name == "cuda":
        pytest.skip("copies to the GPU are apart")
    with pytest.raises(RuntimeError, match=message):
        backend.call("multi_copy", sources, destinations)


@per_backend
def test_views_that_are_no_rows_are_refused(backend):
    with pytest.raises(RuntimeError, match=r"sources\[1\] and destinations\[1\] must reduce to rows of adjacent"):
        backend.call("multi_copy", [torch.zeros(2), torch.zeros(3, 4).T], [torch.zeros(2), torch.zeros(4, 3)])
    with pytest.raises(RuntimeError, match=r"destinations\[0\] must be float32, bfloat16 or float16"):
        backend.call("multi_copy", [torch.zeros(2)], [torch.zeros(2, dtype=torch.float64)])


def test_the_function_copies_what_has_no_kernel_too():
    sources = [torch.randn(3, dtype=torch.float64), torch.randn(4), torch.arange(5)]
    destinations = [torch.zeros(3), torch.zeros(4, dtype=torch.bfloat16), torch.zeros(5, dtype=torch.int64)]
    expected = [destination.clone() for destination in destinations]
    multi_copy_reference(sources, expected)
    ops.multi_copy(sources, destinations)
    for actual, wanted in zip(destinations, expected, strict=True):
        assert_same_bits(actual, wanted)
    ops.multi_copy([], [])


def test_operator_obeys_torch():
    sources, destinations = [torch.randn(3, 4), torch.randn(5)], [torch.zeros(3, 4).half(), torch.zeros(5)]
    torch.library.opcheck(torch.ops.titan_opd.multi_copy.default, (sources, destinations))


def test_compiles_into_one_graph():
    def copied(source):
        destination = torch.zeros(source.shape, dtype=torch.bfloat16)
        ops.multi_copy([source * 2], [destination])
        return destination + 1

    source = torch.randn(4, 5)
    compiled = torch.compile(copied, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(source), copied(source))


def test_autograd_cannot_pass_through():
    source = torch.randn(3, requires_grad=True)
    with pytest.raises(RuntimeError, match="multi_copy has no derivative: it overwrites its destinations"):
        ops.multi_copy([source], [torch.zeros(3)])
    with pytest.raises(RuntimeError, match="multi_copy has no derivative"):
        torch.ops.titan_opd.multi_copy([source], [torch.zeros(3)])
    destination = torch.zeros(3)
    with torch.no_grad():
        ops.multi_copy([source], [destination])
    assert destination.tolist() == source.tolist()


@pytest.mark.parametrize(
    ("sources", "destinations", "message"),
    [
        ([torch.zeros(2)], [], "destinations must be as many as sources, got 0 for 1"),
        (
            [torch.zeros(2)] * 2,
            [torch.zeros(2), torch.zeros(3)],
            r"destinations\[1\] must have the shape of sources\[1\], \[2\], got \[3\]",
        ),
        (
            [torch.zeros(2)],
            [torch.zeros(2, device="meta")],
            r"sources\[0\] and destinations\[0\] must be on the first source's device cpu, got cpu and meta",
        ),
    ],
)
def test_errors_name_the_argument(sources, destinations, message):
    with pytest.raises(ValueError, match=message):
        ops.multi_copy(sources, destinations)
