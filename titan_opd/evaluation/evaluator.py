"""The evaluation of a run: answers graded, and the distance to the teacher."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from titan_opd.config.schema import EvaluationConfig, TrainingConfig
from titan_opd.data.records import Prompt
from titan_opd.evaluation.divergence import mean_reverse_kl
from titan_opd.evaluation.evaluate import EvaluationResult, evaluate
from titan_opd.evaluation.grading import GRADERS
from titan_opd.learner import DistillationModel
from titan_opd.parallel import World
from titan_opd.rollout import RolloutEngine
from titan_opd.teacher import Scorer
from titan_opd.weights import named_weights

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, eq=False)
class Evaluator:
    """Evaluates the student as often as a run asks.

    Attributes:
        engine: writes the answers; it is given the student's weights when its own are older.
        prompts: what is asked, with reference answers; each process asks its share.
        tokenizer: turns answers into the text that is graded.
        student: whose distance to the teacher is measured.
        teacher: a scorer for `divergence.REVERSE_KL`; None measures no distance.
        evaluation, training: the settings.
        world: the processes.
    """

    engine: RolloutEngine
    prompts: Sequence[Prompt]
    tokenizer: PreTrainedTokenizerBase
    student: DistillationModel
    teacher: Scorer | None
    evaluation: EvaluationConfig
    training: TrainingConfig
    world: World

    def run(self, version: int) -> EvaluationResult:
        """Answer and grade all prompts with the student's present weights, which are policy version `version`."""
        if self.engine.policy_version != version:
            self.engine.load_weights(named_weights(self.student.decoder), version)
        grader = GRADERS[self.evaluation.grader]
        result = evaluate(self.engine, self.prompts, self.evaluation.sampling, grader, self.tokenizer, self.world)
        if self.teacher is None:
            return result
        kl = mean_reverse_kl(
            self.student,
            self.teacher,
            self.world.share([answer.trajectory for answer in result.answers]),
            tokens_per_microbatch=self.training.tokens_per_microbatch,
            world=self.world,
        )
        return replace(result, teacher_kl=kl)
