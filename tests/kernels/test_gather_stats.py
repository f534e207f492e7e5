"""gather_stats against its plain PyTorch definition in float64: every kernel, hard rows, the operator's contract.

Shape suffixes: R rows, V columns of a shard, K ids a row.
"""

from __future__ import annotations

import math

import pytest
import torch
from backends import DTYPES, Backend, per_backend
from hypothesis import given, settings
from hypothesis import strategies as st

from titan_opd import ops
from titan_opd.ops import RowStats
from titan_opd.ops.reference import gather_stats_reference


def run_kernel(
    backend: Backend, logits_RV, ids_RK, vocab_start: int = 0, vocab_size: int | None = None, inverse_temperature=None
) -> RowStats:
    return RowStats(*backend.call("gather_stats", logits_RV, ids_RK, vocab_start, vocab_size, inverse_temperature))


def assert_matches_reference(
    stats: RowStats, logits_RV, ids_RK, vocab_start: int = 0, vocab_size: int | None = None, inverse_temperature=None
):
    """Maxima and candidates exactly, sums to float32 accuracy."""
    scaled_RV = logits_RV.float() if inverse_temperature is None else logits_RV.float() * inverse_temperature[:, None]
    expected = gather_stats_reference(scaled_RV.double(), ids_RK, vocab_start=vocab_start, vocab_size=vocab_size)
    assert all(field.dtype == torch.float32 for field in stats)
    for name in ("max", "tail_max", "candidates"):
        torch.testing.assert_close(
            getattr(stats, name), getattr(expected, name).float(), rtol=0, atol=0, equal_nan=True, msg=name
        )
    for name in ("sum_exp", "tail_sum_exp"):
        torch.testing.assert_close(
            getattr(stats, name).double(), getattr(expected, name), rtol=1e-5, atol=0, equal_nan=True, msg=name
        )


@st.composite
def problems(draw):
    """Logits (with a row stride), ids (of this shard, of others, padding, duplicates), and the shard's place."""
    num_rows = draw(st.integers(0, 4))
    # Around the kernels' vectors (8, 16), bitmap words (64) and blocks (2048).
    num_columns = draw(st.one_of(st.integers(0, 80), st.sampled_from([127, 2047, 2048, 2049, 4200])))
    num_ids = draw(st.integers(0, 12))
    vocab_start = draw(st.sampled_from([0, 1, 1000]))
    vocab_size = draw(st.one_of(st.none(), st.integers(1, vocab_start + num_columns + 5)))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))

    scale = draw(st.sampled_from([0.01, 1.0, 20.0]))
    row_stride = num_columns + draw(st.integers(0, 3))
    storage = torch.randn(num_rows, row_stride, generator=generator) * scale
    dtype = draw(st.sampled_from(DTYPES))
    logits_RV = storage.to(dtype)[:, :num_columns]
    if draw(st.booleans()):
        logits_RV[torch.rand(logits_RV.shape, generator=generator) < 0.3] = -math.inf

    # Few distinct values, so that duplicates are common.
    low, high = vocab_start - 2, vocab_start + max(1, min(num_columns + 2, draw(st.integers(1, 5000))))
    ids_RK = torch.randint(low, high, (num_rows, num_ids), generator=generator)
    ids_RK = ids_RK.to(draw(st.sampled_from([torch.int32, torch.int64])))
    if draw(st.booleans()):
        ids_RK = ids_RK.T.contiguous().T
    inverse_temperature = torch.rand(num_rows, generator=generator) * 3 if draw(st.booleans()) else None
    return logits_RV, ids_RK, vocab_start, vocab_size, inverse_temperature


@per_backend
@given(problem=problems())
@settings(max_examples=100, deadline=None)
def test_kernel_equals_reference(backend, problem):
    assert_matches_reference(run_kernel(backend, *problem), *problem)


@per_backend
def test_exponential_is_accurate(backend):
    """Two terms only, so that an error of the exponential shows and rounding of the sum does not."""
    x_R = torch.linspace(-1, 0, 4001)
    logits_RV = torch.stack([torch.zeros_like(x_R), x_R], dim=1)
    stats = run_kernel(backend, logits_RV, torch.zeros(4001, 0, dtype=torch.int64))
    torch.testing.assert_close(stats.sum_exp.double(), 1 + x_R.double().exp(), rtol=2e-7, atol=0)


@per_backend
@pytest.mark.parametrize("tail_mass", [1e-2, 1e-6, 1e-30])
def test_tail_keeps_its_precision_where_it_is_tiny(backend, tail_mass):
    torch.manual_seed(0)
    logits_RV = torch.randn(8, 5000)
    ids_RK = torch.stack([torch.randperm(5000)[:16] for _ in range(8)])
    logits_RV.scatter_add_(1, ids_RK, torch.full(ids_RK.shape, -math.log(tail_mass) + 6))
    stats = run_kernel(backend, logits_RV, ids_RK)
    exact = gather_stats_reference(logits_RV.double(), ids_RK)
    log_mass = exact.tail_lse - exact.lse
    assert log_mass.max() < math.log(tail_mass) + 3  # the rows are what they are meant to be
    torch.testing.assert_close(stats.tail_lse.double(), exact.tail_lse, rtol=0, atol=4e-6)
    torch.testing.assert_close(stats.lse.double(), exact.lse, rtol=0, atol=8e-6)


@per_backend
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_without_finite_logits(backend, dtype):
    logits_RV = torch.full((1, 3000), -math.inf, dtype=dtype)
    stats = run_kernel(backend, logits_RV, torch.tensor([[5]]))
    assert stats.max.item() == stats.tail_max.item() == -math.inf
    assert stats.sum_exp.item() == stats.tail_sum_exp.item() == 0
    assert stats.candidates.item() == -math.inf
    assert stats.lse.item() == stats.tail_lse.item() == -math.inf


@per_backend
def test_nothing_outside_the_ids(backend):
    logits_RV = torch.randn(2, 5)
    stats = run_kernel(backend, logits_RV, torch.tensor([[4, 3, 2, 1, 0], [0, 1, 2, 3, 4]]))
    assert stats.tail_max.tolist() == [-math.inf] * 2
    assert stats.tail_sum_exp.tolist() == [0.0, 0.0]
    torch.testing.assert_close(stats.lse, logits_RV.logsumexp(1))


@per_backend
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("poison", [math.nan, math.inf])
@pytest.mark.parametrize("column", [0, 63, 2047, 2500, 2999])
def test_nan_and_infinity_propagate_to_the_sets_that_hold_them(backend, dtype, poison, column):
    logits_RV = torch.randn(3, 3000).to(dtype)
    logits_RV[:2, column] = poison
    other = (column + 1) % 3000
    ids_RK = torch.tensor([[other], [column], [column]])  # row 0: in the tail; row 1: in the support; row 2: nowhere
    stats = run_kernel(backend, logits_RV, ids_RK)
    assert stats.max.isnan().tolist() == stats.sum_exp.isnan().tolist() == [True, True, False]
    assert stats.tail_max.isnan().tolist() == stats.tail_sum_exp.isnan().tolist() == [True, False, False]
    assert_matches_reference(stats, logits_RV, ids_RK)


@per_backend
def test_a_lone_nan_among_minus_infinity_is_seen(backend):
    logits_RV = torch.full((1, 100), -math.inf)
    logits_RV[0, 70] = math.nan
    stats = run_kernel(backend, logits_RV, torch.zeros(1, 0, dtype=torch.int64))
    assert stats.lse.isnan().all()
    assert stats.tail_lse.isnan().all()


@per_backend
def test_padding_columns_count_nowhere_whatever_they_hold(backend):
    logits_RV = torch.randn(2, 100)
    padded_RV = torch.cat([logits_RV, torch.full((2, 28), math.nan)], dim=1)
    ids_RK = torch.tensor([[3, 100, -1], [120, 99, 3]])
    expected = run_kernel(backend, logits_RV, ids_RK)
    actual = run_kernel(backend, padded_RV, ids_RK, 0, 100)
    for name, a, b in zip(RowStats._fields, actual, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0, msg=name)


@per_backend
def test_extreme_ids_are_nobodys(backend):
    limits = torch.iinfo(torch.int64)
    ids_RK = torch.tensor([[limits.min, limits.max, -1, 7 + 2**32]])
    logits_RV = torch.randn(1, 50)
    stats = run_kernel(backend, logits_RV, ids_RK, 7)
    assert stats.candidates.tolist() == [[0.0] * 4]
    torch.testing.assert_close(stats.tail_lse, stats.lse, rtol=0, atol=0)


@per_backend
@pytest.mark.usefixtures("two_threads")
def test_rows_share_no_state(backend):
    """Rows of one call run on several threads and reuse scratch memory: each must equal its own call."""
    torch.manual_seed(0)
    logits_RV = torch.randn(300, 1000)
    ids_RK = torch.randint(-1, 1000, (300, 20))
    whole = run_kernel(backend, logits_RV, ids_RK)
    for r in (0, 1, 149, 150, 299):
        alone = run_kernel(backend, logits_RV[r : r + 1], ids_RK[r : r + 1])
        for name, a, b in zip(RowStats._fields, whole, alone, strict=True):
            torch.testing.assert_close(a[r : r + 1], b, rtol=0, atol=0, msg=name)


@given(num_shards=st.integers(1, 4), vocab_size=st.integers(1, 60), seed=st.integers(0, 1000))
@settings(max_examples=50, deadline=None)
def test_shards_merge_to_the_whole(num_shards, vocab_size, seed):
    """Split as tensor parallelism splits: uneven shards, empty ones, padded vocabulary."""
    torch.manual_seed(seed)
    padded_RV = torch.randn(3, vocab_size + 4).double()
    ids_RK = torch.randint(-1, vocab_size, (3, 6))
    whole = ops.gather_stats(padded_RV, ids_RK, vocab_size=vocab_size)
    shards, start = [], 0
    for shard_RV in padded_RV.float().chunk(num_shards, dim=1):
        shards.append(ops.gather_stats(shard_RV.contiguous(), ids_RK, vocab_start=start, vocab_size=vocab_size))
        start += shard_RV.shape[1]
    for name in ("lse", "tail_lse"):
        merged = torch.stack([getattr(shard, name) for shard in shards]).double().logsumexp(0)
        torch.testing.assert_close(merged, getattr(whole, name), rtol=0, atol=1e-5, msg=name)
    candidates = torch.stack([shard.candidates for shard in shards]).sum(0)
    torch.testing.assert_close(candidates, whole.candidates.float(), rtol=0, atol=0)


def test_float64_goes_through_the_reference_in_full_precision():
    logits_RV = torch.randn(4, 300, dtype=torch.float64)
    stats = ops.gather_stats(logits_RV, torch.randint(300, (4, 5)))
    assert all(field.dtype == torch.float64 for field in stats)
    torch.testing.assert_close(stats.lse, logits_RV.logsumexp(1), rtol=1e-14, atol=0)


@per_backend
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_16_bit_float_is_read_exactly(backend, dtype):
    logits_RV = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(dtype)[None]
    stats = run_kernel(backend, logits_RV, torch.arange(2**16)[None])
    torch.testing.assert_close(stats.candidates, logits_RV.float(), rtol=0, atol=0, equal_nan=True)


@per_backend
def test_a_vocabulary_of_several_segments(backend):
    """Wider than the bits that a CUDA block holds at a time, with ids in each segment and on its borders."""
    logits_RV = torch.randn(1, 2 * 2**18 + 33)
    ids_RK = torch.tensor([[0, 2**18 - 1, 2**18, 2 * 2**18 - 1, 2 * 2**18 + 32]])
    assert_matches_reference(run_kernel(backend, logits_RV, ids_RK), logits_RV, ids_RK)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_operator_obeys_torch(dtype):
    logits_RV, ids_RK = torch.randn(3, 50).to(dtype), torch.randint(-1, 50, (3, 4))
    torch.library.opcheck(torch.ops.titan_opd.gather_stats.default, (logits_RV, ids_RK))
    arguments = (logits_RV.requires_grad_(), ids_RK, 2, 40, torch.rand(3), "portable")
    torch.library.opcheck(torch.ops.titan_opd.gather_stats.default, arguments)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("seed", range(10))
def test_gradient_equals_float64_autograd(dtype, seed):
    """Through lse, tail_lse and candidates at once, with duplicates, padding, masked logits and a temperature."""
    generator = torch.Generator().manual_seed(seed)
    logits_RV = (torch.randn(5, 300, generator=generator) * 3).to(dtype)
    logits_RV[torch.rand(5, 300, generator=generator) < 0.1] = -math.inf
    ids_RK = torch.randint(-1, 30, (5, 12), generator=generator) * 10
    upstream = [torch.randn(5, generator=generator), torch.randn(5, generator=generator)]
    upstream.append(torch.randn(5, 12, generator=generator))
    factor_R = torch.rand(5, generator=generator) + 0.5

    def gradient(leaf_RV, factor_R):
        stats = ops.gather_stats(leaf_RV, ids_RK, vocab_start=3, vocab_size=290, inverse_temperature=factor_R)
        finite_RK = torch.where(stats.candidates.isfinite(), stats.candidates, 0)
        outputs = (stats.lse, stats.tail_lse, finite_RK)
        return torch.autograd.grad(outputs, leaf_RV, [g.to(stats.lse.dtype) for g in upstream])[0]

    actual_RV = gradient(logits_RV.clone().requires_grad_(), factor_R)
    expected_RV = gradient(logits_RV.double().requires_grad_(), factor_R.double())
    assert actual_RV.dtype == dtype
    rounding = 2**-8 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(actual_RV.double(), expected_RV, rtol=rounding, atol=3e-6)


def test_gradient_of_the_gradient_is_refused():
    leaf_RV = torch.randn(2, 9).requires_grad_()
    lse_R = ops.gather_stats(leaf_RV, torch.zeros(2, 1, dtype=torch.int64)).lse
    with pytest.raises(RuntimeError, match="has no derivative"):
        torch.autograd.grad(lse_R.sum(), leaf_RV, create_graph=True)


def test_compiles_into_one_graph():
    def loss(logits_RV, ids_RK):
        stats = ops.gather_stats(logits_RV * 2, ids_RK, vocab_start=3, vocab_size=40)
        return stats.lse - stats.tail_lse, stats.candidates

    logits_RV, ids_RK = torch.randn(4, 50), torch.randint(-1, 50, (4, 6))
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    for actual, expected in zip(compiled(logits_RV, ids_RK), loss(logits_RV, ids_RK), strict=True):
        torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"logits_RV": torch.zeros(4)}, r"logits must be floating \[R, V\]"),
        ({"logits_RV": torch.zeros(2, 5, dtype=torch.int64)}, r"logits must be floating \[R, V\], got torch.int64"),
        ({"logits_RV": torch.zeros(5, 2).T}, r"logits must have adjacent columns, got strides \(1, 2\)"),
        ({"inverse_temperature": torch.ones(3)}, r"inverse_temperature must be torch.float32 \[2\], got .*\[3\]"),
        (
            {"ids_RK": torch.zeros(3, 1, dtype=torch.int64)},
            r"ids must be \[R, K\] with logits' R = 2 rows, got \[3, 1\]",
        ),
        ({"ids_RK": torch.zeros(2, dtype=torch.int64)}, r"ids must be \[R, K\]"),
        ({"ids_RK": torch.zeros(2, 1)}, "ids must be int32 or int64, got torch.float32"),
        (
            {"ids_RK": torch.zeros(2, 1, dtype=torch.int64, device="meta")},
            "ids must be on logits' device cpu, got meta",
        ),
        ({"vocab_start": -1}, "vocab_start must be at least 0, got -1"),
        ({"vocab_size": 0}, "vocab_size must be at least 1 or None, got 0"),
    ],
)
def test_errors_name_the_argument(change, message):
    arguments = {"logits_RV": torch.zeros(2, 5), "ids_RK": torch.zeros(2, 1, dtype=torch.int64)} | change
    with pytest.raises(ValueError, match=message):
        ops.gather_stats(**arguments)


def test_unknown_and_missing_instruction_sets_are_refused():
    arguments = (torch.zeros(1, 2), torch.zeros(1, 0, dtype=torch.int64))
    with pytest.raises(RuntimeError, match="isa = 'sse9' is not one of 'portable', 'avx2', 'avx512'"):
        torch.ops.titan_opd.gather_stats(*arguments, isa="sse9")
    with pytest.raises(RuntimeError, match="gather_stats: isa = 'avx2' is for tensors on the CPU"):
        torch.ops.titan_opd_emu.gather_stats(*arguments, isa="avx2")


def test_describe_names_the_kernels():
    title = {"portable": "portable C++", "avx2": "AVX2", "avx512": "AVX-512"}[torch.ops.titan_opd.cpu_isa()]
    assert ops.describe(torch.device("cpu")) == f"operators: CPU kernels ({title})"
    assert ops.describe(torch.device("meta")) == "operators: PyTorch references"
