"""The teacher's logits, computed beside the student's for objectives over the whole vocabulary.

Shape suffixes: N rows, C rows of a chunk, V columns of this rank's shard, H_t the teacher's hidden size.
"""

from __future__ import annotations

from torch import Tensor

from titan_opd.losses.scores import TeacherScores
from titan_opd.losses.vocab_parallel import VocabShard, product_dtype


class TeacherLogits:
    """The teacher's logits of one chunk of rows after the other, at the objective's temperature.

    Args:
        hidden_NH: [N, H_t] in the dtype of the teacher's products.
        shard: its output projection.
        temperature: divides the logits.
    """

    def __init__(self, hidden_NH: Tensor, shard: VocabShard, temperature: float) -> None:
        self.shard = shard
        self._hidden_NH = hidden_NH
        self._temperature = temperature
        self._buffer_CV = hidden_NH.new_empty(0, 0)

    @classmethod
    def create(
        cls, scores: TeacherScores, temperature: float, vocab_size: int | None, *, beside: VocabShard
    ) -> TeacherLogits:
        """From the scores' `hidden` and `lm_head_weight`, whose tokens must lie as those of the student's shard do.

        Raises:
            ValueError: the vocabularies differ, or are split differently among the ranks.
        """
        dtype = product_dtype(scores.hidden)
        shard = VocabShard.create(scores.lm_head_weight, dtype, vocab_size, beside.group)
        if shard.vocab_size != beside.vocab_size:
            raise ValueError(
                f"the student's output projection has {beside.vocab_size} rows, the teacher's {shard.vocab_size}; pass "
                "vocab_size, the number of tokens of their common tokenizer, so that padding is left out on both sides"
            )
        if shard.boundaries != beside.boundaries:
            raise ValueError(
                f"the ranks' tokens begin at {beside.boundaries[:-1]} for the student and {shard.boundaries[:-1]} for "
                "the teacher; pad or cut the teacher's output projection to the student's rows before splitting it"
            )
        return cls(scores.hidden.to(dtype), shard, temperature)

    def chunk(self, rows: slice) -> Tensor:
        """[C, V] in a buffer that the next chunk overwrites."""
        num_rows = rows.stop - rows.start
        if num_rows > len(self._buffer_CV):
            num_columns = len(self.shard.weight)
            # Rows that start at multiples of 64 elements keep products and kernels on their fast paths.
            stride = (num_columns + 63) // 64 * 64
            self._buffer_CV = self._hidden_NH.new_empty(num_rows, stride)[:, :num_columns]
        logits_CV = self._buffer_CV[:num_rows]
        self.shard.write_logits(self._hidden_NH[rows], self._temperature, out_CV=logits_CV)
        return logits_CV
