"""topk_logprobs against its plain PyTorch definition in float64: every kernel, hard rows, the operator's contract.

Shape suffixes: R rows, V columns of a shard, K = k ids a row.
"""

from __future__ import annotations

import math

import pytest
import torch
from backends import DTYPES, Backend, per_backend
from hypothesis import given, settings
from hypothesis import strategies as st

from titan_opd import ops
from titan_opd.ops import TopK
from titan_opd.ops.reference import topk_logprobs_reference


def run_kernel(
    backend: Backend, logits_RV, k: int, vocab_start: int = 0, vocab_size: int | None = None, inverse_temperature=None
) -> TopK:
    return TopK(*backend.call("topk_logprobs", logits_RV, k, vocab_start, vocab_size, inverse_temperature))


def assert_matches_reference(
    found: TopK, logits_RV, k: int, vocab_start: int = 0, vocab_size: int | None = None, inverse_temperature=None
):
    """Ids, values and maxima exactly; sums to 1e-5: the error of e^x, 1e-7 (1 + |x|), does not average out where few
    values are repeated far below the row's largest."""
    scaled_RV = logits_RV.float() if inverse_temperature is None else logits_RV.float() * inverse_temperature[:, None]
    expected = topk_logprobs_reference(scaled_RV.double(), k, vocab_start=vocab_start, vocab_size=vocab_size)
    assert found.ids.dtype == torch.int64
    assert all(field.dtype == torch.float32 for field in found[1:])
    assert torch.equal(found.ids, expected.ids)
    for name in ("values", "max", "tail_max"):
        torch.testing.assert_close(
            getattr(found, name), getattr(expected, name).float(), rtol=0, atol=0, equal_nan=True, msg=name
        )
    for name in ("sum_exp", "tail_sum_exp"):
        torch.testing.assert_close(
            getattr(found, name).double(), getattr(expected, name), rtol=1e-5, atol=0, equal_nan=True, msg=name
        )


@st.composite
def problems(draw):
    """Logits (with a row stride; rising, falling, few distinct values, hard values), k and the shard's place."""
    num_rows = draw(st.integers(0, 3))
    # Around the kernels' vectors (4, 8), bitmap words (64), steps (256, 2048) and capacities (512, 1024).
    num_columns = draw(st.one_of(st.integers(0, 80), st.sampled_from([127, 256, 257, 513, 1025, 2049, 4200])))
    k = draw(st.one_of(st.integers(1, 12), st.sampled_from([64, 129, 255, 256])))
    vocab_start = draw(st.sampled_from([0, 1, 1000]))
    vocab_size = draw(st.one_of(st.none(), st.integers(1, vocab_start + num_columns + 5)))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))

    storage = torch.randn(num_rows, num_columns + draw(st.integers(0, 3)), generator=generator)
    storage *= draw(st.sampled_from([0.01, 1.0, 20.0]))
    order = draw(st.sampled_from(["random", "rising", "falling", "few values", "equal"]))
    if order in ("rising", "falling"):
        storage = storage.sort(dim=1, descending=order == "falling").values
    elif order == "few values":
        storage = storage.round()
    elif order == "equal":
        storage = torch.full_like(storage, -1.5)
    logits_RV = storage.to(draw(st.sampled_from(DTYPES)))[:, :num_columns]
    for poison in draw(st.lists(st.sampled_from([-math.inf, math.inf, math.nan, -0.0]), max_size=2)):
        logits_RV[torch.rand(logits_RV.shape, generator=generator) < draw(st.sampled_from([0.01, 0.3]))] = poison
    inverse_temperature = torch.rand(num_rows, generator=generator) * 3 + 0.1 if draw(st.booleans()) else None
    return logits_RV, k, vocab_start, vocab_size, inverse_temperature


@per_backend
@given(problem=problems())
@settings(max_examples=100, deadline=None)
def test_kernel_equals_reference(backend, problem):
    assert_matches_reference(run_kernel(backend, *problem), *problem)


@per_backend
@pytest.mark.parametrize("k", [1, 64, 256])
@pytest.mark.parametrize("order", ["random", "rising", "falling"])
def test_long_rows(backend, k, order):
    """Many cuts in a row: in a rising one every column passes the floor of those before."""
    logits_RV = torch.randn(1, 20_001)
    if order != "random":
        logits_RV = logits_RV.sort(dim=1, descending=order == "falling").values
    assert_matches_reference(run_kernel(backend, logits_RV, k), logits_RV, k)


@per_backend
@pytest.mark.parametrize("tail_mass", [1e-2, 1e-6, 1e-30])
def test_tail_keeps_its_precision_where_it_is_tiny(backend, tail_mass):
    logits_RV = torch.randn(4, 5000)
    peaks_RK = torch.stack([torch.randperm(5000)[:16] for _ in range(4)])
    logits_RV.scatter_add_(1, peaks_RK, torch.full(peaks_RK.shape, -math.log(tail_mass) + 6))
    found = run_kernel(backend, logits_RV, 16)
    assert torch.equal(found.ids.sort().values, peaks_RK.sort().values)
    exact = topk_logprobs_reference(logits_RV.double(), 16)
    assert exact.tail_logprob.max() < math.log(tail_mass) + 3  # the rows are what they are meant to be
    torch.testing.assert_close(found.tail_logprob.double(), exact.tail_logprob, rtol=2e-7, atol=4e-6)
    torch.testing.assert_close(found.logprobs.double(), exact.logprobs, rtol=2e-7, atol=4e-6)


@per_backend
def test_equal_logits_are_ordered_by_id(backend):
    found = run_kernel(backend, torch.zeros(1, 3000), 70, 5)
    assert found.ids.tolist() == [list(range(5, 75))]
    assert found.sum_exp.item() == 3000
    assert found.tail_sum_exp.item() == 2930


@per_backend
@pytest.mark.parametrize("num_columns", [0, 1, 5])
def test_fewer_columns_than_k(backend, num_columns):
    logits_RV = torch.randn(2, num_columns)
    found = run_kernel(backend, logits_RV, 8)
    assert found.ids[:, num_columns:].eq(-1).all()
    assert found.values[:, num_columns:].eq(-math.inf).all()
    assert found.tail_max.tolist() == [-math.inf] * 2
    assert found.tail_sum_exp.tolist() == [0.0] * 2
    assert_matches_reference(found, logits_RV, 8)


@per_backend
def test_minus_infinity_is_a_logit_and_padding_is_none(backend):
    logits_RV = torch.full((1, 300), -math.inf)
    logits_RV[0, 200] = 1.0
    found = run_kernel(backend, torch.nn.functional.pad(logits_RV, (0, 9), value=math.nan), 4, 0, 300)
    assert found.ids.tolist() == [[200, 0, 1, 2]]
    assert found.values.tolist() == [[1.0] + [-math.inf] * 3]
    assert (found.sum_exp.item(), found.tail_max.item(), found.tail_sum_exp.item()) == (1.0, -math.inf, 0.0)


@per_backend
@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_nan_and_infinity_come_first_and_spoil_the_sums_of_the_sets_that_hold_them(backend, poison):
    logits_RV = torch.randn(3, 3000)
    logits_RV[0, 2500] = poison  # among the k: the tail is clean
    logits_RV[1, ::100] = poison  # more than k of them
    found = run_kernel(backend, logits_RV, 4)
    assert found.ids[0, 0] == 2500
    assert found.ids[1].tolist() == [0, 100, 200, 300]
    assert found.sum_exp.isnan().tolist() == found.max.isnan().tolist() == [True, True, False]
    assert found.tail_sum_exp.isnan().tolist() == found.tail_max.isnan().tolist() == [False, True, False]
    assert_matches_reference(found, logits_RV, 4)


@per_backend
@pytest.mark.usefixtures("two_threads")
def test_rows_share_no_state(backend):
    """Rows of one call run on several threads and reuse scratch memory: each must equal its own call."""
    logits_RV = torch.randn(60, 1000)
    whole = run_kernel(backend, logits_RV, 20)
    for r in (0, 1, 29, 30, 59):
        alone = run_kernel(backend, logits_RV[r : r + 1], 20)
        for name, a, b in zip(TopK._fields, whole, alone, strict=True):
            torch.testing.assert_close(a[r : r + 1], b, rtol=0, atol=0, msg=name)


def test_float64_goes_through_the_reference_in_full_precision():
    logits_RV = torch.randn(4, 256, dtype=torch.float64)
    found = ops.topk_logprobs(logits_RV, 256)
    assert all(field.dtype == torch.float64 for field in found[1:])
    torch.testing.assert_close(found.logprobs.exp().sum(1), torch.ones(4, dtype=torch.float64), rtol=1e-14, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_operator_obeys_torch(dtype):
    logits_RV = torch.randn(3, 50).to(dtype)
    torch.library.opcheck(torch.ops.titan_opd.topk_logprobs.default, (logits_RV, 4))
    arguments = (logits_RV, 60, 2, 40, torch.rand(3), "portable")
    torch.library.opcheck(torch.ops.titan_opd.topk_logprobs.default, arguments)


def test_compiles_into_one_graph():
    def largest(logits_RV):
        found = ops.topk_logprobs(logits_RV * 2, 6, vocab_start=3, vocab_size=40)
        return found.ids, found.logprobs, found.tail_logprob

    logits_RV = torch.randn(4, 50)
    compiled = torch.compile(largest, fullgraph=True, backend="aot_eager")
    for actual, expected in zip(compiled(logits_RV), largest(logits_RV), strict=True):
        torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_it_refuses_to_be_differentiated(dtype):
    with pytest.raises(RuntimeError, match="topk_logprobs has no derivative"):
        ops.topk_logprobs(torch.randn(2, 9, dtype=dtype, requires_grad=True), 3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"logits_RV": torch.zeros(4)}, r"logits must be floating \[R, V\]"),
        ({"logits_RV": torch.zeros(5, 2).T}, r"logits must have adjacent columns, got strides \(1, 2\)"),
        ({"k": 0}, "k must be 1 to 256, got 0"),
        ({"k": 257}, "k must be 1 to 256, got 257"),
        ({"inverse_temperature": torch.ones(3)}, r"inverse_temperature must be torch.float32 \[2\], got .*\[3\]"),
        ({"vocab_start": -1}, "vocab_start must be at least 0, got -1"),
        ({"vocab_size": 0}, "vocab_size must be at least 1 or None, got 0"),
    ],
)
def test_errors_name_the_argument(change, message):
    with pytest.raises(ValueError, match=message):
        ops.topk_logprobs(**{"logits_RV": torch.zeros(2, 5), "k": 3} | change)


def test_the_operator_itself_refuses_a_k_that_its_buffers_do_not_hold():
    for operators in (torch.ops.titan_opd, torch.ops.titan_opd_emu):
        with pytest.raises(RuntimeError, match="topk_logprobs: k must be 1 to 256, got 257"):
            operators.topk_logprobs(torch.zeros(1, 600), 257)
