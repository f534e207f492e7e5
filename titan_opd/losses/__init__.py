"""The objectives of on-policy distillation and the fused loss head."""

from titan_opd.config.objective import Objective
from titan_opd.losses.distillation import DistillationOutput, distillation_loss
from titan_opd.losses.policy import m2po_bound
from titan_opd.losses.scores import TeacherScores
from titan_opd.losses.sweeps import binding_squares, policy_logprobs

__all__ = [
    "DistillationOutput",
    "Objective",
    "TeacherScores",
    "binding_squares",
    "distillation_loss",
    "m2po_bound",
    "policy_logprobs",
]
