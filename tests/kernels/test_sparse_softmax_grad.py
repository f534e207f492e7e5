"""sparse_softmax_grad_ against autograd in float64: every kernel, hard rows, the operator's contract.

Shape suffixes: R rows, V columns of a shard, K ids a row.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import pytest
import torch
from backends import DTYPES, Backend, per_backend
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from titan_opd import ops
from titan_opd.ops import RowStats
from titan_opd.ops.reference import gather_stats_reference, local_columns, scaled_logits, sparse_softmax_grad_reference_


class Partials(NamedTuple):
    """Of a function in the logits at the ids [R, K], lse [R] and tail_lse [R]."""

    ids: Tensor
    lse: Tensor
    tail: Tensor


class Place(NamedTuple):
    """Where the columns lie in the vocabulary, and what the logits are multiplied by."""

    vocab_start: int = 0
    vocab_size: int | None = None
    inverse_temperature: Tensor | None = None


def random_partials(ids_RK, generator=None) -> Partials:
    num_rows = len(ids_RK)
    return Partials(
        torch.randn(ids_RK.shape, generator=generator),
        torch.randn(num_rows, generator=generator),
        torch.randn(num_rows, generator=generator),
    )


def exact_gradient(logits_RV, ids_RK, partials: Partials, place: Place = Place()) -> Tensor:  # noqa: B008  immutable
    """In float64, by autograd through plain gathers and log-sum-exps."""
    leaf_RV = logits_RV.double().requires_grad_()
    factor = None if place.inverse_temperature is None else place.inverse_temperature.double()
    z_RV = scaled_logits(leaf_RV, place.vocab_start, place.vocab_size, factor)
    columns_RK, owned_RK = local_columns(ids_RK, place.vocab_start, z_RV.shape[1])
    total = leaf_RV.sum() * 0
    for r in range(len(z_RV)):
        columns, owned = columns_RK[r][owned_RK[r]], owned_RK[r]
        outside = torch.ones(z_RV.shape[1], dtype=torch.bool)
        outside[columns] = False
        total = total + (partials.ids[r][owned].double() * z_RV[r, columns]).sum()
        for mask, g in ((torch.ones_like(outside), partials.lse[r]), (outside, partials.tail[r])):
            finite = mask & (z_RV[r] > -math.inf)
            if finite.any():
                total = total + g.double() * z_RV[r][finite].logsumexp(0)
    (grad_RV,) = torch.autograd.grad(total, leaf_RV)
    return grad_RV.nan_to_num(nan=0.0)  # leaf * 0 of infinite logits


def exact_stats(logits_RV, ids_RK, place: Place = Place()) -> RowStats:  # noqa: B008  immutable
    factor = None if place.inverse_temperature is None else place.inverse_temperature.double()
    return gather_stats_reference(
        logits_RV.double(),
        ids_RK,
        vocab_start=place.vocab_start,
        vocab_size=place.vocab_size,
        inverse_temperature=factor,
    )


def run_kernel(backend: Backend, logits_RV, ids_RK, partials: Partials, place: Place, stats: RowStats) -> Tensor:
    """The gradient, in a copy of the logits with the same strides; shifts are the maxima, as the loss head has them."""
    grad_RV = torch.empty_strided(logits_RV.shape, logits_RV.stride(), dtype=logits_RV.dtype).copy_(logits_RV)
    g_lse_R = torch.where(stats.sum_exp > 0, partials.lse / stats.sum_exp, 0)
    g_tail_R = torch.where(stats.tail_sum_exp > 0, partials.tail / stats.tail_sum_exp, 0)
    numbers = (stats.max, stats.tail_max, g_lse_R, g_tail_R)
    backend.call("sparse_softmax_grad_", grad_RV, ids_RK, partials.ids, *(x.float() for x in numbers), *place)
    return grad_RV


def assert_exact(grad_RV, logits_RV, ids_RK, partials: Partials, place: Place = Place()):  # noqa: B008  immutable
    """Within the rounding of float32 terms, whose exponentials are off by 1e-7 times the exponent, and of the type."""
    expected_RV = exact_gradient(logits_RV, ids_RK, partials, place)
    terms_RV = exact_gradient(logits_RV, ids_RK, Partials(*(g.abs() for g in partials)), place).abs()
    factor = 1 if place.inverse_temperature is None else place.inverse_temperature.double()[:, None]
    exponent_RV = (logits_RV.double() * factor).abs().nan_to_num(posinf=0)
    exponent_RV = exponent_RV + (exponent_RV.amax(1, keepdim=True) if exponent_RV.numel() else 0)
    info = torch.finfo(grad_RV.dtype)
    smallest = max(1e-35, info.tiny * info.eps)  # e^-87 and less is 0
    tolerance_RV = terms_RV * (1e-6 + 2e-7 * (exponent_RV + 10)) + 0.501 * info.eps * expected_RV.abs() + smallest
    error_RV = (grad_RV.double() - expected_RV).abs()
    assert (error_RV <= tolerance_RV).all(), (error_RV / tolerance_RV).max()


@st.composite
def problems(draw):
    """Logits (with a row stride), ids (of this shard, of others, padding, duplicates), and the shard's place."""
    num_rows = draw(st.integers(0, 4))
    num_columns = draw(st.one_of(st.integers(0, 80), st.sampled_from([127, 515, 2049])))
    num_ids = draw(st.integers(0, 12))
    vocab_start = draw(st.sampled_from([0, 1, 1000]))
    vocab_size = draw(st.one_of(st.none(), st.integers(1, vocab_start + num_columns + 5)))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))

    scale = draw(st.sampled_from([0.01, 1.0, 8.0]))
    offset = draw(st.integers(0, 3))  # rows that begin anywhere
    row_stride = num_columns + offset + draw(st.integers(0, 3))
    storage = torch.randn(num_rows, row_stride, generator=generator) * scale
    logits_RV = storage.to(draw(st.sampled_from(DTYPES)))[:, offset : offset + num_columns]
    if draw(st.booleans()):
        logits_RV[torch.rand(logits_RV.shape, generator=generator) < 0.3] = -math.inf

    # Few distinct values, so that duplicates are common.
    low, high = vocab_start - 2, vocab_start + max(1, min(num_columns + 2, draw(st.integers(1, 5000))))
    ids_RK = torch.randint(low, high, (num_rows, num_ids), generator=generator)
    ids_RK = ids_RK.to(draw(st.sampled_from([torch.int32, torch.int64])))
    if draw(st.booleans()):
        ids_RK = ids_RK.T.contiguous().T
    factor_R = torch.rand(num_rows, generator=generator) * 3 + 0.1 if draw(st.booleans()) else None
    return logits_RV, ids_RK, random_partials(ids_RK, generator), Place(vocab_start, vocab_size, factor_R)


@per_backend
@given(problem=problems())
@settings(max_examples=100, deadline=None)
def test_kernel_equals_autograd(backend, problem):
    logits_RV, ids_RK, partials, place = problem
    grad_RV = run_kernel(backend, *problem, exact_stats(logits_RV, ids_RK, place))
    assert_exact(grad_RV, logits_RV, ids_RK, partials, place)


@given(problem=problems())
@settings(max_examples=100, deadline=None)
def test_reference_equals_autograd(problem):
    logits_RV, ids_RK, partials, place = problem
    stats = exact_stats(logits_RV, ids_RK, place)
    factor = None if place.inverse_temperature is None else place.inverse_temperature.double()
    grad_RV = ops.sparse_softmax_grad_(
        logits_RV.double(),
        ids_RK,
        partials.ids.double(),
        stats.lse,
        stats.tail_lse,
        partials.lse.double(),
        partials.tail.double(),
        vocab_start=place.vocab_start,
        vocab_size=place.vocab_size,
        inverse_temperature=factor,
    )
    torch.testing.assert_close(grad_RV, exact_gradient(logits_RV, ids_RK, partials, place), rtol=1e-9, atol=1e-12)


@per_backend
@pytest.mark.parametrize("tail_mass", [1e-2, 1e-6, 1e-30])
def test_a_tiny_tail_is_exact(backend, tail_mass):
    """Each element to its own precision: outside the ids nothing cancels, at the ids nothing is corrected."""
    logits_RV = torch.randn(8, 3000)
    ids_RK = torch.stack([torch.randperm(3000)[:16] for _ in range(8)])
    logits_RV.scatter_add_(1, ids_RK, torch.full(ids_RK.shape, -math.log(tail_mass) + 6))
    partials = Partials(torch.zeros(8, 16), torch.rand(8), torch.rand(8))
    grad_RV = run_kernel(backend, logits_RV, ids_RK, partials, Place(), exact_stats(logits_RV, ids_RK))
    torch.testing.assert_close(grad_RV.double(), exact_gradient(logits_RV, ids_RK, partials), rtol=2e-5, atol=0)


@per_backend
def test_log_sum_exps_serve_as_well_as_maxima(backend):
    logits_RV, ids_RK = torch.randn(4, 700), torch.randint(700, (4, 9))
    partials, stats = random_partials(ids_RK), exact_stats(logits_RV, ids_RK)
    grad_RV = logits_RV.clone()
    numbers = (stats.lse.float(), stats.tail_lse.float(), partials.lse, partials.tail)
    backend.call("sparse_softmax_grad_", grad_RV, ids_RK, partials.ids, *numbers)
    torch.testing.assert_close(grad_RV.double(), exact_gradient(logits_RV, ids_RK, partials), rtol=1e-5, atol=1e-7)


@per_backend
def test_nothing_outside_the_ids(backend):
    """The tail's partial does not count, whatever it is."""
    logits_RV = torch.randn(2, 5)
    ids_RK = torch.tensor([[4, 3, 2, 1, 0], [0, 1, 2, 3, 4]])
    partials, stats = random_partials(ids_RK), exact_stats(logits_RV, ids_RK)
    assert (stats.tail_lse == -math.inf).all()
    grad_RV = run_kernel(backend, logits_RV, ids_RK, partials._replace(tail=torch.full((2,), 1e30)), Place(), stats)
    assert_exact(grad_RV, logits_RV, ids_RK, partials)


@per_backend
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_without_finite_logits_have_the_ids_partials_only(backend, dtype):
    logits_RV = torch.full((1, 300), -math.inf, dtype=dtype)
    ids_RK = torch.tensor([[5, 7, 5]])
    partials = Partials(torch.tensor([[1.0, 2.0, 3.0]]), torch.ones(1), torch.ones(1))
    grad_RV = run_kernel(backend, logits_RV, ids_RK, partials, Place(), exact_stats(logits_RV, ids_RK))
    expected_RV = torch.zeros(1, 300, dtype=dtype)
    expected_RV[0, 5], expected_RV[0, 7] = 4, 2
    torch.testing.assert_close(grad_RV, expected_RV, rtol=0, atol=0)


@per_backend
@pytest.mark.parametrize("dtype", DTYPES)
def test_masked_logits_get_exactly_zero(backend, dtype):
    """A huge partial must not make a number out of e^-inf."""
    logits_RV = torch.randn(2, 300).to(dtype)
    logits_RV[:, 40:] = -math.inf
    ids_RK = torch.tensor([[0], [-1]])
    partials = Partials(torch.zeros(2, 1), torch.full((2,), 1e30), torch.full((2,), 1e30))
    grad_RV = run_kernel(backend, logits_RV, ids_RK, partials, Place(), exact_stats(logits_RV, ids_RK))
    assert not grad_RV[:, 40:].any()


@per_backend
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_nan_and_infinity_spread_over_their_row_only(backend, dtype, poison):
    logits_RV = torch.randn(3, 300).to(dtype)
    logits_RV[1, 77] = poison
    ids_RK = torch.tensor([[3], [3], [3]])
    partials = random_partials(ids_RK)
    stats = exact_stats(logits_RV, ids_RK)
    numbers = (stats.max, stats.tail_max, partials.lse / stats.sum_exp, partials.tail / stats.tail_sum_exp)
    grad_RV = logits_RV.clone()
    backend.call("sparse_softmax_grad_", grad_RV, ids_RK, partials.ids, *(x.float() for x in numbers))
    assert grad_RV[1].isnan().all()
    assert grad_RV[::2].isfinite().all()


@per_backend
def test_padding_columns_become_zero_whatever_they_hold(backend):
    logits_RV = torch.randn(2, 100)
    padded_RV = torch.cat([logits_RV, torch.full((2, 28), math.nan)], dim=1)
    ids_RK = torch.tensor([[3, 100, -1], [120, 99, 3]])
    partials = random_partials(ids_RK)
    stats = exact_stats(logits_RV, ids_RK)
    expected_RV = run_kernel(backend, logits_RV, ids_RK, partials, Place(), stats)
    grad_RV = run_kernel(backend, padded_RV, ids_RK, partials, Place(0, 100), stats)
    torch.testing.assert_close(grad_RV[:, :100], expected_RV, rtol=0, atol=0)
    assert not grad_RV[:, 100:].any()


@per_backend
def test_extreme_ids_are_nobodys(backend):
    limits = torch.iinfo(torch.int64)
    ids_RK = torch.tensor([[limits.min, limits.max, -1, 7 + 2**32]])
    logits_RV = torch.randn(1, 50)
    partials = random_partials(ids_RK)
    grad_RV = run_kernel(backend, logits_RV, ids_RK, partials, Place(7), exact_stats(logits_RV, ids_RK, Place(7)))
    assert_exact(grad_RV, logits_RV, ids_RK, partials, Place(7))


@per_backend
def test_many_duplicates_add_up(backend):
    """More ids than a block has threads, nearly all of them equal."""
    ids_RK = torch.randint(3, (2, 1500))
    logits_RV = torch.randn(2, 40)
    partials = random_partials(ids_RK)
    grad_RV = run_kernel(backend, logits_RV, ids_RK, partials, Place(), exact_stats(logits_RV, ids_RK))
    torch.testing.assert_close(grad_RV.double(), exact_gradient(logits_RV, ids_RK, partials), rtol=1e-5, atol=1e-3)
    assert grad_RV[:, :3].abs().max() > 1


@per_backend
@pytest.mark.usefixtures("two_threads")
def test_rows_share_no_state(backend):
    """Rows of one call run on several threads and reuse scratch memory: each must equal its own call."""
    logits_RV, ids_RK = torch.randn(300, 600), torch.randint(-1, 600, (300, 20))
    partials, stats = random_partials(ids_RK), exact_stats(logits_RV, ids_RK)
    whole_RV = run_kernel(backend, logits_RV, ids_RK, partials, Place(), stats)
    for r in (0, 1, 149, 150, 299):
        one = slice(r, r + 1)
        row_partials, row_stats = Partials(*(g[one] for g in partials)), RowStats(*(field[one] for field in stats))
        alone_RV = run_kernel(backend, logits_RV[one], ids_RK[one], row_partials, Place(), row_stats)
        torch.testing.assert_close(whole_RV[one], alone_RV, rtol=0, atol=0)


@given(num_shards=st.integers(1, 4), vocab_size=st.integers(1, 60), seed=st.integers(0, 1000))
@settings(max_examples=50, deadline=None)
def test_shards_hold_the_parts_of_the_whole(num_shards, vocab_size, seed):
    """Split as tensor parallelism splits: uneven shards, empty ones, padded vocabulary."""
    torch.manual_seed(seed)
    logits_RV = torch.randn(3, vocab_size + 4)
    ids_RK = torch.randint(-1, vocab_size, (3, 6))
    partials = random_partials(ids_RK)
    stats = RowStats(*(field.float() for field in exact_stats(logits_RV, ids_RK, Place(0, vocab_size))))
    numbers = (partials.ids, stats.lse, stats.tail_lse, partials.lse, partials.tail)
    whole_RV = ops.sparse_softmax_grad_(logits_RV.clone(), ids_RK, *numbers, vocab_size=vocab_size)
    parts, start = [], 0
    for shard_RV in logits_RV.chunk(num_shards, dim=1):
        part_RV = shard_RV.clone(memory_format=torch.contiguous_format)
        parts.append(ops.sparse_softmax_grad_(part_RV, ids_RK, *numbers, vocab_start=start, vocab_size=vocab_size))
        start += shard_RV.shape[1]
    torch.testing.assert_close(torch.cat(parts, dim=1), whole_RV, rtol=1e-6, atol=1e-7)


def arguments_of(logits_RV, num_ids=4):
    num_rows = len(logits_RV)
    ids_RK = torch.randint(-1, logits_RV.shape[1], (num_rows, num_ids))
    partials = random_partials(ids_RK)
    return (ids_RK, partials.ids, torch.full((num_rows,), 5.0), torch.full((num_rows,), 4.0), *partials[1:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_operator_obeys_torch(dtype):
    logits_RV = torch.randn(3, 50).to(dtype)
    arguments = arguments_of(logits_RV)
    operator = torch.ops.titan_opd.sparse_softmax_grad_.default
    torch.library.opcheck(operator, (logits_RV, *arguments))
    torch.library.opcheck(operator, (logits_RV, *arguments, 2, 40, torch.rand(3), "portable"))


def test_compiles_into_one_graph():
    def gradient(logits_RV, *arguments):
        z_RV = logits_RV * 2
        ops.sparse_softmax_grad_(z_RV, *arguments, vocab_start=3, vocab_size=40)
        return z_RV + 1

    logits_RV = torch.randn(4, 50)
    arguments = arguments_of(logits_RV)
    compiled = torch.compile(gradient, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(logits_RV, *arguments), gradient(logits_RV, *arguments))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_it_has_no_derivative_and_says_so(dtype):
    logits_RV = torch.randn(3, 50).to(dtype)
    ids_RK, *numbers = arguments_of(logits_RV)
    numbers = [number.to(dtype) for number in numbers]
    numbers[0].requires_grad_()
    with pytest.raises(RuntimeError, match="sparse_softmax_grad_ has no derivative"):
        ops.sparse_softmax_grad_(logits_RV, ids_RK, *numbers)
    with torch.no_grad():
        ops.sparse_softmax_grad_(logits_RV, ids_RK, *numbers)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"logits_RV": torch.zeros(4)}, r"logits must be floating \[R, V\]"),
        ({"logits_RV": torch.zeros(5, 2).T}, "logits must have adjacent columns"),
        (
            {"logits_RV": torch.zeros(1, 5).expand(2, 5)},
            r"logits is overwritten and its rows overlap \(strides \(0, 1\)",
        ),
        ({"ids_RK": torch.zeros(3, 1, dtype=torch.int64)}, r"ids must be \[R, K\] with logits' R = 2"),
        ({"g_RK": torch.zeros(2, 2)}, r"g must be torch.float32 \[2, 1\], got torch.float32 \[2, 2\]"),
        ({"lse_R": torch.zeros(2, dtype=torch.float64)}, r"^lse must be torch.float32 \[2\], got torch.float64"),
        ({"tail_lse_R": torch.zeros(1)}, r"tail_lse must be torch.float32 \[2\], got .*\[1\]"),
        ({"g_lse_R": torch.zeros(2, 1)}, "g_lse must be"),
        ({"g_tail_R": torch.zeros(2, device="meta")}, "g_tail must be on logits' device cpu, got meta"),
        ({"inverse_temperature": torch.ones(3)}, r"inverse_temperature must be torch.float32 \[2\]"),
        ({"vocab_start": -1}, "vocab_start must be at least 0, got -1"),
        ({"vocab_size": 0}, "vocab_size must be at least 1 or None, got 0"),
    ],
)
def test_errors_name_the_argument(change, message):
    arguments = {
        "logits_RV": torch.zeros(2, 5),
        "ids_RK": torch.zeros(2, 1, dtype=torch.int64),
        "g_RK": torch.zeros(2, 1),
    }
    arguments |= {name: torch.zeros(2) for name in ("lse_R", "tail_lse_R", "g_lse_R", "g_tail_R")}
    with pytest.raises(ValueError, match=message):
        ops.sparse_softmax_grad_(**(arguments | change))


def test_the_reference_is_in_place_too():
    logits_RV = torch.randn(2, 9, dtype=torch.float64)
    ids_RK, *numbers = arguments_of(logits_RV)
    assert sparse_softmax_grad_reference_(logits_RV, ids_RK, *(x.double() for x in numbers)) is logits_RV
