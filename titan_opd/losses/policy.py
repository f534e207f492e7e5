"""Policy gradient towards the teacher on samples of the student, with corrections for samples of an older policy.

The reward of a token is the advantage A = log q - log p; the gradient of -E[A] at a frozen A is the reverse KL's. With
rho the ratio of the current policy to the one that wrote the sample, the corrections differ in how rho enters.

Sources: AsyncOPD (arXiv 2606.24143) for the learner's advantage, many samples a token and the truncated and masked
ratios; PPO (arXiv 1707.06347, equation 7); dual clip (arXiv 1912.09729, equation 5); decoupled PPO (arXiv 2110.00641,
equation 4); M2PO (arXiv 2510.01161).

Shape suffixes: C rows of a chunk, N rows of the batch, K samples a row, M tokens that truncated sampling kept.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from titan_opd.config.objective import Objective
from titan_opd.losses.rows import (
    RowValues,
    StudentRows,
    masked_logsumexp,
    masked_mean,
    share_of,
    valid_candidates,
    valid_ids,
)
from titan_opd.losses.scores import TeacherScores

MAX_LOG_RATIO = 20.0  # ratios stay below 5e8, and their squares within float32


@dataclass(frozen=True)
class _Samples:
    """A chunk's samples; everything is finite, also where `valid` is False."""

    valid: Tensor  # [C, K] bool
    log_q: Tensor  # [C, K] the teacher
    log_p: Tensor  # [C, K] the current student, differentiable
    log_policy: Tensor  # [C, K] the same, renormalised where sampling was truncated, differentiable
    log_base: Tensor  # [C, K] what the advantage is taken against, without gradient
    advantage: Tensor  # [C, K] without gradient
    log_behavior: Tensor | None  # [C, K]
    log_proximal: Tensor | None  # [C, K]

    def log_ratio_to(self, log_old_CK: Tensor) -> Tensor:
        return (self.log_policy - log_old_CK).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


@dataclass(frozen=True)
class _Corrected:
    """What a correction makes of the samples.

    Attributes:
        terms: [C, K], the loss of each sample.
        ratio: [C, K], rho, without gradient; None without a correction.
        clipped: [C, K] bool, samples whose gradient a clip removed.
        dropped: [C, K] bool, samples left out for a ratio out of range.
    """

    terms: Tensor
    ratio: Tensor | None = None
    clipped: Tensor | None = None
    dropped: Tensor | None = None


class PolicyGradient:
    """The mean (on student_topk: the expectation) of -rho A over a row's samples, under the objective's correction.

    Args:
        objective: of kind policy_gradient.
        m2po_bound: scalar tau, for the correction m2po; see `m2po_bound`.
    """

    def __init__(self, objective: Objective, m2po_bound: Tensor | None = None) -> None:
        self.objective = objective
        self.m2po_bound = m2po_bound

    def candidates(self, scores: TeacherScores) -> Tensor:
        ids_CK = valid_ids(scores)
        if scores.behavior_support is None:
            return ids_CK
        return torch.cat([ids_CK, scores.behavior_support.to(ids_CK.dtype)], dim=-1)

    def __call__(self, student: StudentRows, scores: TeacherScores) -> RowValues:
        samples = self._samples(student, scores)
        corrected = self._correct(samples)
        if self.objective.support == "student_topk":
            log_weights_CK = samples.log_base - masked_logsumexp(samples.log_base, samples.valid)[:, None]
            weights_CK = torch.where(samples.valid, log_weights_CK, -torch.inf).exp()
            per_token_C = (weights_CK * corrected.terms).sum(-1)
        else:
            per_token_C = masked_mean(corrected.terms, samples.valid)
        return RowValues(per_token_C, self._metrics(samples, corrected, scores))

    @torch.no_grad()
    def policy_logprobs(self, student: StudentRows, scores: TeacherScores) -> Tensor:
        """[C, K] of the samples, in the distribution really sampled from: what the ratios are made of."""
        return self._samples(student, scores).log_policy

    @torch.no_grad()
    def binding_squares(self, student: StudentRows, scores: TeacherScores) -> Tensor:
        """[C, K] the squared log-ratios of samples whose clip would bind, infinity for the others; for `m2po_bound`."""
        samples = self._samples(student, scores)
        log_ratio_CK = samples.log_ratio_to(samples.log_behavior)
        binds_CK = samples.valid & (samples.advantage * log_ratio_CK > 0)
        return torch.where(binds_CK, log_ratio_CK.square(), torch.inf)

    def _samples(self, student: StudentRows, scores: TeacherScores) -> _Samples:
        valid_CK = valid_candidates(scores)

        def in_samples(logprobs_CK: Tensor | None) -> Tensor | None:
            return None if logprobs_CK is None else torch.where(valid_CK, logprobs_CK, 0)

        log_p_CK = log_policy_CK = in_samples(student.logprobs[:, : valid_CK.shape[1]])
        if scores.behavior_support is not None:
            log_kept_CM = student.logprobs[:, valid_CK.shape[1] :]
            log_kept_mass_C = masked_logsumexp(log_kept_CM, scores.behavior_support >= 0)
            log_policy_CK = in_samples(log_p_CK - log_kept_mass_C[:, None])
        log_q_CK = in_samples(scores.logprobs).clamp(min=self.objective.min_logprob)
        log_behavior_CK = in_samples(scores.behavior_logprobs)
        log_base_CK = log_behavior_CK if self.objective.advantage == "rollout" else log_p_CK.detach()
        return _Samples(
            valid=valid_CK,
            log_q=log_q_CK,
            log_p=log_p_CK,
            log_policy=log_policy_CK,
            log_base=log_base_CK,
            advantage=log_q_CK - log_base_CK,
            log_behavior=log_behavior_CK,
            log_proximal=in_samples(scores.proximal_logprobs),
        )

    def _correct(self, samples: _Samples) -> _Corrected:
        objective, advantage = self.objective, samples.advantage
        if objective.correction == "none":
            ratio_of_one = (samples.log_policy - samples.log_policy.detach()).exp()
            return _Corrected(-ratio_of_one * advantage)
        ratio = samples.log_ratio_to(samples.log_behavior).exp()
        frozen = ratio.detach()
        match objective.correction:
            case "importance":
                return _Corrected(-ratio * advantage, frozen)
            case "truncated":
                over = frozen > objective.cap
                weight = frozen.clamp(max=objective.cap)
                return _Corrected(-weight * advantage * samples.log_policy, frozen, clipped=over)
            case "masked":
                low, high = objective.band
                dropped = (frozen < low) | (frozen > high)
                weight = torch.where(dropped, 0, frozen)
                return _Corrected(-weight * advantage * samples.log_policy, frozen, dropped=dropped)
            case "ppo_clip":
                terms, clipped = self._clip(ratio, advantage, 1 - objective.clip_low, 1 + objective.clip_high)
                return _Corrected(terms, frozen, clipped=clipped)
            case "m2po":
                terms, clipped = self._clip(ratio, advantage, (-self.m2po_bound).exp(), self.m2po_bound.exp())
                return _Corrected(terms, frozen, clipped=clipped)
            case "decoupled":
                proximal_ratio = samples.log_ratio_to(samples.log_proximal).exp()
                terms, clipped = self._clip(proximal_ratio, advantage, 1 - objective.clip_low, 1 + objective.clip_high)
                log_weight = (samples.log_proximal - samples.log_behavior).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
                dropped = log_weight.exp() > objective.cap
                weight = torch.where(dropped, 0, log_weight.exp())
                return _Corrected(weight * terms, frozen, clipped=clipped & ~dropped, dropped=dropped)
        raise AssertionError(objective.correction)

    def _clip(
        self, ratio: Tensor, advantage: Tensor, low: float | Tensor, high: float | Tensor
    ) -> tuple[Tensor, Tensor]:
        """PPO's pessimistic clipped loss, and where it has no gradient."""
        unclipped, bounded = -ratio * advantage, -ratio.clamp(low, high) * advantage
        loss, clipped = torch.maximum(unclipped, bounded), bounded > unclipped
        if self.objective.dual_clip is not None:
            ceiling = torch.where(advantage < 0, -self.objective.dual_clip * advantage, torch.inf)
            loss, clipped = torch.minimum(loss, ceiling), clipped | (loss > ceiling)
        return loss, clipped

    @torch.no_grad()
    def _metrics(self, samples: _Samples, corrected: _Corrected, scores: TeacherScores) -> dict[str, Tensor]:
        def row_mean(values_CK: Tensor) -> Tensor:
            return masked_mean(values_CK.to(samples.log_p.dtype), samples.valid)

        gap = samples.log_q - samples.log_p  # log q/p of the current student
        metrics = {
            "advantage": row_mean(samples.advantage),
            "teacher_gradient_share": row_mean(share_of(samples.log_q.abs(), samples.log_base.abs())),
            "student_entropy": row_mean(-samples.log_p),
            "reverse_kl_k1": row_mean(-gap),
            "reverse_kl_k2": row_mean(gap.square() / 2),
            "reverse_kl_k3": row_mean(gap.clamp(max=MAX_LOG_RATIO).exp() - 1 - gap),
            "teacher_clamped_share": row_mean(scores.logprobs < self.objective.min_logprob),
        }
        if corrected.ratio is not None:
            metrics["importance_ratio"] = row_mean(corrected.ratio)
            metrics["importance_ratio_squared"] = row_mean(corrected.ratio.square())
            metrics["importance_ratio_max"] = torch.where(samples.valid, corrected.ratio, 0).amax(-1)
        if corrected.clipped is not None:
            metrics["clipped_share"] = row_mean(corrected.clipped)
        if corrected.dropped is not None:
            metrics["dropped_share"] = row_mean(corrected.dropped)
        return metrics


def m2po_bound(squares_NK: Tensor, budget: float) -> Tensor:
    """Scalar tau: the largest bound on |log ratio| under which the binding samples' mean square is within `budget`.

    The largest tau with sum_i min(d_i^2, tau^2) <= budget * n over the n finite entries; infinity when no bound is
    needed. Continuous in the d_i. One sort and one cumulative sum, no synchronisation with the host.

    Args:
        squares_NK: squared log-ratios of the samples whose clip would bind, of any shape; infinite for the others.
        budget: `Objective.m2_budget`.
    """
    squares = squares_NK.flatten().sort().values
    num_binding = squares.isfinite().sum()
    index = torch.arange(len(squares), device=squares.device)
    finite = torch.where(index < num_binding, squares, 0)
    sum_below = finite.cumsum(0) - finite  # of the squares before each
    total = budget * num_binding.to(squares.dtype)
    # A square counts in full while bounding everything at it is within the budget; the others share what is left.
    counts_in_full = (index < num_binding) & (sum_below + (num_binding - index) * finite <= total)
    num_bounded = num_binding - counts_in_full.sum()
    left = total - torch.where(counts_in_full, finite, 0).sum()
    tau = (left / num_bounded.clamp(min=1)).clamp(min=0).sqrt()
    return torch.where(num_bounded == 0, torch.inf, tau)
