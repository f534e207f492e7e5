"""With `fixed_shapes` an answer is the same to the bit, whatever joins or leaves beside it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engines.test_streaming import assert_equal, by_number, drain
from tests.engines.writing import VOCAB_SIZE, make_decoder, make_engine, make_samples
from titan_opd.config.schema import SamplingConfig
from titan_opd.data.records import Trajectory
from titan_opd.rollout import Recording
from titan_opd.rollout import sampler as sampler_module

RECORDED = Recording(num_samples=3, top_k=5)
# Of these a row's bits depend on its place in the batch, where places are not pinned.
CONCURRENT = st.sampled_from([1, 3, 5, 7])


@settings(max_examples=20, deadline=None)
@given(
    num_samples=st.integers(1, 12),
    max_concurrent=CONCURRENT,
    sampling=st.sampled_from(
        [
            SamplingConfig(max_new_tokens=11),
            SamplingConfig(max_new_tokens=11, top_p=0.8, temperature=1.3),
            SamplingConfig(max_new_tokens=11, top_k=9),
            SamplingConfig(max_new_tokens=11, temperature=0.0),
        ]
    ),
    groups=st.lists(st.integers(0, 4), min_size=12, max_size=12),
    order=st.randoms(use_true_random=False),
    cancelled=st.sets(st.integers(0, 11), max_size=4),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_answers_equal_those_written_alone_to_the_bit(
    num_samples, max_concurrent, sampling, groups, order, cancelled, dtype
):
    decoder, samples = make_decoder().to(dtype), make_samples(num_samples)
    recording = replace(RECORDED, top_k=RECORDED.top_k if sampling.temperature else 0)
    options = {"max_concurrent": max_concurrent, "fixed_shapes": True}
    alone = [make_engine(decoder, **options).generate([sample], sampling, recording)[0] for sample in samples]
    order.shuffle(samples)
    engine, answers = make_engine(decoder, **options), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampler_module, "_FIRST_WINDOW", 4)  # widened for some rows and not for others, were it used
        for i, size in enumerate(groups):
            group, samples = samples[:size], samples[size:]
            engine.submit(group, sampling, recording)
            answers += engine.step()
            if i == 4:
                cancelled = {sample.number for sample in engine.cancel(cancelled)}
        engine.submit(samples, sampling, recording)
        answers += drain(engine)
    answers = by_number(answers)
    assert set(answers) >= {*range(num_samples)} - cancelled
    for number, answer in answers.items():
        assert_equal(answer, alone[number], atol=0)


def test_bits_depend_on_the_company_otherwise():
    """What the option is for: without it, the promise of the test above does not hold."""
    decoder, samples, sampling = make_decoder(), make_samples(12), SamplingConfig(max_new_tokens=11)
    together = make_engine(decoder, max_concurrent=5).generate(samples, sampling)
    alone = [make_engine(decoder, max_concurrent=5).generate([sample], sampling)[0] for sample in samples]
    equal = [
        torch.equal(one.behavior_logprobs, other.behavior_logprobs) for one, other in zip(together, alone, strict=True)
    ]
    assert not all(equal)


@pytest.mark.parametrize("fixed_shapes", [False, True])
def test_the_number_of_candidates_of_top_p_is_fixed(fixed_shapes, monkeypatch):
    """Otherwise it starts small, and the flattest row of a batch decides for all rows how far it is widened."""
    seen, truncate = set(), sampler_module.truncate

    def spy(*arguments, **options):
        logits_RC, ids_RC = truncate(*arguments, **options)
        seen.add(ids_RC.shape[1])
        return logits_RC, ids_RC

    monkeypatch.setattr(sampler_module, "truncate", spy)
    monkeypatch.setattr(sampler_module, "_FIRST_WINDOW", 4)
    engine = make_engine(make_decoder(), max_concurrent=2, fixed_shapes=fixed_shapes)
    engine.generate(make_samples(6), SamplingConfig(max_new_tokens=11, top_p=0.01))
    assert seen == ({VOCAB_SIZE} if fixed_shapes else {4})


@pytest.mark.parametrize("recompute_kv", [True, False])
def test_updates_in_flight_keep_the_promise(recompute_kv):
    """The same versions at the same tokens: the same bits, with other sequences around and without."""
    policies = [make_decoder(seed=seed) for seed in range(3)]
    samples, sampling = make_samples(10), SamplingConfig(max_new_tokens=9)
    (watched,) = [sample for sample in samples if sample.number == 4]
    written = []
    for company in ([], samples[:4], samples[5:]):
        engine = make_engine(
            make_decoder(), max_concurrent=5, stop_ids=(), fixed_shapes=True, recompute_kv=recompute_kv
        )
        engine.submit([watched, *company], sampling)
        answers = []
        for step in range(9):
            if step in (2, 5):
                version = engine.policy_version + 1
                engine.load_weights(dict(policies[version].named_parameters()), version)
            answers += engine.step()
        written.append(by_number(answers)[4])
    for answer in written[1:]:
        assert_equal(answer, written[0], atol=0)
    assert written[0].policy_versions.tolist() == [0] * 2 + [1] * 3 + [2] * 4


@pytest.mark.parametrize("sampling", [SamplingConfig(), SamplingConfig(top_p=0.8)], ids=["plain", "top_p"])
def test_reading_does_not_depend_on_what_is_read_beside(sampling):
    engine = make_engine(make_decoder(), max_concurrent=5, fixed_shapes=True)
    generator = torch.Generator().manual_seed(0)
    texts = [torch.randint(VOCAB_SIZE, (1 + i % 6,), generator=generator) for i in range(8)]
    answers = [
        Trajectory(sample, text, torch.zeros(len(text), dtype=torch.int32), "expert")
        for sample, text in zip(make_samples(8), texts, strict=True)
    ]
    together = engine.read(answers, sampling, RECORDED)
    for answer, one in zip(answers, together, strict=True):
        assert_equal(engine.read([answer], sampling, RECORDED)[0], one, atol=0)
    for one, other in zip(engine.read(answers[::-1], sampling, RECORDED)[::-1], together, strict=True):
        assert_equal(one, other, atol=0)
