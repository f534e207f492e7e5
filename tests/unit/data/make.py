"""Small records for the tests of the data room."""

from __future__ import annotations

import torch

from titan_opd.data import Prompt, Sample, ScoredTrajectory, Trajectory
from titan_opd.losses import TeacherScores


def make_prompt(name="p", token_ids=(1, 2, 3), **fields):
    return Prompt(id=name, token_ids=torch.tensor(token_ids, dtype=torch.int64), **fields)


def make_scored(prompt_ids, response_ids, scores=None, *, name="p", number=0, version=0):
    """A scored answer; without scores its labels are the response tokens."""
    response_ids = torch.tensor(response_ids, dtype=torch.int64)
    trajectory = Trajectory(
        sample=Sample(number=number, epoch=0, repeat=0, prompt=make_prompt(name, prompt_ids)),
        response_ids=response_ids,
        policy_versions=torch.full((len(response_ids),), version, dtype=torch.int32),
        finish_reason="stop",
    )
    return ScoredTrajectory(trajectory, TeacherScores(labels=response_ids) if scores is None else scores)
