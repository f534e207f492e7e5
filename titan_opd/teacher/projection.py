"""From the teacher's hidden states to scores, in chunks of rows: no [tokens, vocabulary] matrix.

Shape suffixes: N response tokens, C rows of a chunk, H hidden, V vocabulary rows, K candidates a token, m samples a
token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from titan_opd.losses import TeacherScores
from titan_opd.ops import gather_stats
from titan_opd.ops.draw import cumulative_mass, draw_columns


def score_topk(
    hidden_NH: Tensor, weight_VH: Tensor, k: int, *, temperature: float, vocab_size: int, logits_chunk_mb: float
) -> TeacherScores:
    """The teacher's `k` most likely tokens, their log-probabilities and the log of the mass outside them.

    Args:
        hidden_NH: [N, H] hidden states after the final norm.
        weight_VH: [V, H] output projection; rows at or above `vocab_size` are padding and have no probability.
        k: candidates a token; at most `vocab_size`.
        temperature: divides the logits.
        logits_chunk_mb: memory of one chunk of logits, MiB.
    """

    def candidates(logits_CV: Tensor, rows: slice) -> Tensor:
        return logits_CV[:, :vocab_size].topk(k, dim=-1).indices

    return _score(hidden_NH, weight_VH, candidates, k, temperature, vocab_size, logits_chunk_mb)


def score_ids(
    hidden_NH: Tensor, weight_VH: Tensor, ids_NK: Tensor, *, temperature: float, vocab_size: int, logits_chunk_mb: float
) -> TeacherScores:
    """The teacher's log-probabilities at given ids, and the log of its mass outside them; arguments as `score_topk`."""

    def candidates(logits_CV: Tensor, rows: slice) -> Tensor:
        return ids_NK[rows]

    return _score(hidden_NH, weight_VH, candidates, ids_NK.shape[1], temperature, vocab_size, logits_chunk_mb)


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

    def candidates(logits_CV: Tensor, rows: slice) -> Tensor:
        logits_CV = logits_CV[:, :vocab_size].float()
        return draw_columns(cumulative_mass(logits_CV, logits_CV.amax(-1, keepdim=True)), uniforms_Nm[rows])

    return _score(hidden_NH, weight_VH, candidates, uniforms_Nm.shape[1], temperature, vocab_size, logits_chunk_mb)


def _score(
    hidden_NH: Tensor,
    weight_VH: Tensor,
    candidates: Callable[[Tensor, slice], Tensor],
    num_candidates: int,
    temperature: float,
    vocab_size: int,
    logits_chunk_mb: float,
) -> TeacherScores:
    num_rows = len(hidden_NH)
    ids_NK = torch.empty(num_rows, num_candidates, dtype=torch.int64, device=hidden_NH.device)
    logprobs_NK = torch.empty(num_rows, num_candidates, dtype=torch.float32, device=hidden_NH.device)
    tail_N = torch.empty(num_rows, dtype=torch.float32, device=hidden_NH.device)
    for rows in _chunks(num_rows, weight_VH, logits_chunk_mb):
        logits_CV = (hidden_NH[rows] @ weight_VH.T).div_(temperature)
        ids_NK[rows] = candidates(logits_CV, rows)
        stats = gather_stats(logits_CV, ids_NK[rows], vocab_size=vocab_size)
        logprobs_NK[rows] = stats.candidates - stats.lse[:, None]
        tail_N[rows] = stats.tail_lse - stats.lse
    return TeacherScores(ids=ids_NK, logprobs=logprobs_NK, tail_logprobs=tail_N)


def _chunks(num_rows: int, weight_VH: Tensor, logits_chunk_mb: float) -> Iterator[slice]:
    size = max(1, int(logits_chunk_mb * 2**20 / (len(weight_VH) * weight_VH.element_size())))
    for start in range(0, num_rows, size):
        yield slice(start, min(start + size, num_rows))
