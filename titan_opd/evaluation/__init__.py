"""Held-out prompts: answered, graded, summed up."""

from titan_opd.evaluation.evaluate import EvaluationResult, GradedAnswer, evaluate
from titan_opd.evaluation.grading import GRADERS, Grader, final_answer, grade_exact

__all__ = ["GRADERS", "EvaluationResult", "GradedAnswer", "Grader", "evaluate", "final_answer", "grade_exact"]
