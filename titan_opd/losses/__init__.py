"""The objectives of on-policy distillation and the fused loss head."""

from titan_opd.config.objective import Objective
from titan_opd.losses.scores import TeacherScores

__all__ = ["Objective", "TeacherScores"]
