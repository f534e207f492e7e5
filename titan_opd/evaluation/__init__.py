"""Held-out prompts: answered, graded, summed up."""

from titan_opd.evaluation.divergence import REVERSE_KL, mean_reverse_kl
from titan_opd.evaluation.evaluate import EvaluationResult, GradedAnswer, evaluate, require_reference
from titan_opd.evaluation.evaluator import Evaluator
from titan_opd.evaluation.grading import GRADERS, Grader, final_answer, grade_exact

__all__ = [
    "GRADERS",
    "REVERSE_KL",
    "EvaluationResult",
    "Evaluator",
    "GradedAnswer",
    "Grader",
    "evaluate",
    "final_answer",
    "grade_exact",
    "mean_reverse_kl",
    "require_reference",
]
