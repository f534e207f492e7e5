"""The synchronous schedule: write, score, hand over. Nothing overlaps and no token is stale."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from titan_opd.config.schema import RolloutConfig, ScheduleConfig
from titan_opd.data import PromptStream
from titan_opd.data.records import ScoredTrajectory
from titan_opd.observe import PhaseClock
from titan_opd.parallel import World
from titan_opd.rollout import Recording, RolloutEngine
from titan_opd.teacher import Scorer
from titan_opd.weights.gap import gap_metrics


class SyncSchedule:
    """Hands out one batch of scored answers per policy version.

    Args:
        prompts, engine, scorer: the parts.
        recording, schedule, rollout: how answers are written.
        deliver: gives the engine the student's present weights as the version that it is called with, and returns the
            probe's gap.
        clock, world: of the run.
    """

    def __init__(
        self,
        prompts: PromptStream,
        engine: RolloutEngine,
        scorer: Scorer,
        *,
        recording: Recording,
        schedule: ScheduleConfig,
        rollout: RolloutConfig,
        deliver: Callable[[int], float | None],
        clock: PhaseClock,
        world: World,
    ) -> None:
        self.prompts = prompts
        self.engine = engine
        self.scorer = scorer
        self._recording = recording
        self._batch = schedule.batch
        self._sampling = rollout.sampling
        self._deliver = deliver
        self._clock = clock
        self._world = world

    def next_batch(self, version: int) -> list[ScoredTrajectory]:
        """This process's share of the next `schedule.batch` samples, answered by the current version and scored."""
        assert self.engine.policy_version == version, "the engine has not been given the newest weights"
        samples = self._world.share(self.prompts.take(self._batch))
        with self._clock.phase("rollout"):
            trajectories = self.engine.generate(samples, self._sampling, self._recording)
        with self._clock.phase("score"):
            scored = _agreed(self.scorer.score(trajectories), self._world)
        num_tokens = sum(len(trajectory.response_ids) for trajectory in trajectories)
        if trajectories[0].finish_reason != "expert":  # a speed is told of work that was done
            self._clock.count_tokens("rollout", num_tokens)
        if scored[0].scores.labels is None:
            self._clock.count_tokens("score", num_tokens)
        return scored

    def publish(self, version: int) -> dict[str, float]:
        """Give the engine the weights of the next version, in place; returns how far it is from the trainer then."""
        return gap_metrics(self._world.gather(self._deliver(version)))

    def cut(self) -> None:
        """Nothing is under way between two steps: the position of the prompts says all."""

    def report(self) -> None:
        """Nobody else is at work."""


def _agreed(scored: list[ScoredTrajectory], world: World) -> list[ScoredTrajectory]:
    """The same answers and scores in all processes that train on this share, whatever their own engines wrote."""
    if world.tp_size == 1:
        return scored
    weight = scored[0].scores.lm_head_weight  # the teacher's, which all have
    bare = [replace(one, scores=replace(one.scores, lm_head_weight=None)) for one in scored]
    return [replace(one, scores=replace(one.scores, lm_head_weight=weight)) for one in world.agree(bare)]
