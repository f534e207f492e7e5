from __future__ import annotations

import dataclasses

import pytest
import torch

from titan_opd.config.schema import ArithmeticConfig, RolloutConfig, SamplingConfig
from titan_opd.data import Trajectory, load_tokenizer
from titan_opd.data.arithmetic import arithmetic_prompts
from titan_opd.evaluation import evaluate, grade_exact
from titan_opd.models import Decoder, DecoderConfig
from titan_opd.rollout import AnswersEngine, NativeEngine

TOKENIZER = load_tokenizer("arithmetic")
_, PROMPTS = arithmetic_prompts(ArithmeticConfig(num_train=1, num_eval=4))
GREEDY = SamplingConfig(temperature=0.0, max_new_tokens=12)


class Scripted:
    """An engine that writes given texts; one without a stop token was cut at the limit."""

    policy_version = 0

    def __init__(self, texts):
        self.texts = texts

    def generate(self, samples, sampling):
        return [self.write(sample, text) for sample, text in zip(samples, self.texts, strict=True)]

    def write(self, sample, text):
        ids = torch.tensor(TOKENIZER.encode(text))
        reason = "stop" if text.endswith("<eos>") else "length"
        return Trajectory(sample, ids, torch.zeros(len(ids), dtype=torch.int32), finish_reason=reason)


def test_accuracy_length_and_finished_share():
    right, _, cut, _ = (prompt.answer for prompt in PROMPTS)
    engine = Scripted([f"0+2=2c0;#{right}<eos>", "#1<eos>", f"#{cut}", "2+2"])
    result = evaluate(engine, PROMPTS, GREEDY, grade_exact, TOKENIZER)
    assert [answer.correct for answer in result.answers] == [True, False, True, False]
    assert [answer.text for answer in result.answers][:2] == [f"0+2=2c0;#{right}", "#1"]
    assert [answer.trajectory.prompt for answer in result.answers] == PROMPTS
    lengths = [len(answer.trajectory.response_ids) for answer in result.answers]
    assert result.metrics() == {"accuracy": 0.5, "mean_length": sum(lengths) / 4, "finished_share": 0.5}


def test_the_experts_own_responses_are_all_right():
    result = evaluate(AnswersEngine(), PROMPTS, GREEDY, grade_exact, TOKENIZER)
    assert result.accuracy == 1


def test_a_real_engine_answers_the_same_twice():
    config = DecoderConfig.from_dict(
        {
            "model_type": "llama",
            "vocab_size": 17,
            "hidden_size": 16,
            "intermediate_size": 32,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "max_position_embeddings": 64,
            "tie_word_embeddings": True,
            "eos_token_id": 1,
        }
    )
    decoder = Decoder(config)
    decoder.init_weights(torch.Generator().manual_seed(0))
    engine = NativeEngine(decoder, config=RolloutConfig(), stop_ids=(1,), vocab_size=17, max_prompt_tokens=16, seed=0)
    sampled = dataclasses.replace(GREEDY, temperature=1.0)
    first, second = (evaluate(engine, PROMPTS, sampled, grade_exact, TOKENIZER) for _ in range(2))
    assert [answer.text for answer in first.answers] == [answer.text for answer in second.answers]
    assert 1 <= first.mean_length <= 12


def test_what_cannot_be_graded_is_refused():
    with pytest.raises(ValueError, match=r"no evaluation prompts; set data.evaluation"):
        evaluate(AnswersEngine(), [], GREEDY, grade_exact, TOKENIZER)
    unanswered = dataclasses.replace(PROMPTS[1], answer=None)
    with pytest.raises(ValueError, match=r"'arithmetic-eval:1' has no reference answer .* data.answer_field"):
        evaluate(AnswersEngine(), [PROMPTS[0], unanswered], GREEDY, grade_exact, TOKENIZER)
