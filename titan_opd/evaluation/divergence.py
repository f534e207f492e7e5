"""How far the student still is from its teacher, on the student's own answers."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from titan_opd.config.objective import Objective
from titan_opd.data import Trajectory, pack
from titan_opd.learner import DistillationModel
from titan_opd.models import Decoder
from titan_opd.teacher import Scorer

REVERSE_KL = Objective(kind="reverse_kl", support="dense")


@torch.no_grad()
def mean_reverse_kl(
    student: Decoder,
    teacher: Scorer,
    trajectories: Sequence[Trajectory],
    *,
    vocab_size: int,
    tokens_per_microbatch: int,
    logits_chunk_mb: float,
) -> float:
    """KL(student || teacher) over the whole vocabulary at temperature 1, the mean over response tokens, in nats.

    Args:
        student: scores its own answers anew, with its present weights.
        teacher: a scorer for the objective `REVERSE_KL`.
        trajectories: answers; those without a token count nowhere.
    """
    model = DistillationModel(student, REVERSE_KL, vocab_size=vocab_size, logits_chunk_mb=logits_chunk_mb)
    num_tokens = sum(len(trajectory.response_ids) for trajectory in trajectories)
    total = 0.0
    for batch in pack(teacher.score(trajectories), tokens_per_microbatch):
        newest = int(batch.policy_versions.max())
        total += model(batch, num_tokens=num_tokens, current_version=newest).loss.item()
    return total
