"""The dense route of hybrid distillation: the head itself draws the student's sample and scores both tokens.

Shape suffixes: N rows, C rows of a chunk, V columns of this rank's shard, 2 tokens a row.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from titan_opd.losses.candidate_route import CandidateRoute
from titan_opd.losses.head import HeadInputs
from titan_opd.losses.hybrid import Hybrid
from titan_opd.losses.rows import RowValues
from titan_opd.losses.scores import TeacherScores
from titan_opd.losses.teacher_logits import TeacherLogits
from titan_opd.ops.noise import row_keys


class DrawnHybridRoute:
    """Draws a token from the current student for each row, then goes the route of candidates.

    Args:
        loss: the hybrid's mathematics.
        teacher: its logits.
        keys_N: int64, of which the draws' noise is a function, the same on all ranks: a sample depends on them alone,
            not on chunks or on how the vocabulary is split.
    """

    def __init__(self, loss: Hybrid, teacher: TeacherLogits, keys_N: Tensor) -> None:
        self._candidates = CandidateRoute(loss)
        self._teacher = teacher
        self._keys_N = keys_N

    def __call__(self, inputs: HeadInputs, rows: slice, logits_CV: Tensor, *, write_gradient: bool) -> RowValues:
        expert_C = inputs.scores.labels[rows].long()
        # A row with a NaN has no sample; it gets some token, and its value is NaN by the row's statistics.
        own_C = inputs.shard.sample(logits_CV, self._keys_N[rows], 1).ids[:, 0].clamp(min=0)
        ids_C2 = torch.stack([expert_C, own_C], dim=-1)
        stats = self._teacher.shard.stats(self._teacher.chunk(rows), ids_C2)
        log_q_C2 = stats.candidates - stats.max[:, None] - stats.sum_exp[:, None].log()
        scores = TeacherScores(ids=ids_C2, logprobs=log_q_C2.to(inputs.coefficients.dtype))
        return self._candidates.evaluate(inputs, rows, logits_CV, scores, write_gradient=write_gradient)


def draw_row_keys(
    num_rows: int, device: torch.device, group: dist.ProcessGroup | None, generator: torch.Generator | None
) -> Tensor:
    """[N] int64 keys of a call's rows, from one number: the first rank's, drawn by its generator, on all ranks."""
    source = device if generator is None else generator.device
    seed = torch.randint(2**63 - 1, (1,), device=source, generator=generator).to(device)
    if group is not None:
        dist.broadcast(seed, group=group, group_src=0)
    numbers_N = torch.arange(num_rows, device=device)
    return row_keys(int(seed), numbers_N, torch.zeros_like(numbers_N))
