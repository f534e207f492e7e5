"""From the teacher's hidden states to scores, in chunks of rows: no [tokens, vocabulary] matrix.

The output projection may be split over processes, which then call these functions together, with the same rows.

Shape suffixes: N response tokens, C rows of a chunk, H hidden, V vocabulary rows of this process, K candidates a token,
m samples a token.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from titan_opd.losses import TeacherScores
from titan_opd.losses.chunks import row_chunks
from titan_opd.losses.vocab_parallel import VocabShard

# Of a chunk: ids [C, K], their log-probabilities [C, K], and the log of the mass outside them [C].
_Evaluated = tuple[Tensor, Tensor, Tensor]


def score_topk(
    hidden_NH: Tensor, shard: VocabShard, k: int, *, temperature: float, logits_chunk_mb: float
) -> TeacherScores:
    """The teacher's `k` most likely tokens, their log-probabilities and the log of the mass outside them.

    Args:
        hidden_NH: [N, H] hidden states after the final norm.
        shard: the output projection, or this process's rows of it.
        k: candidates a token; at most the tokens of the vocabulary and 256.
        temperature: divides the logits.
        logits_chunk_mb: memory of one chunk of logits, MiB.
    """

    def evaluate(logits_CV: Tensor, rows: slice) -> _Evaluated:
        found = shard.topk(logits_CV, k)
        return found.ids, found.logprobs, found.tail_logprob

    return _score(hidden_NH, shard, evaluate, k, temperature, logits_chunk_mb)


def score_ids(
    hidden_NH: Tensor, shard: VocabShard, ids_NK: Tensor, *, temperature: float, logits_chunk_mb: float
) -> TeacherScores:
    """The teacher's log-probabilities at given ids, and the log of its mass outside them; arguments as `score_topk`."""

    def evaluate(logits_CV: Tensor, rows: slice) -> _Evaluated:
        return _evaluate_ids(logits_CV, ids_NK[rows], shard)

    return _score(hidden_NH, shard, evaluate, ids_NK.shape[1], temperature, logits_chunk_mb)


def score_samples(
    hidden_NH: Tensor, shard: VocabShard, uniforms_Nm: Tensor, *, temperature: float, logits_chunk_mb: float
) -> TeacherScores:
    """Tokens drawn from the teacher's whole distribution at `temperature`, and their log-probabilities.

    Args:
        uniforms_Nm: [N, m] float64 of (0, 1), which decide the draws.
        The others as in `score_topk`.
    """

    def evaluate(logits_CV: Tensor, rows: slice) -> _Evaluated:
        return _evaluate_ids(logits_CV, shard.draw(logits_CV, uniforms_Nm[rows]), shard)

    return _score(hidden_NH, shard, evaluate, uniforms_Nm.shape[1], temperature, logits_chunk_mb)


def _evaluate_ids(logits_CV: Tensor, ids_CK: Tensor, shard: VocabShard) -> _Evaluated:
    stats = shard.stats(logits_CV, ids_CK)
    return ids_CK, stats.candidates - stats.lse[:, None], stats.tail_lse - stats.lse


def _score(
    hidden_NH: Tensor,
    shard: VocabShard,
    evaluate: Callable[[Tensor, slice], _Evaluated],
    num_candidates: int,
    temperature: float,
    logits_chunk_mb: float,
) -> TeacherScores:
    """The scores of all rows, from what `evaluate(logits_CV, rows)` finds in each chunk."""
    num_rows = len(hidden_NH)
    ids_NK = torch.empty(num_rows, num_candidates, dtype=torch.int64, device=hidden_NH.device)
    logprobs_NK = torch.empty(num_rows, num_candidates, dtype=torch.float32, device=hidden_NH.device)
    tail_N = torch.empty(num_rows, dtype=torch.float32, device=hidden_NH.device)
    for rows in row_chunks(num_rows, shard.max_row_bytes, logits_chunk_mb):
        logits_CV = (hidden_NH[rows] @ shard.weight.T).div_(temperature)
        ids_NK[rows], logprobs_NK[rows], tail_N[rows] = evaluate(logits_CV, rows)
    return TeacherScores(ids=ids_NK, logprobs=logprobs_NK, tail_logprobs=tail_N)
