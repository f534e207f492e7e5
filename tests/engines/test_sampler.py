"""The sampler: what is kept, how often each token is drawn, and what is said about it."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from titan_opd.config.schema import SamplingConfig
from titan_opd.rollout.engine import Recording
from titan_opd.rollout.sampler import Sampler, most_likely, truncate

NINF = -math.inf

# Few distinct values, so that ties are frequent; -inf is a token of probability 0.
LOGIT = st.one_of(st.sampled_from([NINF, -2.0, -0.0, 0.0, 1.0, 1.5]), st.floats(-20, 20, width=32))


@st.composite
def logit_rows(draw, max_vocab: int = 12):
    vocab_size = draw(st.integers(1, max_vocab))
    row = st.lists(LOGIT, min_size=vocab_size, max_size=vocab_size).filter(lambda values: max(values) > NINF)
    return torch.tensor(draw(st.lists(row, min_size=1, max_size=4)))


def draw(logits, sampling=None, recording=None, *, vocab_size=None, seed=0, first_number=0, position=0):
    sampler = Sampler(
        sampling or SamplingConfig(),
        recording or Recording(),
        vocab_size=vocab_size or logits.shape[1],
        seed=seed,
    )
    numbers = torch.arange(first_number, first_number + len(logits))
    return sampler.draw(logits, numbers, torch.full_like(numbers, position))


def kept_by_definition(row: list[float], top_k: int, top_p: float) -> list[int]:
    """The definition, in plain Python: sort by (logit, lower id first), cut to k, then to the smallest mass of p."""
    order = sorted((i for i in range(len(row)) if row[i] > NINF), key=lambda i: (-row[i], i))
    order = order[: top_k or len(order)]
    weights = [math.exp(row[i] - row[order[0]]) for i in order]
    kept, mass = [], 0.0
    for token, weight in zip(order, weights, strict=True):
        if kept and mass >= top_p * sum(weights):
            break
        kept.append(token)
        mass += weight
    return kept


@settings(deadline=None)
@given(logits=logit_rows(), top_k=st.integers(0, 15), top_p=st.sampled_from([1e-300, 1e-6, 0.31, 0.5, 0.77, 0.95, 1.0]))
def test_kept_set_is_the_defined_one(logits, top_k, top_p):
    kept_logits, ids = truncate(logits, top_k, top_p) if top_k or top_p < 1 else truncate(logits, 99, 1.0)
    for row, row_logits, row_ids in zip(logits.tolist(), kept_logits.tolist(), ids.tolist(), strict=True):
        kept = [token for token, value in zip(row_ids, row_logits, strict=True) if value > NINF]
        weights = sorted((math.exp(value - max(row)) for value in row), reverse=True)[: top_k or None]
        sums = [sum(weights[: n + 1]) / sum(weights) for n in range(len(weights))]
        if min(abs(mass - top_p) for mass in sums[:-1] or [0.0]) > 1e-6:  # a tie with p is decided by rounding
            assert kept == kept_by_definition(row, top_k, top_p)
        assert kept[0] == row.index(max(row))
        assert [row[token] for token in kept] == [value for value in row_logits if value > NINF]


def test_top_p_decides_exact_masses_exactly():
    uniform = torch.zeros(1, 4)
    for top_p, expected in [(0.25, 1), (0.2500001, 2), (0.5, 2), (0.75, 3), (0.7500001, 4)]:
        kept_logits, ids = truncate(uniform, 0, top_p)
        assert ids[0, kept_logits[0] > NINF].tolist() == list(range(expected))


def test_top_p_acts_on_what_top_k_left():
    logits = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log()
    assert draw(logits, SamplingConfig(top_p=0.55)).support.tolist() == [[0, 1]]
    # Of the two that top-k keeps, the first alone has mass 4/7 > 0.55.
    assert draw(logits, SamplingConfig(top_k=2, top_p=0.55)).support.tolist() == [[0]]


def test_top_p_on_a_flat_vocabulary_larger_than_the_first_window():
    generator = torch.Generator().manual_seed(0)
    logits = torch.stack([torch.randn(5000, generator=generator), 20 * torch.randn(5000, generator=generator)])
    kept_logits, ids = truncate(logits, 0, 0.9)
    for row in range(2):
        kept = ids[row, kept_logits[row] > NINF].tolist()
        assert kept == kept_by_definition(logits[row].tolist(), 0, 0.9)
    assert (kept_logits > NINF).sum(1).tolist()[0] > 2000  # the window really was widened


@settings(deadline=None)
@given(logits=logit_rows(), count=st.integers(1, 12))
def test_most_likely_orders_ties_by_id(logits, count):
    count = min(count, logits.shape[1])
    for row, ids in zip(logits.tolist(), most_likely(logits, count).tolist(), strict=True):
        assert ids == sorted(range(len(row)), key=lambda i: (-row[i], i))[:count]


@settings(deadline=None)
@given(
    logits=logit_rows(),
    temperature=st.sampled_from([0.3, 1.0, 2.5]),
    top_k=st.integers(0, 6),
    top_p=st.sampled_from([0.4, 0.9, 1.0]),
    padding=st.integers(0, 3),
)
def test_logprobs_are_of_the_distribution_sampled_from(logits, temperature, top_k, top_p, padding):
    vocab_size = logits.shape[1]
    padded = torch.nn.functional.pad(logits, (0, padding), value=50.0)  # more likely than any token
    sampling = SamplingConfig(temperature=temperature, top_k=top_k, top_p=top_p)
    draws = draw(padded, sampling, Recording(num_samples=5), vocab_size=vocab_size)
    scaled = (logits / temperature).double()
    if draws.support is None:
        assert not sampling.truncated
        kept = torch.ones_like(scaled, dtype=torch.bool)
    else:
        kept = torch.zeros_like(scaled, dtype=torch.bool)
        for row, ids in enumerate(draws.support.tolist()):
            kept[row, [token for token in ids if token >= 0]] = True
        assert (draws.support >= 0).any(dim=0).all(), "a column of padding only"
    expected = scaled.masked_fill(~kept, NINF).log_softmax(dim=-1)
    assert draws.sampled_ids.shape == (len(logits), 5)
    assert torch.equal(draws.sampled_ids[:, 0], draws.token_ids)
    assert torch.equal(draws.sampled_logprobs[:, 0], draws.logprobs)
    assert draws.logprobs.dtype == torch.float32
    torch.testing.assert_close(
        draws.sampled_logprobs.double(), expected.gather(1, draws.sampled_ids), atol=2e-6, rtol=1e-6
    )


@pytest.mark.parametrize("offset", [0.0, 1000.0])  # float32 steps at 1000 are 6e-5
def test_logprobs_are_accurate_on_a_large_vocabulary(offset):
    logits = offset + 5 * torch.randn(8, 50_000, generator=torch.Generator().manual_seed(0))
    draws = draw(logits, recording=Recording(num_samples=16, top_k=16))
    expected = logits.double().log_softmax(dim=-1)
    assert (draws.sampled_logprobs.double() - expected.gather(1, draws.sampled_ids)).abs().max() < 1e-6
    assert (draws.topk_logprobs.double() - expected.gather(1, draws.topk_ids)).abs().max() < 1e-6


@pytest.mark.parametrize(
    "sampling",
    [SamplingConfig(), SamplingConfig(temperature=0.6), SamplingConfig(top_k=4), SamplingConfig(top_p=0.8)],
    ids=["plain", "temperature", "top_k", "top_p"],
)
def test_frequencies_are_the_probabilities(sampling):
    logits = torch.tensor([[1.0, 0.2, NINF, -0.7, 1.0, -2.5, 0.4]])
    num_rows, columns = 4000, 5
    draws = draw(logits.expand(num_rows, -1), sampling, Recording(num_samples=columns), seed=11)
    scaled = logits[0].double() / sampling.temperature
    if draws.support is not None:
        kept = torch.zeros(7, dtype=torch.bool)
        kept[draws.support[0]] = True
        scaled = scaled.masked_fill(~kept, NINF)
    expected = scaled.softmax(dim=-1) * num_rows * columns
    observed = torch.bincount(draws.sampled_ids.flatten(), minlength=7).double()
    assert observed[expected == 0].sum() == 0
    possible = expected > 0
    chi_square = ((observed - expected)[possible] ** 2 / expected[possible]).sum()
    degrees = int(possible.sum()) - 1
    # Mean `degrees`, standard deviation sqrt(2 degrees); for at most 5 degrees, +8 deviations has probability < 1e-4.
    assert chi_square < degrees + 8 * math.sqrt(2 * degrees)


@settings(deadline=None)
@given(logits=logit_rows(), recording=st.booleans())
def test_temperature_zero_is_the_lowest_id_of_the_maximum(logits, recording):
    draws = draw(logits, SamplingConfig(temperature=0.0), Recording(num_samples=3 * recording))
    for row, token in zip(logits.tolist(), draws.token_ids.tolist(), strict=True):
        assert token == row.index(max(row))
    assert draws.logprobs.tolist() == [0.0] * len(logits)
    assert draws.support is None
    if recording:
        assert torch.equal(draws.sampled_ids, draws.token_ids[:, None].expand(-1, 3))
        assert not draws.sampled_logprobs.any()


@settings(deadline=None)
@given(logits=logit_rows(), top_k=st.integers(1, 14), temperature=st.sampled_from([0.5, 1.0]))
def test_recorded_candidates_cover_the_whole_vocabulary(logits, top_k, temperature):
    # Top-p cuts what is sampled from; the recorded candidates know nothing of it.
    sampling = SamplingConfig(temperature=temperature, top_p=0.5)
    draws = draw(logits, sampling, Recording(top_k=top_k))
    expected = (logits / temperature).double().log_softmax(dim=-1)
    assert draws.topk_ids.shape == (len(logits), min(top_k, logits.shape[1]))
    assert torch.equal(draws.topk_ids, most_likely(logits / temperature, draws.topk_ids.shape[1]))
    torch.testing.assert_close(draws.topk_logprobs.double(), expected.gather(1, draws.topk_ids), atol=2e-6, rtol=1e-6)
    assert draws.sampled_ids is None


def test_padded_columns_are_not_candidates():
    logits = torch.tensor([[0.0, 1.0, 9.0, math.nan]])
    draws = draw(logits, recording=Recording(num_samples=50, top_k=4), vocab_size=2)
    assert draws.topk_ids.tolist() == [[1, 0]]
    assert draws.topk_logprobs.exp().sum().item() == pytest.approx(1.0)
    assert set(draws.sampled_ids.flatten().tolist()) == {0, 1}


def test_single_token_vocabulary():
    for sampling in (SamplingConfig(), SamplingConfig(top_k=3), SamplingConfig(top_p=1e-9)):
        draws = draw(torch.tensor([[-7.0]]), sampling)
        assert draws.token_ids.tolist() == [0]
        assert draws.logprobs.tolist() == [0.0]


def test_half_precision_logits_are_computed_with_in_float32():
    logits = torch.randn(3, 40, generator=torch.Generator().manual_seed(1)).bfloat16()
    assert torch.equal(draw(logits).logprobs, draw(logits.float()).logprobs)


@pytest.mark.parametrize("bad", [[0.0, math.nan], [0.0, math.inf], [NINF, NINF]], ids=["nan", "inf", "all -inf"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_unusable_logits_are_refused_by_sample(bad, temperature):
    logits = torch.tensor([[0.0, 1.0], bad])
    with pytest.raises(ValueError, match=r"logits of sample 42,.*NaN or \+inf"):
        draw(logits, SamplingConfig(temperature=temperature), first_number=41)


def test_candidates_need_a_temperature():
    with pytest.raises(ValueError, match="top 8 cannot be recorded at temperature 0"):
        Sampler(SamplingConfig(temperature=0.0), Recording(top_k=8), vocab_size=20, seed=0)
