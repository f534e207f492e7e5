"""gumbel_sample against its plain PyTorch definition, against softmax, and over shards: every kernel, hard rows.

Shape suffixes: R rows, V columns of a shard, m draws a row.
"""

from __future__ import annotations

import math

import pytest
import torch
from backends import DTYPES, Backend, per_backend
from hypothesis import given, settings
from hypothesis import strategies as st

from titan_opd import ops
from titan_opd.ops import RaceWinners
from titan_opd.ops.gumbel_sample_reference import gumbel_sample_reference
from titan_opd.ops.noise import race_uniforms, row_keys


def run_kernel(
    backend: Backend, logits_RV, keys_R, num_samples, vocab_start=0, vocab_size=None, inverse_temperature=None
) -> RaceWinners:
    arguments = (logits_RV, keys_R, num_samples, vocab_start, vocab_size, inverse_temperature)
    return RaceWinners(*backend.call("gumbel_sample", *arguments))


def assert_matches_reference(
    drawn: RaceWinners, logits_RV, keys_R, num_samples, vocab_start=0, vocab_size=None, inverse_temperature=None
):
    expected = gumbel_sample_reference(
        logits_RV,
        keys_R,
        num_samples,
        vocab_start=vocab_start,
        vocab_size=vocab_size,
        inverse_temperature=inverse_temperature,
    )
    assert [field.dtype for field in drawn] == [torch.int64, torch.float64, torch.float32]
    assert torch.equal(drawn.ids, expected.ids)
    torch.testing.assert_close(drawn.scores, expected.scores, rtol=1e-12, atol=1e-12, equal_nan=True)
    torch.testing.assert_close(drawn.values, expected.values, rtol=0, atol=0, equal_nan=True)


def random_keys(num_rows: int, generator: torch.Generator | None = None) -> torch.Tensor:
    return torch.randint(-(2**63), 2**63 - 1, (num_rows,), generator=generator)


@st.composite
def problems(draw):
    """Logits (with a row stride, flat to peaked, hard values), keys, and the shard's place."""
    num_rows = draw(st.integers(0, 3))
    # Around the kernels' vectors (4, 8), words (64) and steps (64 to 2048).
    num_columns = draw(st.one_of(st.integers(0, 80), st.sampled_from([127, 128, 129, 513, 2049, 4200])))
    num_samples = draw(st.integers(1, 6))
    vocab_start = draw(st.sampled_from([0, 1, 1000, 2**31 - 5000]))
    vocab_size = draw(st.one_of(st.none(), st.integers(1, vocab_start + num_columns + 5)))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    storage = torch.randn(num_rows, num_columns + draw(st.integers(0, 3)), generator=generator)
    storage *= draw(st.sampled_from([0.0, 1.0, 20.0]))
    storage += draw(st.sampled_from([0.0, -3e4]))
    logits_RV = storage.to(draw(st.sampled_from(DTYPES)))[:, :num_columns]
    for poison in draw(st.lists(st.sampled_from([-math.inf, -math.inf, math.inf, math.nan]), max_size=2)):
        logits_RV[torch.rand(logits_RV.shape, generator=generator) < draw(st.sampled_from([0.01, 0.9]))] = poison
    inverse_temperature = torch.rand(num_rows, generator=generator) * 3 + 0.1 if draw(st.booleans()) else None
    keys_R = random_keys(num_rows, generator)
    return logits_RV, keys_R, num_samples, vocab_start, vocab_size, inverse_temperature


@per_backend
@given(problem=problems())
@settings(max_examples=60, deadline=None)
def test_kernel_equals_reference(backend, problem):
    assert_matches_reference(run_kernel(backend, *problem), *problem)


@per_backend
def test_noise_has_the_same_bits_everywhere(backend):
    """With one column a row the score is the noise, from which small uniforms come back to the last bit."""
    keys_R = torch.cat([random_keys(6), torch.tensor([0, -1, 1, 2**63 - 1, -(2**63)])])
    for token in (0, 1, 77, 2**16, 2**31 - 2):
        scores_Rm = run_kernel(backend, torch.zeros(len(keys_R), 1), keys_R, 60, token).scores
        v_Rm = race_uniforms(keys_R, 60, torch.tensor([token]))[:, :, 0]
        recovered_Rm = -torch.expm1(-(-scores_Rm).exp())
        torch.testing.assert_close(recovered_Rm, v_Rm, rtol=1e-13, atol=0)
        small_Rm = v_Rm < 0.03  # where the logarithms' rounding is below half a bit
        assert small_Rm.any()
        bits = (torch.stack([recovered_Rm, v_Rm])[:, small_Rm] * 2.0**52 - 0.5).round()
        assert torch.equal(bits[0], bits[1])


@per_backend
@pytest.mark.parametrize("num_shards", [1, 2, 3, 4])
def test_the_best_of_the_shards_is_the_draw_of_the_whole(backend, num_shards):
    logits_RV = torch.randn(5, 203) * 2
    keys_R = random_keys(5)
    whole = run_kernel(backend, logits_RV, keys_R, 7, 0, 190)
    shards, start = [], 0
    for shard_RV in logits_RV.chunk(num_shards, dim=1):
        shards.append(run_kernel(backend, shard_RV, keys_R, 7, start, 190))
        start += shard_RV.shape[1]
    scores = torch.stack([shard.scores for shard in shards])
    best = scores.argmax(0, keepdim=True)
    assert torch.equal(scores.gather(0, best)[0], whole.scores)
    assert torch.equal(torch.stack([shard.ids for shard in shards]).gather(0, best)[0], whole.ids)


@per_backend
def test_draws_follow_the_softmax(backend):
    """Pearson's chi-square over 40 ids; a right kernel fails for one seed in a million, and the seed is fixed."""
    logits_V = torch.linspace(-2, 2, 40)[torch.randperm(40)]
    logits_V[::9] = -math.inf
    num_rows, num_samples = 100, 80
    keys_R = row_keys(3, torch.arange(num_rows), torch.zeros(num_rows, dtype=torch.int64))
    ids = run_kernel(backend, logits_V.expand(num_rows, -1), keys_R, num_samples).ids
    counts_V = torch.bincount(ids.flatten(), minlength=40).double()
    expected_V = logits_V.double().softmax(0) * num_rows * num_samples
    assert not counts_V[expected_V == 0].any()
    possible_V = expected_V > 0
    assert expected_V[possible_V].min() > 5  # else the statistic is no chi-square
    statistic = ((counts_V - expected_V)[possible_V] ** 2 / expected_V[possible_V]).sum().item()
    freedom = int(possible_V.sum()) - 1
    assert statistic < wilson_hilferty(freedom, deviations=4.75)


def wilson_hilferty(freedom: int, deviations: float) -> float:
    """The chi-square value that a normal variable's `deviations` correspond to; 4.75 of them: one in a million."""
    return freedom * (1 - 2 / (9 * freedom) + deviations * math.sqrt(2 / (9 * freedom))) ** 3


@pytest.mark.parametrize("along", ["rows", "positions", "draws"])
def test_draws_are_independent_of_their_neighbours(along):
    """Chi-square of pairs of neighbouring draws over 8 x 8 equally likely ids, one in a million."""
    num = 20_000
    count = torch.arange(num)
    zero = torch.zeros(num, dtype=torch.int64)
    keys_R = row_keys(5, count, zero) if along == "rows" else row_keys(5, zero, count)
    if along == "draws":
        ids = ops.gumbel_sample(torch.zeros(num // 100, 8), keys_R[: num // 100], 100).ids.flatten()
    else:
        ids = ops.gumbel_sample(torch.zeros(num, 8), keys_R, 1).ids.flatten()
    counts = torch.bincount(ids[:-1] * 8 + ids[1:], minlength=64).double()
    expected = (num - 1) / 64
    assert ((counts - expected) ** 2 / expected).sum() < wilson_hilferty(63, deviations=4.75)


def test_noise_of_one_key_is_uniform_over_a_vocabulary():
    """As many ids as a large vocabulary has, 256 bins, and their neighbours' product; one in a million each."""
    for key in (0, 1, -1, 2**40):
        v_V = race_uniforms(torch.tensor([key]), 1, torch.arange(200_000))[0, 0]
        counts = torch.histc(v_V, bins=256, min=0, max=1)
        expected = 200_000 / 256
        assert ((counts - expected) ** 2 / expected).sum() < wilson_hilferty(255, deviations=4.75)
        correlation = ((v_V[:-1] - 0.5) * (v_V[1:] - 0.5)).mean() * 12
        assert abs(correlation) < 4.9 / math.sqrt(200_000)


@per_backend
def test_rows_of_which_nothing_can_be_drawn(backend):
    logits_RV = torch.full((4, 100), -math.inf)
    logits_RV[1, 70] = math.nan
    logits_RV[2, 70] = math.inf
    logits_RV[3, 70] = -3e38
    drawn = run_kernel(backend, logits_RV, random_keys(4), 2)
    assert drawn.ids.tolist() == [[-1, -1], [-1, -1], [-1, -1], [70, 70]]
    assert drawn.scores[0].tolist() == drawn.values[0].tolist() == [-math.inf] * 2
    assert drawn.scores[1:3].isnan().all()
    assert drawn.values[1:3].isnan().all()
    assert drawn.values[3].tolist() == [torch.tensor(-3e38).item()] * 2


@per_backend
def test_one_column_is_always_drawn_and_padding_never(backend):
    logits_RV = torch.tensor([[-50.0, 1e30, math.nan]]).expand(300, -1)
    drawn = run_kernel(backend, logits_RV, random_keys(300), 3, 7, 8)
    assert drawn.ids.unique().tolist() == [7]
    empty = run_kernel(backend, torch.zeros(2, 0), random_keys(2), 3)
    assert empty.ids.unique().tolist() == [-1]
    assert empty.scores.unique().tolist() == [-math.inf]


@per_backend
@pytest.mark.usefixtures("two_threads")
def test_a_draw_depends_on_its_row_and_number_only(backend):
    logits_RV = torch.randn(80, 500)
    keys_R = random_keys(80)
    whole = run_kernel(backend, logits_RV, keys_R, 9)
    for r in (0, 39, 40, 79):
        alone = run_kernel(backend, logits_RV[r : r + 1], keys_R[r : r + 1], 5)
        assert torch.equal(alone.ids[0], whole.ids[r, :5])
        assert torch.equal(alone.scores[0], whole.scores[r, :5])


def test_float64_goes_through_the_reference():
    logits_RV = torch.randn(4, 300)
    keys_R = random_keys(4)
    drawn = ops.gumbel_sample(logits_RV.double(), keys_R, 3)
    assert drawn.values.dtype == torch.float64
    assert torch.equal(drawn.ids, ops.gumbel_sample(logits_RV, keys_R, 3).ids)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_operator_obeys_torch(dtype):
    logits_RV, keys_R = torch.randn(3, 50).to(dtype), random_keys(3)
    torch.library.opcheck(torch.ops.titan_opd.gumbel_sample.default, (logits_RV, keys_R, 4))
    arguments = (logits_RV, keys_R, 1, 2, 40, torch.rand(3), "portable")
    torch.library.opcheck(torch.ops.titan_opd.gumbel_sample.default, arguments)


def test_compiles_into_one_graph():
    def draw(logits_RV, keys_R):
        return ops.gumbel_sample(logits_RV * 2, keys_R, 3, vocab_start=3, vocab_size=40)

    logits_RV, keys_R = torch.randn(4, 50), random_keys(4)
    compiled = torch.compile(draw, fullgraph=True, backend="aot_eager")
    for actual, expected in zip(compiled(logits_RV, keys_R), draw(logits_RV, keys_R), strict=True):
        assert torch.equal(actual, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_it_refuses_to_be_differentiated(dtype):
    with pytest.raises(RuntimeError, match="gumbel_sample has no derivative"):
        ops.gumbel_sample(torch.randn(2, 9, dtype=dtype, requires_grad=True), random_keys(2), 3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"logits_RV": torch.zeros(4)}, r"logits must be floating \[R, V\]"),
        ({"keys_R": torch.zeros(2)}, r"keys must be int64 \[2\], got torch.float32 \[2\]"),
        ({"keys_R": torch.zeros(3, dtype=torch.int64)}, r"keys must be int64 \[2\], got torch.int64 \[3\]"),
        ({"keys_R": torch.zeros(2, dtype=torch.int64, device="meta")}, "keys must be on logits' device cpu, got meta"),
        ({"num_samples": 0}, "num_samples must be at least 1, got 0"),
        ({"inverse_temperature": torch.ones(3)}, r"inverse_temperature must be torch.float32 \[2\], got .*\[3\]"),
        ({"vocab_start": -1}, "vocab_start must be at least 0, got -1"),
        ({"vocab_size": 0}, "vocab_size must be at least 1 or None, got 0"),
    ],
)
def test_errors_name_the_argument(change, message):
    arguments = {"logits_RV": torch.zeros(2, 5), "keys_R": torch.zeros(2, dtype=torch.int64), "num_samples": 1}
    with pytest.raises(ValueError, match=message):
        ops.gumbel_sample(**arguments | change)
