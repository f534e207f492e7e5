"""What the native engine writes and records, held against transformers and against the training pass."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engines.writing import STOP_IDS, VOCAB_SIZE, make_decoder, make_engine, make_samples, recomputed_logits
from tests.helpers.tiny_models import make_tiny_checkpoint, make_tiny_model
from titan_opd.config.schema import SamplingConfig
from titan_opd.data.records import Prompt, Sample
from titan_opd.models import load_decoder
from titan_opd.rollout import Recording, stream


def texts(answers) -> list[list[int]]:
    return [answer.response_ids.tolist() for answer in answers]


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_greedy_equals_transformers(tmp_path, family, tied):
    path = make_tiny_checkpoint(tmp_path, family, tie_word_embeddings=tied)
    reference = make_tiny_model(family, tie_word_embeddings=tied)
    samples = make_samples(10)
    engine = make_engine(load_decoder(path), max_concurrent=3)
    answers = engine.generate(samples, SamplingConfig(temperature=0.0, max_new_tokens=20))
    for sample, answer in zip(samples, answers, strict=True):
        prompt = sample.prompt.token_ids
        text = reference.generate(prompt[None], max_new_tokens=20, do_sample=False, eos_token_id=list(STOP_IDS))[0]
        assert answer.sample is sample
        assert answer.response_ids.tolist() == text[len(prompt) :].tolist()
        assert answer.finish_reason == ("stop" if text[-1] in STOP_IDS else "length")
        assert answer.behavior_logprobs.tolist() == [0.0] * len(answer.response_ids)
    assert {answer.finish_reason for answer in answers} == {"stop", "length"}


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingConfig(max_new_tokens=24),
        SamplingConfig(temperature=0.7, top_p=0.9, top_k=5, max_new_tokens=24),
        SamplingConfig(temperature=1.3, top_p=0.8, max_new_tokens=24),
    ],
    ids=["plain", "temperature top_k top_p", "top_p"],
)
def test_records_equal_the_training_pass(sampling):
    decoder = make_decoder()
    engine = make_engine(decoder, max_concurrent=4, vocab_size=97, stop_ids=STOP_IDS[1:])
    engine.load_weights([(name, value.clone()) for name, value in decoder.named_parameters()], version=3)
    answers = engine.generate(make_samples(11, vocab_size=97), sampling, Recording(num_samples=6, top_k=9))
    assert {answer.finish_reason for answer in answers} == {"stop", "length"}
    for answer, logits in zip(answers, recomputed_logits(decoder, answers), strict=True):
        num_tokens = len(answer.response_ids)
        scaled = logits[:, :97] / sampling.temperature
        whole = scaled.log_softmax(dim=-1)
        if sampling.truncated:
            kept = torch.zeros(num_tokens, 98, dtype=torch.bool).scatter_(1, answer.behavior_support % 98, True)
            scaled = scaled.masked_fill(~kept[:, :97], -math.inf)  # -1 % 98 = 97, the column that is cut off here
        else:
            assert answer.behavior_support is None
        behavior = scaled.log_softmax(dim=-1)

        def at(logprobs, ids):
            return logprobs.gather(1, ids.view(len(ids), -1)).view(ids.shape)

        close = {"atol": 1e-4, "rtol": 0}
        torch.testing.assert_close(answer.behavior_logprobs, at(behavior, answer.response_ids), **close)
        torch.testing.assert_close(answer.sampled_logprobs, at(behavior, answer.sampled_ids), **close)
        torch.testing.assert_close(answer.topk_logprobs, at(whole, answer.topk_ids), **close)
        torch.testing.assert_close(answer.topk_logprobs, whole.topk(9).values, **close)
        assert torch.equal(answer.sampled_ids[:, 0], answer.response_ids)
        assert torch.equal(answer.sampled_logprobs[:, 0], answer.behavior_logprobs)
        assert answer.policy_versions.tolist() == [3] * num_tokens
        assert answer.policy_versions.dtype == torch.int32
        assert answer.response_ids.dtype == torch.int64
        assert answer.behavior_logprobs.dtype == torch.float32
        assert answer.sampling is sampling
        assert not answer.behavior_logprobs.requires_grad
        # The loss multiplies records with what needs a gradient, which tensors of inference mode would refuse.
        (torch.ones(num_tokens, requires_grad=True) * answer.behavior_logprobs).sum().backward()


def test_nothing_is_recorded_unasked():
    (answer,) = make_engine(make_decoder()).generate(make_samples(1), SamplingConfig(max_new_tokens=3))
    assert answer.behavior_support is answer.sampled_ids is answer.topk_ids is None


@settings(max_examples=25, deadline=None)
@given(
    num_samples=st.integers(1, 9),
    max_concurrent=st.integers(1, 9),
    prefill_tokens=st.integers(1, 40),
    order=st.randoms(use_true_random=False),
    max_new_tokens=st.integers(1, 12),
    seed=st.integers(0, 2**40),
    sampling=st.sampled_from(
        [SamplingConfig(), SamplingConfig(temperature=0.8, top_k=7), SamplingConfig(top_p=0.7, temperature=1.2)]
    ),
)
def test_an_answer_does_not_depend_on_its_company(
    num_samples, max_concurrent, prefill_tokens, order, max_new_tokens, seed, sampling
):
    decoder, samples = make_decoder(), make_samples(num_samples, seed=seed)
    sampling = dataclasses.replace(sampling, max_new_tokens=max_new_tokens)
    alone = [make_engine(decoder, seed=seed).generate([sample], sampling)[0] for sample in samples]
    order.shuffle(samples)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stream, "PREFILL_TOKENS", prefill_tokens)
        together = make_engine(decoder, max_concurrent=max_concurrent, seed=seed).generate(samples, sampling)
    assert [answer.sample.number for answer in together] == [sample.number for sample in samples]
    for answer in together:
        expected = alone[answer.sample.number]
        assert answer.response_ids.tolist() == expected.response_ids.tolist()
        assert answer.finish_reason == expected.finish_reason
        torch.testing.assert_close(answer.behavior_logprobs, expected.behavior_logprobs, atol=1e-4, rtol=0)
        if sampling.truncated:
            assert answer.behavior_support.tolist() == expected.behavior_support.tolist()


def test_prompts_join_in_groups_within_the_token_budget(monkeypatch):
    decoder = make_decoder()
    seen = []
    forward = decoder.forward
    monkeypatch.setattr(decoder, "forward", lambda ids, *rest: seen.append(len(ids)) or forward(ids, *rest))
    monkeypatch.setattr(stream, "PREFILL_TOKENS", 10)
    prompts = [Prompt(str(length), torch.ones(length, dtype=torch.int64)) for length in (4, 6, 1, 12, 3)]
    samples = [Sample(number, 0, 0, prompt) for number, prompt in enumerate(prompts)]
    make_engine(decoder, max_concurrent=5, stop_ids=()).generate(samples, SamplingConfig(max_new_tokens=4))
    # 4 + 6; then those two decode while 1 joins, 12 alone (above the budget), 3; then what is left decodes.
    assert seen == [10, 2 + 1, 3 + 12, 4 + 3, 3, 2, 1]


def test_seeds_and_sample_numbers_name_different_answers():
    decoder, sampling = make_decoder(), SamplingConfig(max_new_tokens=16)
    prompt = make_samples(1)[0].prompt
    samples = [Sample(number, 0, number, prompt) for number in range(6)]
    answers = texts(make_engine(decoder, stop_ids=()).generate(samples, sampling))
    assert len({tuple(answer) for answer in answers}) == len(samples)
    assert texts(make_engine(decoder, stop_ids=()).generate(samples, sampling)) == answers
    others = texts(make_engine(decoder, stop_ids=(), seed=1).generate(samples, sampling))
    assert all(answer != other for answer, other in zip(answers, others, strict=True))


def test_rows_above_the_tokenizer_are_never_written():
    decoder = make_decoder()
    samples = make_samples(8, vocab_size=60)
    whole, limited = SamplingConfig(max_new_tokens=30), Recording(num_samples=4, top_k=64)
    assert max(max(text) for text in texts(make_engine(decoder).generate(samples, whole))) >= 60
    engine = make_engine(decoder, vocab_size=60, stop_ids=())
    for sampling in (whole, SamplingConfig(max_new_tokens=30, top_p=0.99)):
        for answer in engine.generate(samples, sampling, limited):
            assert answer.sampled_ids.max() < 60
            assert answer.topk_ids.shape == (30, 60)
            assert answer.topk_ids.max() < 60
    (greedy, *_) = engine.generate(samples, SamplingConfig(temperature=0.0, max_new_tokens=30))
    assert greedy.response_ids.max() < 60


def test_stop_ids_of_the_sampling_join_the_engines_own():
    decoder, samples = make_decoder(), make_samples(3)
    (free, *_) = make_engine(decoder, stop_ids=()).generate(samples, SamplingConfig(max_new_tokens=20))
    text = free.response_ids.tolist()
    assert (free.finish_reason, len(text)) == ("length", 20)
    own, asked = text[9], text[5]
    assert own not in text[:9]
    assert asked not in text[:5]
    engine = make_engine(decoder, stop_ids=(own,))
    (stopped, *_) = engine.generate(samples, SamplingConfig(max_new_tokens=20))
    assert (stopped.finish_reason, stopped.response_ids.tolist()) == ("stop", text[:10])
    (stopped, *_) = engine.generate(samples, SamplingConfig(max_new_tokens=20, stop_ids=(asked,)))
    assert (stopped.finish_reason, stopped.response_ids.tolist()) == ("stop", text[:6])
    (stopped, *_) = engine.generate(samples, SamplingConfig(max_new_tokens=10))  # a stop token as the last allowed
    assert (stopped.finish_reason, stopped.response_ids.tolist()) == ("stop", text[:10])


def test_calls_of_different_sizes_follow_each_other():
    decoder = make_decoder()
    engine = make_engine(decoder, max_concurrent=4)
    for num_samples, max_new_tokens in [(2, 5), (7, 20), (1, 3)]:
        samples = make_samples(num_samples)
        sampling = SamplingConfig(max_new_tokens=max_new_tokens)
        answers = engine.generate(samples, sampling)
        assert texts(answers) == texts(make_engine(decoder).generate(samples, sampling))
    assert engine.generate([], SamplingConfig()) == []


SHORT = SamplingConfig(max_new_tokens=4)


def prompt_of(length: int, token: int = 1) -> Sample:
    return Sample(0, 0, 0, Prompt("the-prompt", torch.full((length,), token)))


@pytest.mark.parametrize(
    ("sample", "sampling", "message"),
    [
        (prompt_of(0), SHORT, r"'the-prompt' has no tokens"),
        (prompt_of(17), SHORT, r"'the-prompt' has 17 tokens, data\.max_prompt_tokens = 16"),
        (
            prompt_of(9),
            SamplingConfig(max_new_tokens=120),
            r"'the-prompt' has 9 tokens .*max_new_tokens = 120.*context of 128",
        ),
        (prompt_of(3, token=VOCAB_SIZE), SHORT, r"'the-prompt' holds token 101, outside .* 101 tokens"),
        (prompt_of(3, token=-1), SHORT, r"'the-prompt' holds token -1"),
        (prompt_of(3), SamplingConfig(stop_ids=(5, 400)), r"stop ids \[400\] are not among the tokenizer's 101"),
    ],
    ids=["empty", "too long", "beyond the context", "foreign token", "negative token", "foreign stop id"],
)
def test_what_cannot_be_answered_is_refused(sample, sampling, message):
    with pytest.raises(ValueError, match=message):
        make_engine(make_decoder()).generate([sample], sampling)


def test_longest_prompt_and_context_are_allowed():
    (answer,) = make_engine(make_decoder(), stop_ids=()).generate(
        [prompt_of(16)], SamplingConfig(max_new_tokens=128 - 16)
    )
    assert len(answer.response_ids) == 112


def test_equal_sample_numbers_are_refused():
    samples = make_samples(3)
    with pytest.raises(ValueError, match=r"share the numbers \[1\]"):
        make_engine(make_decoder()).generate([*samples, samples[1]], SHORT)


def test_constructor_refuses_a_tokenizer_that_does_not_fit():
    with pytest.raises(ValueError, match="tokenizer has 102 tokens and the model's embedding 101 rows"):
        make_engine(make_decoder(), vocab_size=102)
    with pytest.raises(ValueError, match=r"stop ids \[96\] are not among the tokenizer's 90 tokens"):
        make_engine(make_decoder(), vocab_size=90)
