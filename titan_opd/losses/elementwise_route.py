"""The dense route of any divergence: its terms by elementwise passes over blocks of both sides' logits.

With f_j the term of token j and s_j = d f_j / d log p_j its slope, the gradient in logit j is s_j - p_j sum_i s_i.

Shape suffixes: C rows of a chunk, B rows of a block, V columns of this rank's shard (those that are tokens).
"""

from __future__ import annotations

import torch
from torch import Tensor

from titan_opd.config.objective import Objective
from titan_opd.losses.adaptive import head_share
from titan_opd.losses.divergences import divergence_terms, forward_kl_terms, reverse_kl_terms
from titan_opd.losses.head import HeadInputs
from titan_opd.losses.logit_gradient import row_blocks
from titan_opd.losses.rows import RowValues
from titan_opd.losses.teacher_logits import TeacherLogits
from titan_opd.losses.vocab_parallel import VocabShard
from titan_opd.ops import RowStats


class ElementwiseRoute:
    """Sums a divergence's terms over the vocabulary and writes its gradient, a block of rows at a time."""

    def __init__(self, objective: Objective, teacher: TeacherLogits) -> None:
        self.objective = objective
        self.teacher = teacher

    def __call__(self, inputs: HeadInputs, rows: slice, logits_CV: Tensor, *, write_gradient: bool) -> RowValues:
        shard, dtype = inputs.shard, inputs.coefficients.dtype
        teacher_CV = self.teacher.chunk(rows)
        no_ids = torch.empty(len(logits_CV), 0, dtype=torch.int64, device=logits_CV.device)
        student_stats = shard.stats(logits_CV, no_ids)
        teacher_stats = self.teacher.shard.stats(teacher_CV, no_ids)
        sums = []
        # All ranks cut the same blocks, because each block ends in a sum over the ranks.
        row_bytes = max(shard.rank_rows) * dtype.itemsize
        for block in row_blocks(len(logits_CV), row_bytes, logits_CV.device):
            student_BV = logits_CV[block, : shard.num_columns]
            teacher_BV = teacher_CV[block, : shard.num_columns]
            student_tops_BV = student_BV == student_stats.max[block, None]
            both_top_BV = student_tops_BV & (teacher_BV == teacher_stats.max[block, None])
            log_p_BV = _log_softmax(student_BV.to(dtype), student_stats, block)
            log_q_BV = _log_softmax(teacher_BV.to(dtype), teacher_stats, block)
            log_q_top_B = -teacher_stats.sum_exp[block].log()
            block_sums, slopes_BV = self._evaluate(log_q_BV, log_p_BV, log_q_top_B, shard, want_slopes=write_gradient)
            block_sums["top1_agreement"] = both_top_BV.any(-1).to(dtype)
            block_sums = _sum_over_shards(block_sums, shard)
            block_sums["top1_agreement"].clamp_(max=1)  # equally likely tokens may be on several ranks
            slope_sum_B = block_sums.pop("slope")
            if write_gradient:
                slopes_BV.addcmul_(log_p_BV.exp_(), slope_sum_B[:, None], value=-1)
                torch.mul(slopes_BV, inputs.coefficients[rows][block, None], out=student_BV)
                logits_CV[block, shard.num_columns :] = 0
            sums.append(block_sums)
        values = {name: torch.cat([block_sums[name] for block_sums in sums]) for name in sums[0]}
        return RowValues(values.pop("value"), values)

    def _evaluate(
        self, log_q_BV: Tensor, log_p_BV: Tensor, log_q_top_B: Tensor, shard: VocabShard, *, want_slopes: bool
    ) -> tuple[dict[str, Tensor], Tensor]:
        """This rank's part of each sum over the vocabulary, [B] each, and the slopes [B, V]."""
        min_logprob = self.objective.min_logprob
        clamped_share_B = (log_q_BV < min_logprob).to(log_q_BV.dtype).sum(-1) / shard.vocab_size
        log_q_BV = log_q_BV.clamp(min=min_logprob)
        q_BV, p_BV = log_q_BV.exp(), log_p_BV.exp()
        share_B1 = None
        if self.objective.kind == "adaptive_kl":
            share_B1 = head_share(q_BV, p_BV, log_q_top_B.exp(), self.objective.mu, shard)[:, None]
        slopes_BV = torch.zeros_like(log_p_BV)
        with torch.set_grad_enabled(want_slopes):
            leaf_BV = log_p_BV.detach().requires_grad_(want_slopes)
            terms_BV = divergence_terms(self.objective, log_q_BV, leaf_BV, head_share=share_B1)
            if want_slopes:
                (slopes_BV,) = torch.autograd.grad(terms_BV.sum(), leaf_BV)
        sums = {
            "value": terms_BV.detach().sum(-1),
            "slope": slopes_BV.sum(-1),
            "teacher_entropy": -(q_BV * log_q_BV).sum(-1),
            "student_entropy": -(p_BV * log_p_BV).sum(-1),
            "forward_kl": forward_kl_terms(log_q_BV, log_p_BV).sum(-1),
            "reverse_kl": reverse_kl_terms(log_q_BV, log_p_BV).sum(-1),
            "teacher_clamped_share": clamped_share_B,
        }
        return sums, slopes_BV


def _log_softmax(logits_BV: Tensor, stats: RowStats, block: slice) -> Tensor:
    return logits_BV - stats.max[block, None] - stats.sum_exp[block, None].log()


def _sum_over_shards(values: dict[str, Tensor], shard: VocabShard) -> dict[str, Tensor]:
    """Each value's sum over the ranks, in one exchange."""
    summed = shard.sum_over_shards(torch.stack(list(values.values())))
    return dict(zip(values, summed, strict=True))
