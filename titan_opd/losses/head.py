"""The fused loss head: from hidden states to a loss and its gradients without a matrix of tokens by vocabulary.

Rows go through in chunks. A chunk's logits are computed into one reused buffer, a route (candidates, or the whole
vocabulary) replaces them by the loss's gradient, and two products give the gradients of the hidden states and of the
output projection: three products in all. Gradients are taken during the forward pass, because the loss's upstream
gradient is one number.

Shape suffixes: N rows, C rows of a chunk, V columns of this rank's shard, B of a block of them, H hidden.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from titan_opd.losses.metrics import RowMetrics
from titan_opd.losses.rows import RowValues
from titan_opd.losses.scores import TeacherScores
from titan_opd.losses.vocab_parallel import VocabShard

# Float32 rows of the weight gradient that a bfloat16 product is added to at a time.
_PRODUCT_BLOCK_BYTES = {"cpu": 2 << 20, "cuda": 64 << 20}


@dataclass(frozen=True)
class HeadInputs:
    """The rows that count, and how.

    Attributes:
        row_numbers: [N] int64, which of the caller's rows these are.
        hidden: [N, H], the student's hidden states, in the dtype of the products.
        scores: the teacher's, of the same rows.
        coefficients: [N], what a row's value is multiplied by in the loss; float32, float64 for float64 products.
        shard: the student's output projection.
        temperature: divides the logits.
        rows_per_chunk: how many rows' logits are held at a time; the same on all ranks of the shard's group.
        written_ids: [N] int64, tokens whose log-probability is wanted beside the values; None: nobody asks.
    """

    row_numbers: Tensor
    hidden: Tensor
    scores: TeacherScores
    coefficients: Tensor
    shard: VocabShard
    temperature: float
    rows_per_chunk: int
    written_ids: Tensor | None = None

    def logits(self) -> Iterator[tuple[slice, Tensor]]:
        """Chunks of rows and their logits [C, V], temperature applied.

        The logits live in one buffer; they may be written over and are gone with the next chunk. Without rows there is
        one chunk of none, so that every call yields the same metrics.
        """
        num_rows, num_columns = len(self.hidden), len(self.shard.weight)
        # Rows that start at multiples of 64 elements keep the products on their fast paths.
        stride = (num_columns + 63) // 64 * 64
        buffer_CV = self.hidden.new_empty(min(self.rows_per_chunk, num_rows), stride)[:, :num_columns]
        for first in range(0, max(num_rows, 1), self.rows_per_chunk):
            rows = slice(first, min(first + self.rows_per_chunk, num_rows))
            logits_CV = buffer_CV[: rows.stop - rows.start]
            self.shard.write_logits(self.hidden[rows], self.temperature, out_CV=logits_CV)
            yield rows, logits_CV


class Route(Protocol):
    """How a chunk's values and logit gradient are computed."""

    def __call__(self, inputs: HeadInputs, rows: slice, logits_CV: Tensor, *, write_gradient: bool) -> RowValues:
        """The rows' values; with `write_gradient` the logits [C, V] are replaced by the loss's gradient."""
        ...


@dataclass(frozen=True)
class HeadOutput:
    """What a pass over all rows gives.

    Attributes:
        per_token: [N], each row's value.
        metrics: detached scalars.
        written_logprobs: [N], of `HeadInputs.written_ids` at the objective's temperature; None when not wanted.
        grad_hidden: [N, H], of the sum of coefficients times values; None when not wanted.
        grad_weight: [V, H] of this rank's shard, in at least float32; None when not wanted.
    """

    per_token: Tensor
    metrics: dict[str, Tensor]
    written_logprobs: Tensor | None
    grad_hidden: Tensor | None
    grad_weight: Tensor | None


@torch.no_grad()
def run_head(inputs: HeadInputs, route: Route, *, for_hidden: bool, for_weight: bool) -> HeadOutput:
    """Values, metrics and the wanted gradients of all rows, chunk by chunk."""
    per_token_N = torch.zeros_like(inputs.coefficients)
    written_N = None if inputs.written_ids is None else torch.zeros_like(inputs.coefficients)
    metrics = RowMetrics()
    gradients = _GradientSums(inputs, for_hidden=for_hidden, for_weight=for_weight)
    for rows, logits_CV in inputs.logits():
        if written_N is not None:  # before the gradient is written over the logits
            stats = inputs.shard.stats(logits_CV, inputs.written_ids[rows, None])
            written_N[rows] = stats.candidates[:, 0] - stats.max - stats.sum_exp.log()
        values = route(inputs, rows, logits_CV, write_gradient=for_hidden or for_weight)
        per_token_N[rows] = values.per_token.detach()
        metrics.add(values.metrics)
        gradients.add(rows, logits_CV)
    return HeadOutput(
        per_token_N, metrics.finish(len(per_token_N)), written_N, gradients.finish_hidden(), gradients.weight
    )


class _GradientSums:
    """The two products of each chunk, and their sums over chunks and ranks in at least float32."""

    def __init__(self, inputs: HeadInputs, *, for_hidden: bool, for_weight: bool) -> None:
        self._inputs = inputs
        self.hidden = torch.empty_like(inputs.hidden) if for_hidden else None
        weight_VH, sum_dtype = inputs.shard.weight, inputs.coefficients.dtype
        self.weight = torch.zeros_like(weight_VH, dtype=sum_dtype) if for_weight else None

    def add(self, rows: slice, grad_CV: Tensor) -> None:
        hidden_CH, scale = self._inputs.hidden[rows], 1 / self._inputs.temperature
        if self.hidden is not None:
            out_CH = self.hidden[rows]
            torch.addmm(out_CH, grad_CV, self._inputs.shard.weight, beta=0, alpha=scale, out=out_CH)
        if self.weight is not None:
            self._add_weight(grad_CV, hidden_CH, scale)

    def _add_weight(self, grad_CV: Tensor, hidden_CH: Tensor, scale: float) -> None:
        if hidden_CH.dtype == self.weight.dtype:
            self.weight.addmm_(grad_CV.T, hidden_CH, alpha=scale)
            return
        # A bfloat16 product is rounded once a chunk, and then summed over chunks in float32. A few rows of the
        # vocabulary at a time: what they need beside the sum stays small, and in a CPU's cache.
        row_bytes = self.weight.shape[1] * self.weight.element_size()
        block_bytes = _PRODUCT_BLOCK_BYTES.get(self.weight.device.type, _PRODUCT_BLOCK_BYTES["cuda"])
        block_rows = max(1, block_bytes // row_bytes)
        for sum_BH, grad_CB in zip(self.weight.split(block_rows), grad_CV.split(block_rows, dim=1), strict=True):
            product_BH = torch.mm(grad_CB.T, hidden_CH)
            sum_BH.add_(product_BH.to(sum_BH.dtype), alpha=scale)  # adding mixed dtypes takes four times as long

    def finish_hidden(self) -> Tensor | None:
        """[N, H] the whole gradient: each rank's columns contributed a part."""
        shard = self._inputs.shard
        if self.hidden is None or shard.group is None:
            return self.hidden
        return shard.sum_over_shards(self.hidden.to(self._inputs.coefficients.dtype))
