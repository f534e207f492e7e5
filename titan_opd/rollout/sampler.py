"""From a row of logits to a drawn token, and to what is recorded about the distribution it was drawn from.

The logits are divided by the temperature; then top-k, then top-p cut what is left. Equal logits are ordered by id, the
lower first. Temperature 0 is a point mass on the most likely token: log-probability 0.

Shape suffixes: R rows (one per running sequence), V vocabulary, C candidates (all of V, or those that truncation looked
at), M kept candidates, m Monte Carlo samples, K recorded candidates.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from titan_opd.config.schema import SamplingConfig
from titan_opd.ops import gather_stats
from titan_opd.ops.draw import cumulative_mass, draw_columns
from titan_opd.ops.noise import uniforms
from titan_opd.rollout.engine import Recording
from titan_opd.rollout.requests import check_recording

_FIRST_WINDOW = 256


class Draws(NamedTuple):
    """One token for each row; the fields are those of `Trajectory`, with R rows.

    Attributes:
        token_ids: [R] int64.
        logprobs: [R] float32, of the distribution really sampled from.
        support: [R, M] int64, the ids that truncation kept, most likely first, padded with -1; None when not truncated.
        sampled_ids, sampled_logprobs: [R, m] int64 and float32; column 0 is the written token.
        topk_ids, topk_logprobs: [R, K] int64 and float32, over the whole vocabulary at the sampling temperature.
    """

    token_ids: Tensor
    logprobs: Tensor
    support: Tensor | None = None
    sampled_ids: Tensor | None = None
    sampled_logprobs: Tensor | None = None
    topk_ids: Tensor | None = None
    topk_logprobs: Tensor | None = None


class Sampler:
    """Draws tokens under one set of settings.

    Args:
        sampling: temperature, top-k and top-p.
        recording: what to record beside the token.
        vocab_size: number of tokens; columns of the logits at or above it are never sampled and count nowhere.
        seed: of the noise.
        fixed_shapes: top-p sorts the whole vocabulary at once; otherwise the flattest of the rows decides how many
            candidates are looked at in all of them, which can show in a row's last bits.

    With fewer than K tokens in the vocabulary, the recorded top-K candidates are all of them.

    Raises:
        ValueError: top-K candidates are asked for at temperature 0, where all but one have probability 0.
    """

    def __init__(
        self, sampling: SamplingConfig, recording: Recording, *, vocab_size: int, seed: int, fixed_shapes: bool = False
    ) -> None:
        check_recording(recording, sampling)
        self._sampling = sampling
        self._recording = Recording(recording.num_samples, min(recording.top_k, vocab_size))
        self._vocab_size = vocab_size
        self._seed = seed
        self._first_window = vocab_size if fixed_shapes else _FIRST_WINDOW

    def draw(self, logits_RV: Tensor, numbers_R: Tensor, positions_R: Tensor, written_R: Tensor | None = None) -> Draws:
        """One token, and what is recorded with it, for each row.

        Args:
            logits_RV: [R, V], any floating type; computed with in float32.
            numbers_R: [R] int64, sample numbers, for the noise.
            positions_R: [R] int64, position in the answer, for the noise.
            written_R: [R] int64, the tokens of an answer that somebody else wrote, which are then not drawn; they have
                log-probability -inf where they could not have been. The samples beside them are drawn.

        Raises:
            ValueError: a row has a NaN or +inf, or no finite logit at all.
        """
        num_samples = max(self._recording.num_samples, 1)
        logits_RV = logits_RV[:, : self._vocab_size].float()
        if self._sampling.temperature == 0:
            max_R, argmax_R = logits_RV.max(dim=-1)
            _check_finite(max_R, numbers_R)
            ids_Rm = argmax_R[:, None].expand(-1, num_samples)
            logprobs_Rm = torch.zeros_like(ids_Rm, dtype=torch.float32)
            if written_R is not None:
                logprobs_R1 = torch.where(written_R == argmax_R, 0.0, -torch.inf)[:, None]
                ids_Rm, logprobs_Rm = _put_first(written_R[:, None], ids_Rm), _put_first(logprobs_R1, logprobs_Rm)
            return self._draws(ids_Rm, logprobs_Rm)

        if self._sampling.temperature != 1:
            logits_RV = logits_RV / self._sampling.temperature
        max_R1 = logits_RV.amax(dim=-1, keepdim=True)
        _check_finite(max_R1, numbers_R)
        if self._sampling.truncated:
            logits_RC, ids_RC = truncate(
                logits_RV, self._sampling.top_k, self._sampling.top_p, first_window=self._first_window
            )
        else:
            logits_RC, ids_RC = logits_RV, None

        cdf_RC = cumulative_mass(logits_RC, max_R1)
        columns_Rm = draw_columns(cdf_RC, uniforms(self._seed, numbers_R, positions_R, num_samples))
        logits_Rm = logits_RC.gather(1, columns_Rm)
        ids_Rm = columns_Rm if ids_RC is None else ids_RC.gather(1, columns_Rm)
        if written_R is not None:
            ids_Rm = _put_first(written_R[:, None], ids_Rm)
            logits_Rm = _put_first(_logits_of(written_R[:, None], logits_RC, ids_RC), logits_Rm)
        draws = self._draws(ids_Rm, (logits_Rm.double() - max_R1 - cdf_RC[:, -1:].log()).float())
        if ids_RC is not None:
            draws = draws._replace(support=_kept_ids(logits_RC, ids_RC))
        if self._recording.top_k:
            topk_ids_RK = most_likely(logits_RV, self._recording.top_k)
            stats = gather_stats(logits_RV, topk_ids_RK)
            # Not candidates - lse: where logits are large, adding the maximum to the logarithm would round it away.
            topk_logprobs_RK = (stats.candidates - stats.max[:, None]) - stats.sum_exp.log()[:, None]
            draws = draws._replace(topk_ids=topk_ids_RK, topk_logprobs=topk_logprobs_RK)
        return draws

    def _draws(self, ids_Rm: Tensor, logprobs_Rm: Tensor) -> Draws:
        draws = Draws(ids_Rm[:, 0], logprobs_Rm[:, 0])
        if self._recording.num_samples:
            draws = draws._replace(sampled_ids=ids_Rm, sampled_logprobs=logprobs_Rm)
        return draws


def truncate(
    logits_RV: Tensor, top_k: int, top_p: float, *, first_window: int = _FIRST_WINDOW
) -> tuple[Tensor, Tensor]:
    """The candidates of truncated sampling, most likely first.

    Args:
        logits_RV: [R, V] float32, each row with a finite maximum; -inf is a token of probability 0.
        top_k: keep this many tokens at most; 0 keeps all.
        top_p: then keep the smallest set of most likely tokens whose mass, renormalised after top-k, reaches this; at
            least one token.
        first_window: candidates that top-p without top-k sorts first; widened until they hold every row's mass.

    Returns:
        logits [R, C], -inf for what was cut, and ids [R, C]; what is kept stands first in each row.
    """
    vocab_size = logits_RV.shape[1]
    keys_RV = _order_keys(logits_RV)
    max_R1 = logits_RV.amax(dim=-1, keepdim=True)

    def candidates(count: int) -> tuple[Tensor, Tensor, Tensor]:
        ids_RC = keys_RV.topk(count, dim=-1).indices
        logits_RC = logits_RV.gather(1, ids_RC)
        return logits_RC, ids_RC, cumulative_mass(logits_RC, max_R1)

    if top_k:
        logits_RC, ids_RC, cdf_RC = candidates(min(top_k, vocab_size))
        mass_R1 = cdf_RC[:, -1:]
    else:
        mass_R1 = torch.exp(logits_RV - max_R1).sum(dim=-1, keepdim=True, dtype=torch.float64)
        window = first_window
        while True:
            logits_RC, ids_RC, cdf_RC = candidates(min(window, vocab_size))
            if window >= vocab_size or bool((cdf_RC[:, -1:] >= top_p * mass_R1).all()):
                break
            window *= 4
    if top_p < 1:
        mass_before_RC = torch.nn.functional.pad(cdf_RC[:, :-1], (1, 0))
        logits_RC = logits_RC.masked_fill(mass_before_RC >= top_p * mass_R1, -torch.inf)
    return logits_RC, ids_RC


def most_likely(logits_RV: Tensor, count: int) -> Tensor:
    """Ids of the `count` largest logits, [R, count] int64, largest first; of equal logits the lower id first."""
    return _order_keys(logits_RV).topk(count, dim=-1).indices


def _order_keys(logits_RV: Tensor) -> Tensor:
    """[R, V] int64, all different in a row, larger for the larger logit and for the lower id among equal logits.

    With them `torch.topk`, which orders equals as it likes, has one answer. The upper half is the float's bits, read as
    an integer that orders as the float does; the lower half is the id, counted backwards.
    """
    vocab_size = logits_RV.shape[1]
    bits_RV = (logits_RV + 0.0).view(torch.int32)  # + 0.0 makes -0.0 equal to 0.0
    ordered_RV = bits_RV ^ ((bits_RV >> 31) & 0x7FFFFFFF)  # a negative float's other bits grow as it falls
    return (ordered_RV.long() << 32) + torch.arange(vocab_size - 1, -1, -1, device=logits_RV.device)


def _put_first(column_R1: Tensor, values_Rm: Tensor) -> Tensor:
    """[R, m] `values_Rm` with another first column."""
    return torch.cat([column_R1, values_Rm[:, 1:]], dim=1)


def _logits_of(written_R1: Tensor, logits_RC: Tensor, ids_RC: Tensor | None) -> Tensor:
    """[R, 1] the logit of one token a row, -inf where truncation cut it off; ids of None are 0, 1, ..."""
    if ids_RC is None:
        return logits_RC.gather(1, written_R1)
    return logits_RC.masked_fill(ids_RC != written_R1, -torch.inf).amax(dim=-1, keepdim=True)


def _kept_ids(logits_RC: Tensor, ids_RC: Tensor) -> Tensor:
    """The support: ids of finite logits, padded with -1 to the longest row's number of them."""
    kept_RC = logits_RC > -torch.inf
    width = int(kept_RC.sum(dim=-1).max())
    return ids_RC.masked_fill(~kept_RC, -1)[:, :width]


def _check_finite(max_R: Tensor, numbers_R: Tensor) -> None:
    finite_R = max_R.flatten().isfinite()
    if not bool(finite_R.all()):
        raise ValueError(
            f"the logits of sample {int(numbers_R[~finite_R][0])}, divided by the temperature, hold a NaN or +inf, or "
            "no finite value at all; the weights are damaged, the model overflows its type, or the temperature is tiny"
        )
