"""A rank's shard of an output projection, and the few numbers a row that the ranks exchange about it.

Shape suffixes: C rows of a chunk, V columns of this rank's shard, H hidden, K candidates a row, G ranks of the group,
m samples a row.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from titan_opd.ops import RaceWinners, RowStats, TopK, gather_stats, gumbel_sample, topk_logprobs
from titan_opd.ops.collectives import all_gather_single
from titan_opd.ops.draw import cumulative_mass, draw_columns


@dataclass(frozen=True)
class VocabShard:
    """This rank's rows of an output projection.

    Attributes:
        weight: [V, H] in the dtype of the products.
        rank_rows: how many rows each rank of the group holds, in order.
        rank: which of them this is.
        vocab_size: tokens that exist; rows of the projection at or above it are padding.
        group: the ranks that hold the other rows; None: this rank holds all.
    """

    weight: Tensor
    rank_rows: tuple[int, ...]
    rank: int
    vocab_size: int
    group: dist.ProcessGroup | None

    @classmethod
    def create(
        cls, weight_VH: Tensor, dtype: torch.dtype, vocab_size: int | None, group: dist.ProcessGroup | None
    ) -> VocabShard:
        """Find this rank's place in the vocabulary.

        Raises:
            ValueError: there are fewer rows than `vocab_size`.
        """
        rank_rows, rank = [weight_VH.shape[0]], 0
        if group is not None:
            own = torch.tensor(rank_rows, device=weight_VH.device)
            all_ranks = own.new_empty(dist.get_world_size(group))
            all_gather_single(all_ranks, own, group=group)
            rank_rows, rank = all_ranks.tolist(), dist.get_rank(group)
        if vocab_size is not None and not 0 < vocab_size <= sum(rank_rows):
            raise ValueError(
                f"vocab_size = {vocab_size}, but the output projection has {sum(rank_rows)} rows; "
                "pass the number of tokens of the tokenizer, at most the rows of either model"
            )
        return cls(
            weight=weight_VH.detach().to(dtype),
            rank_rows=tuple(rank_rows),
            rank=rank,
            vocab_size=sum(rank_rows) if vocab_size is None else vocab_size,
            group=group,
        )

    @property
    def boundaries(self) -> tuple[int, ...]:
        """Global ids where the ranks' tokens begin, and the end of the last; padding is no token."""
        ends = itertools.accumulate(self.rank_rows, initial=0)
        return tuple(min(end, self.vocab_size) for end in ends)

    @property
    def start(self) -> int:
        """Global id of this shard's first token."""
        return self.boundaries[self.rank]

    @property
    def num_columns(self) -> int:
        """Rows of this shard that are tokens; padding follows them."""
        return self.boundaries[self.rank + 1] - self.start

    @property
    def max_row_bytes(self) -> int:
        """Memory of a row of logits on the rank that holds the most, the same number on all ranks."""
        return max(self.rank_rows) * self.weight.element_size()

    def write_logits(self, hidden_CH: Tensor, temperature: float, out_CV: Tensor) -> None:
        """The shard's logits over the temperature, rounded once."""
        torch.addmm(out_CV, hidden_CH, self.weight.T, beta=0, alpha=1 / temperature, out=out_CV)

    def stats(self, logits_CV: Tensor, ids_CK: Tensor) -> RowStats:
        """Softmax statistics and candidates' logits over the whole vocabulary: 4 + K numbers a row cross the ranks."""
        local = gather_stats(logits_CV, ids_CK, vocab_start=self.start, vocab_size=self.vocab_size)
        if self.group is None:
            return local
        local_C4 = torch.stack(local[:4], dim=-1)
        max_GC, sum_exp_GC, tail_max_GC, tail_sum_exp_GC = self._gather(local_C4).unbind(-1)
        return RowStats(
            *_merge(max_GC, sum_exp_GC),
            *_merge(tail_max_GC, tail_sum_exp_GC),
            self.sum_over_shards(local.candidates),
        )

    def topk(self, logits_CV: Tensor, k: int) -> TopK:
        """The k most likely tokens of the whole vocabulary and its statistics: 4 + 2 k numbers a row and rank."""
        local = topk_logprobs(logits_CV, k, vocab_start=self.start, vocab_size=self.vocab_size)
        if self.group is None:
            return local
        numbers_GCn = self._gather(torch.cat([local.values, torch.stack(local[2:], dim=-1)], dim=-1))
        values_GCK, *stats_GC = numbers_GCn[..., :k], *numbers_GCn[..., k:].unbind(-1)
        return merge_topk(TopK(self._gather(local.ids), values_GCK, *stats_GC))

    def sample(self, logits_CV: Tensor, keys_C: Tensor, num_samples: int) -> RaceWinners:
        """Tokens [C, m] of the softmax over the whole vocabulary, a function of it and of the rows' keys alone.

        The keys, [C] int64, must be the same on all ranks. 3 numbers a draw and rank cross the ranks.
        """
        local = gumbel_sample(logits_CV, keys_C, num_samples, vocab_start=self.start, vocab_size=self.vocab_size)
        if self.group is None:
            return local
        # Ids are below 2^31: float64 holds them.
        gathered_GCm3 = self._gather(torch.stack([local.ids.double(), local.scores, local.values.double()], dim=-1))
        ids_GCm, scores_GCm, values_GCm = gathered_GCm3.unbind(-1)
        return merge_winners(RaceWinners(ids_GCm.long(), scores_GCm, values_GCm.to(local.values.dtype)))

    def draw(self, logits_CV: Tensor, uniforms_Cm: Tensor) -> Tensor:
        """Tokens [C, m] of the softmax over the whole vocabulary, one for each uniform, by the inverse of its
        distribution function: for many draws a row (titan_opd/ops/draw.py).

        The uniforms, float64 of (0, 1), must be the same on all ranks. 2 numbers a row and 1 a draw cross the ranks.
        """
        tokens_CV = logits_CV[:, : self.num_columns].float()
        max_C1 = tokens_CV.new_full((len(tokens_CV), 1), -torch.inf)
        if self.num_columns:
            max_C1 = tokens_CV.amax(-1, keepdim=True)
        if self.group is None:
            return draw_columns(cumulative_mass(tokens_CV, max_C1), uniforms_Cm)
        dist.all_reduce(max_C1, dist.ReduceOp.MAX, group=self.group)
        mass_CV = F.pad(cumulative_mass(tokens_CV, max_C1), (1, 0))  # an empty shard has a last column too
        ends_GC = self._gather(mass_CV[:, -1]).cumsum(0)
        wanted_Cm = uniforms_Cm * ends_GC[-1, :, None]
        begins_C1 = (ends_GC[self.rank - 1] if self.rank else torch.zeros_like(ends_GC[0]))[:, None]
        is_own_Cm = (begins_C1 <= wanted_Cm) & (wanted_Cm < ends_GC[self.rank, :, None])
        columns_Cm = torch.searchsorted(mass_CV[:, 1:].contiguous(), wanted_Cm - begins_C1, right=True)
        columns_Cm = columns_Cm.clamp(max=max(0, self.num_columns - 1))  # the subtraction rounds
        return self.sum_over_shards(torch.where(is_own_Cm, self.start + columns_Cm, 0))

    def _gather(self, values: Tensor) -> Tensor:
        """[G, ...] the values of all ranks, in order."""
        gathered = values.new_empty(len(self.rank_rows), *values.shape)
        all_gather_single(gathered.view(-1), values.contiguous().view(-1), group=self.group)
        return gathered

    def sum_over_shards(self, values: Tensor) -> Tensor:
        """The sum over the group's ranks, in place."""
        if self.group is not None:
            dist.all_reduce(values, group=self.group)
        return values


def product_dtype(hidden: Tensor) -> torch.dtype:
    """The dtype in which logits are computed: that of the hidden states, but float32 for float16.

    Logits over a temperature leave float16's range, which ends at 65504.
    """
    return torch.float32 if hidden.dtype == torch.float16 else hidden.dtype


def merge_topk(shards: TopK) -> TopK:
    """The k largest of a whole vocabulary from those of its shards in order, fields [G, C, k] and [G, C].

    A shard's candidates that are not among the whole's k join the tail.
    """
    num_ids = shards.ids.shape[-1]
    # [C, G k] in the order of ids among equal logits, which a stable sort keeps.
    ids, values = (field.transpose(0, 1).flatten(1) for field in (shards.ids, shards.values))
    order = values.sort(dim=-1, descending=True, stable=True).indices
    # What fills up a shard of fewer than k tokens counts as -inf; it goes behind the tokens whose logit is -inf.
    is_filling = ids.gather(1, order) < 0
    order = order.gather(1, is_filling.to(torch.int8).sort(dim=-1, stable=True).indices)
    ids, values = ids.gather(1, order), values.gather(1, order)

    beaten = values[:, num_ids:].T
    beaten = torch.where(beaten == torch.inf, torch.nan, beaten)  # as in the shards' sums
    tail_max = torch.cat([shards.tail_max, beaten])
    tail_sum_exp = torch.cat([shards.tail_sum_exp, torch.ones_like(beaten)])
    whole = _merge(shards.max, shards.sum_exp)
    return TopK(ids[:, :num_ids], values[:, :num_ids], *whole, *_merge(tail_max, tail_sum_exp))


def merge_winners(shards: RaceWinners) -> RaceWinners:
    """The winners over a whole vocabulary from those of its shards in order, fields [G, C, m]."""
    best_1Cm = shards.scores.argmax(0, keepdim=True)  # of equal scores the first, whose id is lower; NaN is largest
    return RaceWinners(*(field.gather(0, best_1Cm).squeeze(0) for field in shards))


def _merge(max_GC: Tensor, sum_exp_GC: Tensor) -> tuple[Tensor, Tensor]:
    """[C] the maximum of all ranks' sets and their sum of exp(z - maximum); an empty set has -inf and 0."""
    max_C = max_GC.amax(0)
    shift_C = torch.where(max_C == -torch.inf, 0, max_C)  # -inf - -inf would be NaN
    return max_C, (sum_exp_GC * (max_GC - shift_C).exp()).sum(0)
