"""The streaming interface: joining, leaving and cancelling between steps, and what it shares with `generate`."""

from __future__ import annotations

import gc
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engines.writing import make_decoder, make_engine, make_samples
from titan_opd.config.schema import SamplingConfig
from titan_opd.rollout import Recording
from titan_opd.rollout import stream as stream_module

SAMPLING = SamplingConfig(max_new_tokens=12)
SETTINGS = st.sampled_from(
    [SAMPLING, SamplingConfig(temperature=0.8, top_k=7, max_new_tokens=9), SamplingConfig(top_p=0.7, max_new_tokens=1)]
)


def drain(engine) -> list:
    answers = []
    while engine.num_running or engine.num_waiting:
        answers += engine.step()
    return answers


def by_number(answers) -> dict:
    assert len({answer.sample.number for answer in answers}) == len(answers)
    return {answer.sample.number: answer for answer in answers}


def assert_equal(one, other, *, atol: float) -> None:
    """Equal texts, and records closer than `atol`; 0 is equal bits."""
    assert one.sample is other.sample
    assert one.finish_reason == other.finish_reason
    for name in ("response_ids", "policy_versions", "sampled_ids", "topk_ids", "behavior_support"):
        left, right = getattr(one, name), getattr(other, name)
        assert (left is None) == (right is None), name
        assert left is None or torch.equal(left, right), name
    for name in ("behavior_logprobs", "sampled_logprobs", "topk_logprobs"):
        left, right = getattr(one, name), getattr(other, name)
        assert left is None or torch.allclose(left, right, atol=atol, rtol=0), name


@settings(max_examples=40, deadline=None)
@given(
    num_samples=st.integers(1, 9),
    max_concurrent=st.integers(1, 6),
    prefill_tokens=st.integers(1, 40),
    groups=st.lists(st.integers(0, 3), min_size=9, max_size=9),
    order=st.randoms(use_true_random=False),
    sampling=SETTINGS,
    fixed_shapes=st.booleans(),
)
def test_streaming_equals_generate_in_any_order(
    num_samples, max_concurrent, prefill_tokens, groups, order, sampling, fixed_shapes
):
    # Float64 where the last bits may differ, so that what remains below 1e-6 is no other than those.
    decoder = make_decoder() if fixed_shapes else make_decoder().double()
    samples, recording = make_samples(num_samples), Recording(num_samples=2, top_k=3)
    options = {"max_concurrent": max_concurrent, "fixed_shapes": fixed_shapes}
    expected = make_engine(decoder, **options).generate(samples, sampling, recording)
    shuffled = list(samples)
    order.shuffle(shuffled)
    engine, answers = make_engine(decoder, **options), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stream_module, "PREFILL_TOKENS", prefill_tokens)
        for size in (*groups, num_samples):
            group, shuffled = shuffled[:size], shuffled[size:]
            engine.submit(group, sampling, recording)
            answers += engine.step()
        answers += drain(engine)
    answers = by_number(answers)
    assert len(answers) == num_samples
    for one in expected:
        assert_equal(answers[one.sample.number], one, atol=0 if fixed_shapes else 1e-6)


def test_counts_follow_the_steps():
    engine = make_engine(make_decoder(), max_concurrent=3, stop_ids=())

    def counts():
        return engine.num_running, engine.num_waiting, engine.free_capacity

    assert counts() == (0, 0, 3)
    assert engine.step() == []
    engine.submit([], SAMPLING)
    assert counts() == (0, 0, 3)
    samples = make_samples(5)
    engine.submit(samples[:2], replace(SAMPLING, max_new_tokens=2))
    assert counts() == (0, 2, 1)
    assert engine.step() == []
    engine.submit(samples[2:], replace(SAMPLING, max_new_tokens=2))
    assert counts() == (2, 3, 0)
    assert sorted(answer.sample.number for answer in engine.step()) == [0, 1]
    assert counts() == (1, 2, 0)
    assert [answer.sample.number for answer in engine.step()] == [2]
    assert sorted(answer.sample.number for answer in engine.step()) == [3, 4]
    assert counts() == (0, 0, 3)


@pytest.mark.parametrize("fixed_shapes", [False, True])
def test_cancelled_samples_leave_no_trace(fixed_shapes):
    decoder, samples = make_decoder().double(), make_samples(9)
    expected = by_number(make_engine(decoder, fixed_shapes=fixed_shapes).generate(samples, SAMPLING))
    engine = make_engine(decoder, max_concurrent=4, fixed_shapes=fixed_shapes)
    engine.submit(samples, SAMPLING)
    answers = engine.step() + engine.step()
    running = engine.num_running
    ended = {answer.sample.number for answer in answers}
    gone = {0, 3, 8} - ended  # row 0 and row 3 at the ends, 8 still waits
    waiting = engine.num_waiting
    assert {sample.number for sample in engine.cancel([0, 3, 8, 77, *ended])} == gone
    assert engine.num_running + engine.num_waiting == running + waiting - len(gone)
    assert engine.cancel(gone) == []
    engine.submit([samples[0]], SAMPLING)  # its number is free again
    answers = by_number(answers + drain(engine))
    assert set(answers) == ({*range(9)} - gone) | {0}
    for number, answer in answers.items():
        assert_equal(answer, expected[number], atol=1e-6)
    engine.submit(samples[:2], SAMPLING)
    assert engine.cancel(range(9)) == samples[:2]
    assert engine.free_capacity == 4


def test_one_token_answers_make_room_at_once():
    engine = make_engine(make_decoder(), max_concurrent=2)
    engine.submit(make_samples(6), SamplingConfig(max_new_tokens=1))
    finished = [len(engine.step()) for _ in range(3)]
    assert finished == [2, 2, 2]
    assert engine.num_running == engine.num_waiting == 0
    stopping = make_engine(make_decoder(), max_concurrent=2, stop_ids=range(101))
    (one,) = stopping.generate(make_samples(1), SAMPLING)
    assert (len(one.response_ids), one.finish_reason) == (1, "stop")


def test_numbers_and_settings_of_what_runs_bind_what_joins():
    engine, samples = make_engine(make_decoder(), max_concurrent=1, stop_ids=()), make_samples(4)
    engine.submit(samples[:2], SAMPLING)
    engine.step()
    for taken in samples[:2]:  # one runs, one waits
        with pytest.raises(ValueError, match=rf"share the numbers \[{taken.number}\]"):
            engine.submit([samples[2], taken], SAMPLING)
    other = replace(SAMPLING, temperature=0.5)
    with pytest.raises(ValueError, match=r"2 samples run or wait under .* were submitted"):
        engine.submit([samples[2]], other)
    with pytest.raises(ValueError, match=r"2 samples run or wait under"):
        engine.submit([samples[2]], SAMPLING, Recording(num_samples=2))
    assert sorted(answer.sample.number for answer in drain(engine)) == [0, 1]  # nothing of the refused ones
    engine.submit([samples[2]], other)
    assert [answer.sampling for answer in drain(engine)] == [other]


def test_generate_leaves_what_was_submitted_alone():
    decoder, samples = make_decoder().double(), make_samples(5)
    engine = make_engine(decoder, max_concurrent=2)
    engine.submit(samples[:3], SAMPLING)
    answers = engine.step()
    greedy = SamplingConfig(temperature=0.0, max_new_tokens=5)
    between = engine.generate(samples, greedy)
    for one, other in zip(between, make_engine(decoder).generate(samples, greedy), strict=True):
        assert_equal(one, other, atol=1e-6)
    expected = by_number(make_engine(decoder).generate(samples[:3], SAMPLING))
    for answer in answers + drain(engine):
        assert_equal(answer, expected[answer.sample.number], atol=1e-6)


def test_an_error_in_a_step_drops_what_runs_and_waits():
    decoder, samples = make_decoder(), make_samples(6)
    engine = make_engine(decoder, max_concurrent=2, stop_ids=())
    engine.submit(samples, SAMPLING)
    engine.step()
    engine.load_weights({name: torch.full_like(x, torch.nan) for name, x in decoder.named_parameters()}, version=1)
    with pytest.raises(ValueError, match="the weights are damaged"):
        engine.step()
    assert (engine.num_running, engine.num_waiting, engine.step()) == (0, 0, [])
    engine.load_weights(dict(make_decoder(seed=2).named_parameters()), version=2)
    engine.submit(samples, SAMPLING)
    expected = by_number(make_engine(make_decoder(seed=2), stop_ids=()).generate(samples, SAMPLING))
    for answer in drain(engine):
        assert answer.response_ids.tolist() == expected[answer.sample.number].response_ids.tolist()


def live_bytes() -> int:
    """Memory of all tensors that Python knows of, each storage once."""
    gc.collect()
    tensors = [thing for thing in gc.get_objects() if type(thing) is torch.Tensor and thing.layout is torch.strided]
    storages = [tensor.untyped_storage() for tensor in tensors if tensor.device.type == "cpu"]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


@pytest.mark.parametrize("fixed_shapes", [False, True])
def test_memory_does_not_grow_over_a_thousand_joins_and_leaves(fixed_shapes):
    engine = make_engine(make_decoder(), max_concurrent=8, fixed_shapes=fixed_shapes)
    (sample,) = make_samples(1)
    sampling = SamplingConfig(max_new_tokens=2, top_k=4)
    submitted, cancelled, seen = 0, 0, []
    while submitted < 1000:
        size = engine.free_capacity + 1  # one waits
        engine.submit([replace(sample, number=submitted + i) for i in range(size)], sampling)
        submitted += size
        engine.step()
        cancelled += len(engine.cancel([submitted - 1, submitted - 7]))
        if submitted // 200 > len(seen):
            seen.append(live_bytes())
    assert len(seen) >= 4
    assert cancelled > 50
    assert max(seen[1:]) <= seen[0] + 2000  # what running answers hold of kept sets varies by a few hundred bytes
    drain(engine)
    cache = 2 * 2 * 8 * 2 * (16 + 2) * 8 * 4  # K and V, layers, rows, heads, positions, dimensions, float32
    assert live_bytes() < seen[0] - cache + 2000
