"""What one read of each row of logits tells.

Shape suffixes: R rows, K ids a row.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class RowStats(NamedTuple):
    """Softmax statistics of the rows of one vocabulary shard; float32, float64 for float64 logits.

    The tail is the set of columns that are not among the row's ids. A set that is empty, or holds -inf only, has
    maximum -inf and sum 0; a set with NaN or +inf in it has NaN for both.

    Attributes:
        max: [R], the largest logit z.
        sum_exp: [R], sum exp(z - max).
        tail_max: [R], the largest logit of the tail.
        tail_sum_exp: [R], sum exp(z - tail_max) over the tail.
        candidates: [R, K], the logits at the ids; 0 for an id that this shard does not own.
    """

    max: Tensor
    sum_exp: Tensor
    tail_max: Tensor
    tail_sum_exp: Tensor
    candidates: Tensor

    @property
    def lse(self) -> Tensor:
        """[R], log sum exp(z) over the shard, in nats."""
        return self.max + self.sum_exp.log()

    @property
    def tail_lse(self) -> Tensor:
        """[R], log sum exp(z) over the tail, in nats; -inf when nothing is outside the ids."""
        return self.tail_max + self.tail_sum_exp.log()


class TopK(NamedTuple):
    """The k largest logits of the rows of one vocabulary shard, and what else one read of each row tells.

    float32, float64 for float64 logits, but the ids. NaN is larger than every number. The sums are those of `RowStats`
    with these ids: the tail is the set of columns that are not among the k.

    Attributes:
        ids: [R, k] int64, global; the largest logit first, of equal ones the lower id first. -1 fills up where there
            are fewer columns than k.
        values: [R, k], the logits z at the ids; -inf where the id is -1.
        max, sum_exp, tail_max, tail_sum_exp: [R], as in `RowStats`.
    """

    ids: Tensor
    values: Tensor
    max: Tensor
    sum_exp: Tensor
    tail_max: Tensor
    tail_sum_exp: Tensor

    @property
    def logprobs(self) -> Tensor:
        """[R, k], log-probabilities of the ids, in nats."""
        # Not values - lse: where logits are large, adding the maximum to the logarithm would round it away.
        return (self.values - self.max[:, None]) - self.sum_exp.log()[:, None]

    @property
    def tail_logprob(self) -> Tensor:
        """[R], the log-probability of the tail as a whole, in nats; -inf when nothing is outside the ids."""
        return (self.tail_max - self.max) + self.tail_sum_exp.log() - self.sum_exp.log()
