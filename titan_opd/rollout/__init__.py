"""Engines that write answers."""

from titan_opd.rollout.answers import AnswersEngine, require_response
from titan_opd.rollout.engine import RECORD_NOTHING, Recording, RolloutEngine, StreamingEngine
from titan_opd.rollout.native import NativeEngine

__all__ = [
    "RECORD_NOTHING",
    "AnswersEngine",
    "NativeEngine",
    "Recording",
    "RolloutEngine",
    "StreamingEngine",
    "require_response",
]
