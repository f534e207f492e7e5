"""The dense route of hybrid distillation: the head itself draws the student's sample and scores both tokens.

Shape suffixes: N rows, C rows of a chunk, B rows of a block, V columns of this rank's shard, 2 tokens a row.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from titan_opd.losses.candidate_route import CandidateRoute
from titan_opd.losses.head import HeadInputs
from titan_opd.losses.hybrid import Hybrid
from titan_opd.losses.logit_gradient import row_blocks
from titan_opd.losses.rows import RowValues
from titan_opd.losses.scores import TeacherScores
from titan_opd.losses.teacher_logits import TeacherLogits
from titan_opd.losses.vocab_parallel import VocabShard


class DrawnHybridRoute:
    """Draws a token from the current student for each row, then goes the route of candidates.

    Args:
        loss: the hybrid's mathematics.
        teacher: its logits.
        uniforms_N: numbers in [0, 1) that decide the draws, the same on all ranks: a sample depends on them alone, not
            on chunks or on how the vocabulary is split.
    """

    def __init__(self, loss: Hybrid, teacher: TeacherLogits, uniforms_N: Tensor) -> None:
        self._candidates = CandidateRoute(loss)
        self._teacher = teacher
        self._uniforms_N = uniforms_N

    def __call__(self, inputs: HeadInputs, rows: slice, logits_CV: Tensor, *, write_gradient: bool) -> RowValues:
        expert_C = inputs.scores.labels[rows].long()
        own_C = draw_tokens(logits_CV, self._uniforms_N[rows], inputs.shard)
        ids_C2 = torch.stack([expert_C, own_C], dim=-1)
        stats = self._teacher.shard.stats(self._teacher.chunk(rows), ids_C2)
        log_q_C2 = stats.candidates - stats.max[:, None] - stats.sum_exp[:, None].log()
        scores = TeacherScores(ids=ids_C2, logprobs=log_q_C2.to(inputs.coefficients.dtype))
        return self._candidates.evaluate(inputs, rows, logits_CV, scores, write_gradient=write_gradient)


def draw_uniforms(
    num_rows: int, like: Tensor, group: dist.ProcessGroup | None, generator: torch.Generator | None
) -> Tensor:
    """[N] uniform numbers of `like`'s dtype and device, the first rank's on all ranks."""
    source = like.device if generator is None else generator.device
    uniforms_N = torch.rand(num_rows, dtype=like.dtype, device=source, generator=generator).to(like.device)
    if group is not None:
        dist.broadcast(uniforms_N, group=group, group_src=0)
    return uniforms_N


def draw_tokens(logits_CV: Tensor, uniforms_C: Tensor, shard: VocabShard) -> Tensor:
    """[C] a token of each row's softmax: the first, in the order of ids, whose cumulative mass passes the number."""
    no_ids = torch.empty(len(logits_CV), 0, dtype=torch.int64, device=logits_CV.device)
    stats = shard.stats(logits_CV, no_ids)
    dtype = stats.max.dtype
    drawn = []
    for block in row_blocks(len(logits_CV), max(shard.rank_rows) * dtype.itemsize, logits_CV.device):
        mass_BV = (logits_CV[block, : shard.num_columns].to(dtype) - stats.max[block, None]).exp()
        before_B, total_B = shard.sums_before(mass_BV.sum(-1))
        cumulative_BV = before_B[:, None] + mass_BV.cumsum(-1)
        # Counting the tokens passed by on each rank gives the token's id without knowing on which rank it is.
        passed_B = (cumulative_BV <= (uniforms_C[block].to(dtype) * total_B)[:, None]).sum(-1)
        drawn.append(shard.sum_over_shards(passed_B))
    return torch.cat(drawn).clamp(max=shard.vocab_size - 1)
