"""The objectives of on-policy distillation and the fused loss head."""

from titan_opd.config.objective import Objective
from titan_opd.losses.distillation import DistillationOutput, distillation_loss
from titan_opd.losses.scores import TeacherScores

__all__ = ["DistillationOutput", "Objective", "TeacherScores", "distillation_loss"]
