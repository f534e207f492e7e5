"""How far the student still is from its teacher, on the student's own answers."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from titan_opd.config.objective import Objective
from titan_opd.data import Trajectory, pack
from titan_opd.learner import DistillationModel, equalize, sum_losses
from titan_opd.parallel import World, reshard
from titan_opd.teacher import Scorer

REVERSE_KL = Objective(kind="reverse_kl", support="dense")


@torch.no_grad()
def mean_reverse_kl(
    student: DistillationModel,
    teacher: Scorer,
    trajectories: Sequence[Trajectory],
    *,
    tokens_per_microbatch: int,
    world: World,
) -> float:
    """KL(student || teacher) over the whole vocabulary at temperature 1, the mean over response tokens, in nats.

    Args:
        student: scores its own answers anew, with its present weights.
        teacher: a scorer for the objective `REVERSE_KL`.
        trajectories: this process's answers; the mean is over those of all processes.
        tokens_per_microbatch: most packed tokens in a forward pass.
        world: the processes.
    """
    num_tokens = int(world.sum(torch.tensor(sum(len(trajectory.response_ids) for trajectory in trajectories))))
    batches = equalize(pack(teacher.score(trajectories), tokens_per_microbatch), world)
    outputs = [
        student(
            batch.to(world.device), REVERSE_KL, num_tokens=num_tokens, current_version=int(batch.policy_versions.max())
        )
        for batch in batches
    ]
    reshard(student)
    return sum_losses(outputs, world)
