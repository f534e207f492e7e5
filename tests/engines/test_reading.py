"""Reading answers: the policy says of a text what it says while writing it, whoever wrote the text."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from tests.engines.writing import STOP_IDS, make_decoder, make_engine, make_samples, recomputed_logits
from titan_opd.config.schema import SamplingConfig
from titan_opd.data.records import Trajectory
from titan_opd.rollout import AnswersEngine, Recording, reading

RECORDED = Recording(num_samples=4, top_k=6)
SETTINGS = {
    "plain": SamplingConfig(max_new_tokens=20),
    "cold": SamplingConfig(temperature=0.7, max_new_tokens=20),
    "truncated": SamplingConfig(temperature=1.2, top_p=0.8, max_new_tokens=20),
}


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("tokens", [reading.READ_TOKENS, 40])
def test_its_own_answers_read_as_they_were_written(name, tokens, monkeypatch):
    """The same log-probabilities, the same kept sets, the same draws beside each token; in one pass or in several."""
    monkeypatch.setattr(reading, "READ_TOKENS", tokens)
    engine = make_engine(make_decoder(), max_concurrent=7, vocab_size=97, stop_ids=STOP_IDS[1:])
    written = engine.generate(make_samples(9, vocab_size=97), SETTINGS[name], RECORDED)
    bare = [Trajectory(one.sample, one.response_ids, one.policy_versions, "expert") for one in written]
    for one, expected in zip(engine.read(bare, SETTINGS[name], RECORDED), written, strict=True):
        assert one.sample is expected.sample
        assert one.finish_reason == "expert"
        for field in ("response_ids", "sampled_ids", "topk_ids", "policy_versions"):
            assert torch.equal(getattr(one, field), getattr(expected, field)), field
        for field in ("behavior_logprobs", "sampled_logprobs", "topk_logprobs"):
            torch.testing.assert_close(getattr(one, field), getattr(expected, field), atol=1e-4, rtol=0)
        if name == "truncated":
            assert kept_sets(one) == kept_sets(expected)
        else:
            assert one.behavior_support is None


def kept_sets(answer):
    return [set(row) - {-1} for row in answer.behavior_support.tolist()]


def make_experts(num_samples):
    """Answers of tokens that the policy of `make_decoder()` would write, and of others."""
    engine = make_engine(make_decoder(), vocab_size=97, stop_ids=STOP_IDS[1:])
    written = engine.generate(make_samples(num_samples, vocab_size=97), SamplingConfig(max_new_tokens=12))
    return [
        replace(one.sample, prompt=replace(one.prompt, response_ids=one.response_ids.roll(number % 2)))
        for number, one in enumerate(written)
    ]


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_an_experts_tokens_have_the_students_logprobs(temperature):
    """Where the student could not have drawn a token, at temperature 0 or outside the kept set, -inf."""
    decoder = make_decoder()
    engine = AnswersEngine(make_engine(decoder, vocab_size=97, stop_ids=STOP_IDS[1:]))
    sampling = SamplingConfig(temperature=temperature, top_k=5)
    answers = engine.generate(make_experts(6), sampling, Recording(num_samples=2))
    finite = []
    for answer, logits in zip(answers, recomputed_logits(decoder, answers), strict=True):
        assert torch.equal(answer.sampled_ids[:, 0], answer.response_ids)
        assert torch.equal(answer.sampled_logprobs[:, 0], answer.behavior_logprobs)
        kept = logits[:, :97].topk(5 if temperature else 1)
        logprobs = torch.full((len(logits), 97), -math.inf)
        logprobs.scatter_(1, kept.indices, (kept.values / (temperature or 1)).log_softmax(-1))
        expected = logprobs.gather(1, answer.sampled_ids)
        torch.testing.assert_close(answer.sampled_logprobs, expected, atol=1e-4, rtol=0)
        assert expected[:, 1].isfinite().all()
        finite += expected[:, 0].isfinite().tolist()
    assert any(finite)
    assert not all(finite)


def test_the_students_samples_do_not_depend_on_what_is_read_beside():
    engine = AnswersEngine(make_engine(make_decoder(), max_concurrent=3))
    samples = make_experts(5)
    together = engine.generate(samples, SamplingConfig(), Recording(num_samples=2))
    for sample, answer in zip(samples, together, strict=True):
        (alone,) = engine.generate([sample], SamplingConfig(), Recording(num_samples=2))
        assert torch.equal(alone.sampled_ids, answer.sampled_ids)
    drawn = torch.cat([answer.sampled_ids[:, 1] for answer in together])
    assert len(drawn.unique()) > 5


def test_the_reader_reads_with_the_weights_it_was_given():
    engine = AnswersEngine(make_engine(make_decoder(seed=0)))
    samples = make_experts(3)
    before = engine.generate(samples, SamplingConfig(), Recording(num_samples=2))
    engine.load_weights(make_decoder(seed=1).named_parameters(), version=1)
    after = engine.generate(samples, SamplingConfig(), Recording(num_samples=2))
    expected = recomputed_logits(make_decoder(seed=1), after)
    for answer, old, logits in zip(after, before, expected, strict=True):
        assert answer.policy_versions.tolist() == [1] * len(answer.response_ids)
        logprobs = logits.log_softmax(-1).gather(1, answer.response_ids[:, None]).squeeze(1)
        torch.testing.assert_close(answer.behavior_logprobs, logprobs, atol=1e-4, rtol=0)
        assert not torch.allclose(old.behavior_logprobs, logprobs, atol=1e-2)


def test_half_an_update_is_not_read_with():
    engine = AnswersEngine(make_engine(make_decoder()))
    with pytest.raises(ValueError, match="lack"):
        engine.load_weights(iter(list(make_decoder().named_parameters())[:-1]), version=1)
    assert engine.policy_version == 0
    with pytest.raises(ValueError, match="incomplete weight update"):
        engine.generate(make_experts(2), SamplingConfig(), Recording(num_samples=2))
