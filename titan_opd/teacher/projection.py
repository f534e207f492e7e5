"""From the teacher's hidden states to scores, in chunks of rows: no [tokens, vocabulary] matrix.

Shape suffixes: N response tokens, C rows of a chunk, H hidden, V vocabulary rows, K candidates a token, m samples a
token.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from titan_opd.losses import TeacherScores
from titan_opd.losses.chunks import row_chunks
from titan_opd.ops import gather_stats, topk_logprobs
from titan_opd.ops.draw import cumulative_mass, draw_columns

# Of a chunk: ids [C, K], their log-probabilities [C, K], and the log of the mass outside them [C].
_Evaluated = tuple[Tensor, Tensor, Tensor]


def score_topk(
    hidden_NH: Tensor, weight_VH: Tensor, k: int, *, temperature: float, vocab_size: int, logits_chunk_mb: float
) -> TeacherScores:
    """The teacher's `k` most likely tokens, their log-probabilities and the log of the mass outside them.

    Args:
        hidden_NH: [N, H] hidden states after the final norm.
        weight_VH: [V, H] output projection; rows at or above `vocab_size` are padding and have no probability.
        k: candidates a token; at most `vocab_size` and 256.
        temperature: divides the logits.
        logits_chunk_mb: memory of one chunk of logits, MiB.
    """

    def evaluate(logits_CV: Tensor, rows: slice) -> _Evaluated:
        found = topk_logprobs(logits_CV, k, vocab_size=vocab_size)
        return found.ids, found.logprobs, found.tail_logprob

    return _score(hidden_NH, weight_VH, evaluate, k, temperature, logits_chunk_mb)


def score_ids(
    hidden_NH: Tensor, weight_VH: Tensor, ids_NK: Tensor, *, temperature: float, vocab_size: int, logits_chunk_mb: float
) -> TeacherScores:
    """The teacher's log-probabilities at given ids, and the log of its mass outside them; arguments as `score_topk`."""

    def evaluate(logits_CV: Tensor, rows: slice) -> _Evaluated:
        return _evaluate_ids(logits_CV, ids_NK[rows], vocab_size)

    return _score(hidden_NH, weight_VH, evaluate, ids_NK.shape[1], temperature, logits_chunk_mb)


def score_samples(
    hidden_NH: Tensor,
    weight_VH: Tensor,
    uniforms_Nm: Tensor,
    *,
    temperature: float,
    vocab_size: int,
    logits_chunk_mb: float,
) -> TeacherScores:
    """Tokens drawn from the teacher's whole distribution at `temperature`, and their log-probabilities.

    Args:
        uniforms_Nm: [N, m] float64 of (0, 1), which decide the draws.
        The others as in `score_topk`.
    """

    def evaluate(logits_CV: Tensor, rows: slice) -> _Evaluated:
        tokens_CV = logits_CV[:, :vocab_size].float()
        drawn_Cm = draw_columns(cumulative_mass(tokens_CV, tokens_CV.amax(-1, keepdim=True)), uniforms_Nm[rows])
        return _evaluate_ids(logits_CV, drawn_Cm, vocab_size)

    return _score(hidden_NH, weight_VH, evaluate, uniforms_Nm.shape[1], temperature, logits_chunk_mb)


def _evaluate_ids(logits_CV: Tensor, ids_CK: Tensor, vocab_size: int) -> _Evaluated:
    stats = gather_stats(logits_CV, ids_CK, vocab_size=vocab_size)
    return ids_CK, stats.candidates - stats.lse[:, None], stats.tail_lse - stats.lse


def _score(
    hidden_NH: Tensor,
    weight_VH: Tensor,
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
    for rows in row_chunks(num_rows, len(weight_VH) * weight_VH.element_size(), logits_chunk_mb):
        logits_CV = (hidden_NH[rows] @ weight_VH.T).div_(temperature)
        ids_NK[rows], logprobs_NK[rows], tail_N[rows] = evaluate(logits_CV, rows)
    return TeacherScores(ids=ids_NK, logprobs=logprobs_NK, tail_logprobs=tail_N)
