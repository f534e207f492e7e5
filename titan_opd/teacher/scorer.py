"""What every teacher offers, and the one that scores nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from titan_opd.data.records import ScoredTrajectory, Trajectory
from titan_opd.losses import TeacherScores


class Scorer(Protocol):
    """Scores answers token by token."""

    def score(self, trajectories: Sequence[Trajectory]) -> list[ScoredTrajectory]:
        """The trajectories, in the same order, with what the objective needs to know about each response token."""
        ...


class LabelScorer:
    """No teacher: the answer's own tokens are the labels of a cross-entropy."""

    def score(self, trajectories: Sequence[Trajectory]) -> list[ScoredTrajectory]:
        return [ScoredTrajectory(t, TeacherScores(labels=t.response_ids)) for t in trajectories]
