"""dense_pair_sums and dense_pair_grad_ against plain PyTorch and autograd in float64: every kernel, hard rows, shards.

Shape suffixes: R rows, V columns of a shard, S sums a row.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import pytest
import torch
from backends import DTYPES, Backend, per_backend
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from titan_opd import ops
from titan_opd.config.objective import Objective
from titan_opd.losses.divergences import divergence_terms
from titan_opd.ops import DensePairSums, RowStats
from titan_opd.ops.reference import gather_stats_reference

MIN_LOGPROB = -9.03


@dataclass(frozen=True)
class Problem:
    student_RV: Tensor
    teacher_RV: Tensor
    vocab_start: int = 0
    vocab_size: int | None = None
    min_logprob: float = MIN_LOGPROB
    beta: float | None = 0.3

    @property
    def num_columns(self) -> int:
        num_columns = self.student_RV.shape[1]
        if self.vocab_size is None:
            return num_columns
        return min(max(self.vocab_size - self.vocab_start, 0), num_columns)

    def exact(self) -> Problem:
        """The tokens' logits in float64, without padding."""
        tokens = slice(0, self.num_columns)
        student_RV, teacher_RV = self.student_RV[:, tokens].double(), self.teacher_RV[:, tokens].double()
        return replace(self, student_RV=student_RV, teacher_RV=teacher_RV, vocab_start=0, vocab_size=None)

    def stats(self) -> tuple[RowStats, RowStats]:
        exact = self.exact()
        no_ids = torch.zeros(len(exact.student_RV), 0, dtype=torch.int64)
        return gather_stats_reference(exact.student_RV, no_ids), gather_stats_reference(exact.teacher_RV, no_ids)

    def exact_sums(self) -> DensePairSums:
        exact = self.exact()
        return ops.dense_pair_sums(
            exact.student_RV, exact.teacher_RV, *self.stats(), min_logprob=self.min_logprob, beta=self.beta
        )


def run_sums(backend: Backend, problem: Problem, stats: tuple[RowStats, RowStats] | None = None) -> DensePairSums:
    numbers = [field.float() for side in stats or problem.stats() for field in side[:2]]
    sums_SR = backend.call(
        "dense_pair_sums",
        problem.student_RV,
        problem.teacher_RV,
        *numbers,
        problem.min_logprob,
        problem.beta,
        problem.vocab_start,
        problem.vocab_size,
    )
    assert sums_SR.dtype == torch.float32
    return DensePairSums(*sums_SR.unbind(0))


def offsets(sums: DensePairSums, weights: tuple[float, float, float], beta: float) -> Tensor:
    forward, reverse, jsd = weights
    total_R = -forward * sums.teacher_mass
    if reverse:
        total_R = total_R + reverse * sums.reverse_kl
    if jsd:
        total_R = total_R + jsd * (1 - beta) * sums.student_to_mixture
    return total_R


def run_grad(
    backend: Backend,
    problem: Problem,
    coefficients_R: Tensor,
    weights: tuple[float, float, float],
    stats: tuple[RowStats, RowStats] | None = None,
    offsets_R: Tensor | None = None,
) -> Tensor:
    """The gradient, in memory with the student's strides."""
    numbers = [field.float() for side in stats or problem.stats() for field in side[:2]]
    if offsets_R is None:
        beta = problem.beta or 0.5
        offsets_R = offsets(replace(problem, beta=beta).exact_sums(), weights, beta)
    student_RV = problem.student_RV
    grad_RV = torch.empty_strided(student_RV.shape, student_RV.stride(), dtype=student_RV.dtype).copy_(student_RV)
    backend.call(
        "dense_pair_grad_",
        grad_RV,
        problem.teacher_RV,
        *numbers,
        offsets_R.float(),
        coefficients_R,
        *weights,
        problem.beta or 0.5,
        problem.min_logprob,
        problem.vocab_start,
        problem.vocab_size,
    )
    return grad_RV


def exact_grad(problem: Problem, coefficients_R: Tensor, weights: tuple[float, float, float]) -> Tensor:
    """By autograd through the divergences' own terms."""
    exact = problem.exact()
    # A logit of -inf as a finite one without mass: autograd would make NaN of 0 times infinity.
    student_RV = exact.student_RV.clamp(min=-1e4).requires_grad_()
    log_p_RV = student_RV.log_softmax(-1)
    log_q_RV = exact.teacher_RV.log_softmax(-1).clamp(min=problem.min_logprob)
    objectives = (
        Objective("forward_kl", support="dense"),
        Objective("reverse_kl", support="dense"),
        Objective("jsd", support="dense", beta=problem.beta or 0.5),
    )
    terms = [
        weight * divergence_terms(objective, log_q_RV, log_p_RV).sum(-1)
        for weight, objective in zip(weights, objectives, strict=True)
        if weight
    ]
    (grad_RV,) = torch.autograd.grad((sum(terms) * coefficients_R.double()).sum(), student_RV)
    return grad_RV


def assert_sums(actual: DensePairSums, expected: DensePairSums) -> None:
    for name, a, b in zip(DensePairSums._fields, actual, expected, strict=True):
        exactly = name in ("num_clamped", "top1_agreement")
        tolerance = {"rtol": 0, "atol": 0} if exactly else {"rtol": 1e-5, "atol": 1e-5}
        torch.testing.assert_close(a.double(), b, **tolerance, equal_nan=True, msg=lambda text, n=name: f"{n}: {text}")


@st.composite
def problems(draw):
    num_rows = draw(st.integers(0, 4))
    # Around the kernels' packs (4, 8), vectors (8, 16) and blocks (1024).
    num_columns = draw(st.one_of(st.integers(0, 80), st.sampled_from([511, 1023, 1024, 1025, 2100])))
    vocab_start = draw(st.sampled_from([0, 1, 1000]))
    vocab_size = draw(st.one_of(st.none(), st.integers(1, vocab_start + num_columns + 5)))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    scale = draw(st.sampled_from([0.01, 1.0, 8.0]))

    def side(width: int) -> Tensor:
        stride = width + draw(st.integers(0, 9))
        storage = torch.randn(num_rows, stride, generator=generator) * scale
        return storage.to(draw(st.sampled_from(DTYPES)))[:, :width]

    student_RV, teacher_RV = side(num_columns), side(num_columns + draw(st.integers(0, 3)))
    for logits_RV in (student_RV, teacher_RV):
        if draw(st.booleans()):
            logits_RV[torch.rand(logits_RV.shape, generator=generator) < 0.3] = -math.inf
            logits_RV[:, :1] = scale  # one finite logit a row
    return Problem(
        student_RV,
        teacher_RV,
        vocab_start,
        vocab_size,
        min_logprob=draw(st.sampled_from([-30.0, MIN_LOGPROB, -1.013])),
        beta=draw(st.sampled_from([None, 0.1, 0.5, 0.9])),
    )


@per_backend
@given(problem=problems())
@settings(max_examples=80, deadline=None)
def test_sums_equal_reference(backend, problem):
    assert_sums(run_sums(backend, problem), problem.exact_sums())


WEIGHTS = [(1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.3, 0.7, 0.0), (0.0, 0.0, 1.0), (0.2, 0.3, 0.5)]


@per_backend
@given(problem=problems(), weights=st.sampled_from(WEIGHTS))
@settings(max_examples=80, deadline=None)
def test_grad_equals_autograd(backend, problem, weights):
    coefficients_R = torch.linspace(-2, 3, len(problem.student_RV))
    grad_RV = run_grad(backend, problem, coefficients_R, weights)
    expected_RV = exact_grad(problem, coefficients_R, weights)
    rounding = {torch.float32: 3e-7, torch.bfloat16: 2**-8, torch.float16: 2**-10}[grad_RV.dtype]
    torch.testing.assert_close(
        grad_RV[:, : problem.num_columns].double(), expected_RV, rtol=2e-5 + rounding, atol=1e-5 + rounding * 1e-2
    )
    assert not grad_RV[:, problem.num_columns :].any()


@per_backend
@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradient_is_rounded_once(backend, weights, dtype):
    """The same numbers as from float32 logits, rounded at the end."""
    problem = Problem((torch.randn(3, 2500) * 4).to(dtype), torch.randn(3, 2500) * 4)
    wide = replace(problem, student_RV=problem.student_RV.float())
    coefficients_R = torch.rand(3)
    narrow_RV, wide_RV = (run_grad(backend, one, coefficients_R, weights) for one in (problem, wide))
    torch.testing.assert_close(narrow_RV, wide_RV.to(dtype), rtol=0, atol=0)


@per_backend
@pytest.mark.parametrize("peak", [10.0, 40.0, 300.0])
@pytest.mark.parametrize("same_top", [True, False])
def test_peaked_rows(backend, peak, same_top):
    student_RV, teacher_RV = torch.randn(4, 3000), torch.randn(4, 3000)
    student_RV[:, 7] += peak
    teacher_RV[:, 7 if same_top else 2999] += peak
    problem = Problem(student_RV, teacher_RV, min_logprob=-30.0)
    sums = run_sums(backend, problem)
    assert_sums(sums, problem.exact_sums())
    assert sums.top1_agreement.tolist() == [float(same_top)] * 4
    for weights in WEIGHTS:
        grad_RV = run_grad(backend, problem, torch.ones(4), weights)
        expected_RV = exact_grad(problem, torch.ones(4), weights)
        torch.testing.assert_close(grad_RV.double(), expected_RV, rtol=2e-5, atol=5e-6)


@per_backend
@pytest.mark.parametrize("gap", [1e-2, 1e-1])
def test_small_divergences_keep_their_digits(backend, gap):
    """Where both sides nearly agree, the first-order parts of a divergence's terms cancel."""
    teacher_RV = torch.randn(4, 20000) * 3
    problem = Problem(teacher_RV + gap * torch.randn(4, 20000), teacher_RV, min_logprob=-30.0, beta=0.5)
    actual, exact = run_sums(backend, problem), problem.exact_sums()
    jsd = [(sums.teacher_to_mixture + sums.student_to_mixture).double() / 2 for sums in (actual, exact)]
    assert jsd[1].max() < gap**2
    torch.testing.assert_close(*jsd, rtol=0.01, atol=2e-7)
    torch.testing.assert_close(actual.forward_kl.double(), exact.forward_kl, rtol=0.03, atol=1e-6)


@per_backend
def test_equal_sides_have_no_divergence_and_no_gradient(backend):
    logits_RV = torch.randn(3, 2000) * 5
    problem = Problem(logits_RV, logits_RV.clone(), min_logprob=-60.0)
    sums = run_sums(backend, problem)
    for name in ("forward_kl", "reverse_kl", "teacher_to_mixture", "student_to_mixture"):
        torch.testing.assert_close(getattr(sums, name), torch.zeros(3), rtol=0, atol=1e-6)
    for weights in WEIGHTS:
        grad_RV = run_grad(backend, problem, torch.ones(3), weights)
        torch.testing.assert_close(grad_RV, torch.zeros_like(grad_RV), rtol=0, atol=1e-6)


@per_backend
def test_minus_infinity_on_either_side(backend):
    inf = math.inf
    student_RV = torch.tensor([[0.0, -inf, 1.0, -inf, 2.0]])
    teacher_RV = torch.tensor([[0.5, 1.0, -inf, -inf, 0.0]])
    problem = Problem(student_RV, teacher_RV)
    sums = run_sums(backend, problem)
    assert_sums(sums, problem.exact_sums())
    assert sums.forward_kl.item() == inf
    assert sums.num_clamped.item() == 2
    assert all(sums[i].isfinite() for i, name in enumerate(DensePairSums._fields) if name != "forward_kl")
    grad_RV = run_grad(backend, problem, torch.ones(1), (0.0, 0.5, 0.5))
    assert grad_RV[0, [1, 3]].tolist() == [0.0, 0.0]
    forward_RV = run_grad(backend, problem, torch.ones(1), (1.0, 0.0, 0.0))
    torch.testing.assert_close(
        forward_RV.double(), exact_grad(problem, torch.ones(1), (1.0, 0.0, 0.0)), rtol=1e-6, atol=1e-7
    )


@per_backend
@pytest.mark.parametrize("side", ["student_RV", "teacher_RV"])
@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_nan_and_infinity_reach_their_row_only(backend, side, poison):
    problem = Problem(torch.randn(2, 1500), torch.randn(2, 1500))
    getattr(problem, side)[1, 1200] = poison
    sums = run_sums(backend, problem)
    for name in ("forward_kl", "reverse_kl", "teacher_to_mixture", "student_to_mixture"):
        assert getattr(sums, name).isnan().tolist() == [False, True], name
    grad_RV = run_grad(backend, problem, torch.ones(2), (0.2, 0.3, 0.5))
    assert grad_RV.isnan().all(-1).tolist() == [False, True]
    assert grad_RV[0].isfinite().all()


@per_backend
@pytest.mark.parametrize(
    ("student", "teacher", "agreement"),
    [
        ([3.0, 3.0, 1.0], [0.0, 2.0, 2.0], 1.0),  # token 1 is on top of both
        ([3.0, 3.0, 3.0], [2.0, 2.0, 2.0], 1.0),  # three are: once is enough
        ([3.0, 3.0, 1.0], [0.0, 0.0, 2.0], 0.0),
    ],
)
def test_ties_agree_where_one_token_is_on_top_of_both(backend, student, teacher, agreement):
    problem = Problem(torch.tensor([student]), torch.tensor([teacher]))
    assert run_sums(backend, problem).top1_agreement.tolist() == [agreement]


@per_backend
def test_padding_counts_nowhere_whatever_it_holds(backend):
    problem = Problem(torch.randn(2, 100), torch.randn(2, 100))
    nan_RV = torch.full((2, 28), math.nan)
    padded = Problem(
        torch.cat([problem.student_RV, nan_RV], 1), torch.cat([problem.teacher_RV, nan_RV[:, :5]], 1), vocab_size=100
    )
    for a, b in zip(run_sums(backend, padded), run_sums(backend, problem), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)  # another row stride may mean another order
    grad_RV = run_grad(backend, padded, torch.ones(2), (0.2, 0.3, 0.5))
    torch.testing.assert_close(
        grad_RV[:, :100], run_grad(backend, problem, torch.ones(2), (0.2, 0.3, 0.5)), rtol=0, atol=0
    )
    assert not grad_RV[:, 100:].any()


@per_backend
@pytest.mark.parametrize("num_shards", [2, 3, 7])
def test_shards_add_up_to_the_whole(backend, num_shards):
    """Uneven shards, one of padding only: global statistics, sums that add, gradients side by side."""
    whole = Problem(torch.randn(3, 61) * 3, torch.randn(3, 61) * 3, vocab_size=50)
    weights, coefficients_R = (0.2, 0.3, 0.5), torch.tensor([1.0, -2.0, 0.5])
    sums, grads, start = [], [], 0
    offsets_R = offsets(whole.exact_sums(), weights, whole.beta)
    for student_RV, teacher_RV in zip(
        whole.student_RV.chunk(num_shards, 1), whole.teacher_RV.chunk(num_shards, 1), strict=True
    ):
        shard = replace(whole, student_RV=student_RV, teacher_RV=teacher_RV, vocab_start=start)
        sums.append(torch.stack(run_sums(backend, shard, whole.stats())))
        grads.append(run_grad(backend, shard, coefficients_R, weights, whole.stats(), offsets_R))
        start += student_RV.shape[1]
    assert_sums(DensePairSums(*torch.stack(sums).sum(0)), whole.exact_sums())
    torch.testing.assert_close(
        torch.cat(grads, 1)[:, :50].double(), exact_grad(whole, coefficients_R, weights), rtol=2e-5, atol=1e-5
    )


@per_backend
@pytest.mark.usefixtures("two_threads")
def test_rows_share_no_state(backend):
    problem = Problem(torch.randn(200, 1100).bfloat16(), torch.randn(200, 1100).half())
    sums, grad_RV = run_sums(backend, problem), run_grad(backend, problem, torch.ones(200), (0.2, 0.3, 0.5))
    for r in (0, 99, 100, 199):
        alone = replace(problem, student_RV=problem.student_RV[r : r + 1], teacher_RV=problem.teacher_RV[r : r + 1])
        for a, b in zip(sums, run_sums(backend, alone), strict=True):
            torch.testing.assert_close(a[r : r + 1], b, rtol=0, atol=0)
        alone_RV = run_grad(backend, alone, torch.ones(1), (0.2, 0.3, 0.5))
        torch.testing.assert_close(grad_RV[r : r + 1], alone_RV, rtol=0, atol=0)


def faces(dtype: torch.dtype = torch.float32) -> dict:
    """Arguments of the Python functions for two rows of five tokens."""
    student_RV, teacher_RV = torch.randn(2, 5).to(dtype), torch.randn(2, 5).to(dtype)
    no_ids = torch.zeros(2, 0, dtype=torch.int64)
    return {
        "student_RV": student_RV,
        "teacher_RV": teacher_RV,
        "student_stats": ops.gather_stats(student_RV, no_ids),
        "teacher_stats": ops.gather_stats(teacher_RV, no_ids),
        "min_logprob": -30.0,
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("kind", ["forward_kl", "reverse_kl", "jsd"])
def test_the_functions_together_give_value_and_gradient(dtype, kind):
    arguments = faces(dtype)
    objective = Objective(kind, support="dense")
    student_RV = arguments["student_RV"].double().clone().requires_grad_()
    terms_RV = divergence_terms(objective, arguments["teacher_RV"].double().log_softmax(-1), student_RV.log_softmax(-1))
    (expected_RV,) = torch.autograd.grad(terms_RV.sum(), student_RV)
    sums = ops.dense_pair_sums(**arguments, beta=0.5)
    value_R = {
        "forward_kl": sums.forward_kl,
        "reverse_kl": sums.reverse_kl,
        "jsd": (sums.teacher_to_mixture + sums.student_to_mixture) / 2,
    }[kind]
    tolerance = 1e-13 if dtype == torch.float64 else 2e-6
    torch.testing.assert_close(value_R.double(), terms_RV.sum(-1), rtol=tolerance, atol=tolerance)
    weight = kind if kind == "jsd" else kind.removesuffix("_kl")
    ones_R = torch.ones(2, dtype=sums.teacher_mass.dtype)
    result = ops.dense_pair_grad_(**arguments, sums=sums, coefficients_R=ones_R, **{f"{weight}_weight": 1.0})
    assert result is arguments["student_RV"]
    tolerance = 2**-8 if dtype == torch.bfloat16 else tolerance
    torch.testing.assert_close(result.double(), expected_RV, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_operators_obey_torch(dtype):
    arguments = faces(dtype)
    numbers = [field for side in ("student_stats", "teacher_stats") for field in arguments[side][:2]]
    pair = (arguments["student_RV"], arguments["teacher_RV"], *numbers)
    torch.library.opcheck(torch.ops.titan_opd.dense_pair_sums.default, (*pair, -30.0, None, 1, 4, "portable"))
    torch.library.opcheck(torch.ops.titan_opd.dense_pair_sums.default, (*pair, -30.0, 0.5))
    row = (torch.ones(2), torch.ones(2))
    torch.library.opcheck(torch.ops.titan_opd.dense_pair_grad_.default, (*pair, *row, 0.5, 0.2, 0.3, 0.5, -30.0, 0, 4))


def test_compiles_into_one_graph():
    def loss_and_grad(student_RV, teacher_RV):
        student_RV = student_RV * 2
        no_ids = torch.zeros(len(student_RV), 0, dtype=torch.int64)
        stats = (ops.gather_stats(student_RV, no_ids), ops.gather_stats(teacher_RV, no_ids))
        sums = ops.dense_pair_sums(student_RV, teacher_RV, *stats, min_logprob=-30.0, beta=0.5)
        ones_R = torch.ones(len(student_RV))
        ops.dense_pair_grad_(student_RV, teacher_RV, *stats, sums, ones_R, jsd_weight=1.0, min_logprob=-30.0)
        return sums.student_to_mixture, student_RV

    arguments = (torch.randn(4, 50), torch.randn(4, 50))
    compiled = torch.compile(loss_and_grad, fullgraph=True, backend="aot_eager")
    for actual, expected in zip(compiled(*arguments), loss_and_grad(*arguments), strict=True):
        torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_autograd_cannot_pass_through(dtype):
    arguments = faces(dtype)
    arguments["student_RV"].requires_grad_()
    with pytest.raises(RuntimeError, match="dense_pair_sums has no derivative: dense_pair_grad_ writes the gradient"):
        ops.dense_pair_sums(**arguments)
    with torch.no_grad():
        sums = ops.dense_pair_sums(**arguments)
    with pytest.raises(RuntimeError, match="dense_pair_grad_ has no derivative: it overwrites the student's logits"):
        ops.dense_pair_grad_(**arguments, sums=sums, coefficients_R=torch.ones(2, dtype=dtype))


ROW_STATS = RowStats(*[torch.zeros(3)] * 4, torch.zeros(3, 0))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"student_RV": torch.zeros(4)}, r"student must be floating \[R, V\]"),
        ({"teacher_RV": torch.zeros(5, 2).T}, r"teacher must have adjacent columns, got strides \(1, 2\)"),
        ({"teacher_RV": torch.zeros(3, 5)}, r"teacher must have student's 2 rows and .* 5 tokens, got \[3, 5\]"),
        ({"teacher_RV": torch.zeros(2, 4)}, r"teacher must have student's 2 rows and .* 5 tokens, got \[2, 4\]"),
        ({"teacher_RV": torch.zeros(2, 5, device="meta")}, "teacher must be on logits' device cpu, got meta"),
        ({"student_stats": ROW_STATS}, r"student_stats.max must be torch.float32 \[2\], got .*\[3\]"),
        ({"teacher_stats": ROW_STATS}, r"teacher_stats.max must be torch.float32 \[2\], got .*\[3\]"),
        ({"min_logprob": 0.5}, "min_logprob must be at most 0, got 0.5"),
        ({"min_logprob": math.nan}, "min_logprob must be at most 0, got nan"),
        ({"beta": 1.0}, "beta must be above 0 and below 1, got 1.0"),
        ({"vocab_start": -1}, "vocab_start must be at least 0, got -1"),
        ({"vocab_size": 0}, "vocab_size must be at least 1 or None, got 0"),
    ],
)
def test_errors_name_the_argument(change, message):
    arguments = faces()
    sums = ops.dense_pair_sums(**arguments)
    with pytest.raises(ValueError, match=message):
        ops.dense_pair_sums(**arguments | change)
    with pytest.raises(ValueError, match=message):
        ops.dense_pair_grad_(**arguments | change, sums=sums, coefficients_R=torch.ones(2))


def test_errors_of_the_gradient():
    arguments = faces()
    sums = ops.dense_pair_sums(**arguments)
    with pytest.raises(ValueError, match=r"coefficients must be torch.float32 \[2\], got .*\[1\]"):
        ops.dense_pair_grad_(**arguments, sums=sums, coefficients_R=torch.ones(1))
    wrong = sums._replace(reverse_kl=torch.zeros(2, dtype=torch.float64))
    with pytest.raises(ValueError, match=r"sums.reverse_kl must be torch.float32 \[2\], got torch.float64 \[2\]"):
        ops.dense_pair_grad_(**arguments, sums=wrong, coefficients_R=torch.ones(2))
    arguments["student_RV"] = torch.zeros(1, 5).expand(2, 5)
    with pytest.raises(ValueError, match="student is overwritten and its rows overlap"):
        ops.dense_pair_grad_(**arguments, sums=sums, coefficients_R=torch.ones(2))
