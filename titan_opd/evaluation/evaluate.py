"""Held-out prompts, answered by an engine and graded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from titan_opd.config.schema import SamplingConfig
from titan_opd.data.records import Prompt, Sample, Trajectory
from titan_opd.evaluation.grading import Grader
from titan_opd.parallel import World
from titan_opd.rollout import RolloutEngine

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, eq=False)
class GradedAnswer:
    """One answer.

    Attributes:
        trajectory: the answer as it was written.
        text: the response without special tokens, which is what was graded.
        correct: the grader's verdict.
    """

    trajectory: Trajectory
    text: str
    correct: bool


@dataclass(frozen=True, eq=False)
class EvaluationResult:
    """The answers to all evaluation prompts, at least one, in the prompts' order.

    `teacher_kl` is KL(student || teacher) on these answers, in nats a token; None where there is no teacher.
    """

    answers: tuple[GradedAnswer, ...]
    teacher_kl: float | None = None

    @property
    def accuracy(self) -> float:
        """Share of answers that are correct."""
        return self._mean([answer.correct for answer in self.answers])

    @property
    def mean_length(self) -> float:
        """Mean tokens of an answer, the stop token included."""
        return self._mean([len(answer.trajectory.response_ids) for answer in self.answers])

    @property
    def finished_share(self) -> float:
        """Share of answers that ended with a stop token, not at `max_new_tokens`."""
        return self._mean([answer.trajectory.finish_reason == "stop" for answer in self.answers])

    def metrics(self) -> dict[str, float]:
        """The numbers by name."""
        named = {"accuracy": self.accuracy, "mean_length": self.mean_length, "finished_share": self.finished_share}
        return named if self.teacher_kl is None else named | {"teacher_kl": self.teacher_kl}

    def __str__(self) -> str:
        distance = "" if self.teacher_kl is None else f", KL to the teacher {self.teacher_kl:.4f} nats a token"
        return (
            f"{self.accuracy:.1%} of {len(self.answers)} answers right, {self.mean_length:.1f} tokens on average, "
            f"{self.finished_share:.1%} finished{distance}"
        )

    def _mean(self, values: Sequence[float]) -> float:
        return sum(values) / len(values)


def require_reference(prompt: Prompt) -> str:
    """The answer that an evaluation prompt is graded against; a ValueError where there is none."""
    if prompt.answer is None:
        raise ValueError(
            f"evaluation prompt {prompt.id!r} has no reference answer to grade against; name the column that has "
            "it in data.answer_field"
        )
    return prompt.answer


def evaluate(
    engine: RolloutEngine,
    prompts: Sequence[Prompt],
    sampling: SamplingConfig,
    grader: Grader,
    tokenizer: PreTrainedTokenizerBase,
    world: World | None = None,
) -> EvaluationResult:
    """Answer each prompt once with the engine's present weights, and grade the answers.

    The sampler's noise depends on a prompt's place alone, so evaluations of the same prompts can be compared. The
    processes of `world` answer a share each, and all of them return the whole result; None: this process alone.

    Raises:
        ValueError: when there is no prompt, or one has no reference answer.
    """
    if not prompts:
        raise ValueError("there are no evaluation prompts; set data.evaluation to a file that has some")
    for prompt in prompts:
        require_reference(prompt)
    samples = [Sample(number=i, epoch=0, repeat=0, prompt=prompt) for i, prompt in enumerate(prompts)]
    share = samples if world is None else world.share(samples)
    answers = [_grade(trajectory, grader, tokenizer) for trajectory in engine.generate(share, sampling)]
    if world is not None:
        answers = [answer for share in world.gather_shares(answers) for answer in share]
    return EvaluationResult(tuple(sorted(answers, key=lambda answer: answer.trajectory.sample.number)))


def _grade(trajectory: Trajectory, grader: Grader, tokenizer: PreTrainedTokenizerBase) -> GradedAnswer:
    text = tokenizer.decode(trajectory.response_ids, skip_special_tokens=True)
    return GradedAnswer(trajectory, text, grader(text, require_reference(trajectory.prompt)))
