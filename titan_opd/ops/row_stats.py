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
