"""Teachers: they score answers token by token."""

from titan_opd.teacher.model import TeacherModel
from titan_opd.teacher.native import NativeScorer
from titan_opd.teacher.scorer import LabelScorer, Scorer

__all__ = ["LabelScorer", "NativeScorer", "Scorer", "TeacherModel"]
