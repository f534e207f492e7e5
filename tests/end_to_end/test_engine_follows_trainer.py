"""After each weight update the engine writes with exactly the weights that are trained."""

from __future__ import annotations

import pytest
import torch
import transformers

from tests.helpers.arithmetic import VOCAB_SIZE, make_decoder
from titan_opd.config import Objective, SamplingConfig
from titan_opd.config.schema import ArithmeticConfig, OptimizerConfig, RolloutConfig, TrainingConfig
from titan_opd.data import Sample, pack
from titan_opd.data.arithmetic import arithmetic_prompts
from titan_opd.learner import DistillationModel, Learner
from titan_opd.models import Decoder, save_checkpoint_files
from titan_opd.parallel import open_world, parallelize, reshard
from titan_opd.rollout import NativeEngine, Recording
from titan_opd.teacher import LabelScorer, NativeScorer, TeacherModel
from titan_opd.weights import named_weights

STOP_IDS = (1, 5)
SAMPLES = [
    Sample(i, 0, 0, prompt)
    for i, prompt in enumerate(arithmetic_prompts(ArithmeticConfig(num_train=20, num_eval=1))[0])
]


@pytest.fixture(scope="module")
def world():
    with open_world() as world:
        yield world


class Loop:
    """A student under FSDP, its learner, a teacher, and the engine that writes: a run in miniature."""

    def __init__(self, family, objective, world):
        self.student = make_decoder(family, seed=0)
        writer = Decoder(self.student.config)
        writer.load_state_dict(self.student.state_dict())
        self.engine = NativeEngine(
            writer.requires_grad_(False),
            config=RolloutConfig(max_concurrent=6),
            stop_ids=STOP_IDS,
            vocab_size=VOCAB_SIZE,
            max_prompt_tokens=16,
            seed=0,
        )
        self.model = DistillationModel(self.student, vocab_size=VOCAB_SIZE, logits_chunk_mb=1.0)
        parallelize(self.model, self.student, world.mesh, TrainingConfig(steps=1))
        optimizer = OptimizerConfig(learning_rate=2e-2, decay="constant")
        self.learner = Learner(self.model, objective, optimizer, num_steps=9, seed=0, world=world)
        self.scorer = NativeScorer(
            TeacherModel(make_decoder("qwen3", seed=1)),
            objective,
            vocab_size=VOCAB_SIZE,
            top_k=5,
            tokens_per_forward=500,
            logits_chunk_mb=1.0,
        )

    def step(self, sampling):
        """Write, score, train, update the engine: the metrics."""
        trajectories = self.engine.generate(SAMPLES, sampling, Recording(top_k=5))
        version = self.engine.policy_version
        metrics = self.learner.step(pack(self.scorer.score(trajectories), 100), current_version=version)
        self.engine.load_weights(named_weights(self.student), version + 1)
        return metrics

    @torch.no_grad()
    def trainers_logprobs(self, trajectories, temperature):
        """The present student's log-probability of each response token, answer after answer."""
        (batch,) = pack(LabelScorer().score(trajectories), 10_000)
        objective = Objective(kind="cross_entropy", temperature=temperature)
        values = self.model(batch, objective, num_tokens=1, current_version=self.engine.policy_version).per_token
        reshard(self.model)
        return -values


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_what_the_engine_says_is_what_the_trainer_recomputes(world, family, temperature):
    sampling = SamplingConfig(temperature=temperature, max_new_tokens=16)
    loop = Loop(family, Objective(kind="reverse_kl", temperature=temperature), world)
    seen = []
    for version in range(4):
        trajectories = loop.engine.generate(SAMPLES, sampling)
        assert {int(v) for trajectory in trajectories for v in trajectory.policy_versions} == {version}
        written = torch.cat([trajectory.behavior_logprobs for trajectory in trajectories])
        torch.testing.assert_close(written, loop.trainers_logprobs(trajectories, temperature), atol=1e-4, rtol=0)
        seen.append(written.mean())
        loop.step(sampling)
    assert len(set(seen)) == 4, "the policy should have changed with each update"


def test_the_ratio_of_fresh_samples_is_one_after_every_update(world):
    loop = Loop("qwen3", Objective(kind="policy_gradient"), world)
    for _ in range(4):
        metrics = loop.step(SamplingConfig(max_new_tokens=16))
        assert metrics["importance_ratio"] == pytest.approx(1, abs=1e-4)
        assert metrics["importance_ratio_max"] == pytest.approx(1, abs=1e-3)
        assert metrics["grad_norm"] > 0


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_greedy_answers_are_those_of_transformers_on_the_exported_weights(world, family, tmp_path):
    loop = Loop(family, Objective(kind="forward_kl"), world)
    for _ in range(3):
        loop.step(SamplingConfig(max_new_tokens=16))
    save_checkpoint_files(named_weights(loop.student), loop.student.config, tmp_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    answers = loop.engine.generate(SAMPLES, SamplingConfig(temperature=0.0, max_new_tokens=16))
    for answer in answers:
        prompt = answer.prompt.token_ids
        # Rows of the vocabulary that are no token are never written.
        text = model.generate(
            prompt[None],
            max_new_tokens=16,
            do_sample=False,
            eos_token_id=list(STOP_IDS),
            suppress_tokens=list(range(VOCAB_SIZE, model.config.vocab_size)),
        )[0]
        assert answer.response_ids.tolist() == text[len(prompt) :].tolist()
    assert len({tuple(answer.response_ids.tolist()) for answer in answers}) > 3
