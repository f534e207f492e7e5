"""The engine that hands out the data's own responses."""

from __future__ import annotations

import pytest
import torch

from titan_opd.config.schema import SamplingConfig
from titan_opd.data.records import Prompt, Sample
from titan_opd.rollout import AnswersEngine, Recording

ONE = Sample(0, 0, 0, Prompt("one", torch.tensor([5, 6]), response_ids=torch.tensor([7, 8, 2])))
TWO = Sample(1, 0, 0, Prompt("two", torch.tensor([9]), response_ids=torch.tensor([2])))
WITHOUT = Sample(2, 0, 0, Prompt("without", torch.tensor([9])))


def test_responses_are_handed_out_at_the_current_version():
    engine = AnswersEngine()
    engine.load_weights([], version=4)
    answers = engine.generate([TWO, ONE], SamplingConfig())
    assert [answer.sample for answer in answers] == [TWO, ONE]
    assert [answer.response_ids.tolist() for answer in answers] == [[2], [7, 8, 2]]
    assert answers[1].policy_versions.tolist() == [4, 4, 4]
    assert answers[1].policy_versions.dtype == torch.int32
    for answer in answers:
        assert answer.finish_reason == "expert"
        assert answer.sampling is answer.behavior_logprobs is answer.sampled_ids is answer.topk_ids is None


def test_a_prompt_without_a_response_is_named():
    with pytest.raises(ValueError, match="prompt 'without' has no response"):
        AnswersEngine().generate([ONE, WITHOUT], SamplingConfig())


@pytest.mark.parametrize("recording", [Recording(num_samples=1), Recording(top_k=1)])
def test_nothing_of_a_student_can_be_recorded_without_one(recording):
    with pytest.raises(ValueError, match="without an engine that reads them"):
        AnswersEngine().generate([ONE], SamplingConfig(), recording)


def test_the_version_never_falls():
    engine = AnswersEngine()
    engine.load_weights([], version=2)
    engine.load_weights([], version=2)
    with pytest.raises(ValueError, match="version 1 offered to an engine at version 2"):
        engine.load_weights([], version=1)
