"""Engines that write answers."""

from titan_opd.rollout.answers import AnswersEngine
from titan_opd.rollout.engine import Recording, RolloutEngine
from titan_opd.rollout.native import NativeEngine

__all__ = ["AnswersEngine", "NativeEngine", "Recording", "RolloutEngine"]
