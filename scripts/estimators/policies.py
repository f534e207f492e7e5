"""A student that is trained for some steps, and the policies that it was on the way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from titan_opd.assemble import Parts, assemble
from titan_opd.config import Config
from titan_opd.data import PackedBatch, Sample, ScoredTrajectory, Trajectory, pack
from titan_opd.data.packing import pack_microbatch
from titan_opd.learner import Learner
from titan_opd.losses import TeacherScores
from titan_opd.models import Decoder
from titan_opd.observe import PhaseClock
from titan_opd.parallel import World
from titan_opd.rollout import NativeEngine, Recording
from titan_opd.schedule import SyncSchedule
from titan_opd.weights import named_weights

STALENESS = (0, 1, 4, 16)  # optimizer steps between the policy that wrote and the current one
MAX_VOCABULARY = 512  # the study goes through the vocabulary, a loss for each token


@dataclass(frozen=True)
class PolicyChain:
    """The current student, its older selves and its teacher, float64 until `to` is called.

    Attributes:
        policies: by staleness.
        version: of the current policy, in optimizer steps.
        teacher: what they are compared with.
        parts: the training run that they come from; its stream of prompts goes on.
        config: its settings.
    """

    policies: dict[int, Decoder]
    version: int
    teacher: Decoder
    parts: Parts
    config: Config

    @property
    def current(self) -> Decoder:
        return self.policies[0]

    @property
    def vocab_size(self) -> int:
        return self.parts.model.vocab_size

    def to(self, dtype: torch.dtype) -> None:
        """Compute in another type from here on; the weights, which are float32 numbers, stay as they are."""
        for decoder in (*self.policies.values(), self.teacher):
            decoder.to(dtype)

    def write(self, staleness: int, samples: Sequence[Sample], recording: Recording) -> list[Trajectory]:
        """Answers of one of the policies, written as in training.

        All policies draw the same noise for the same sample, so that their answers differ only as far as they do.
        """
        policy = self.policies[staleness]
        engine = NativeEngine(
            Decoder(policy.config).requires_grad_(False),
            config=self.config.rollout,
            stop_ids=self.parts.common.stop_ids,
            vocab_size=self.vocab_size,
            max_prompt_tokens=self.config.data.max_prompt_tokens,
            seed=self.config.run.seed,
        )
        engine.load_weights(named_weights(policy), self.version - staleness)
        return engine.generate(samples, self.config.rollout.sampling, recording)


def train_chain(config: Config, world: World) -> PolicyChain:
    """Take the configuration's warm-up and then as many steps as the stalest policy is behind, one step a batch.

    The warm-up comes first because AdamW's first steps, without moments, are no example of a step.

    Raises:
        ValueError: settings under which the vocabulary cannot be gone through, or the steps do not fit into the run.
    """
    last = config.optimizer.warmup_steps + max(STALENESS)
    _check(config, last)
    parts = assemble(config, world)
    if parts.model.vocab_size > MAX_VOCABULARY:
        raise ValueError(
            f"the tokenizer has {parts.model.vocab_size} tokens; expectations go through the whole vocabulary, token "
            f"by token, which is meant for at most {MAX_VOCABULARY}: choose models of a small task"
        )
    learner = Learner(
        parts.model,
        config.objective,
        config.optimizer,
        num_steps=config.training.steps,
        seed=config.run.seed,
        world=world,
    )
    schedule = SyncSchedule(
        parts.prompts,
        parts.engine,
        parts.scorer,
        recording=parts.recording,
        schedule=config.schedule,
        rollout=config.rollout,
        deliver=lambda version: parts.engine.load_weights(named_weights(parts.student), version),
        clock=PhaseClock(),
        world=world,
    )
    policies = {}
    for version in range(last + 1):
        if last - version in STALENESS:
            policies[last - version] = _copy(parts.student)
        if version < last:
            batches = pack(schedule.next_batch(version), config.training.tokens_per_microbatch)
            learner.step(learner.with_proximal_policy(batches), current_version=version)
            schedule.publish(version + 1)
    assert parts.teacher is not None
    return PolicyChain(policies, last, _copy(parts.teacher.decoder).requires_grad_(False), parts, config)


def without_scores(trajectories: Sequence[Trajectory]) -> PackedBatch:
    """All answers in one packed batch, for a forward pass."""
    return pack_microbatch([ScoredTrajectory(trajectory, TeacherScores()) for trajectory in trajectories])


def _check(config: Config, last: int) -> None:
    sampling = config.rollout.sampling
    if sampling.temperature != 1 or sampling.truncated:
        raise ValueError(
            f"rollout.sampling has temperature = {sampling.temperature}, top_k = {sampling.top_k}, top_p = "
            f"{sampling.top_p}; the study compares with the student's whole distribution: use 1, 0 and 1"
        )
    if config.teacher.engine == "none":
        raise ValueError(
            "teacher.engine = 'none'; the study compares a student with a teacher: use a config that has one"
        )
    if config.training.steps < last:
        raise ValueError(
            f"training.steps = {config.training.steps}, but the study takes optimizer.warmup_steps + "
            f"{max(STALENESS)} = {last} steps of the run; raise training.steps or lower the warm-up"
        )


def _copy(decoder: Decoder) -> Decoder:
    copied = Decoder(decoder.config)
    copied.load_state_dict(dict(named_weights(decoder)))
    return copied.to(torch.float64)
