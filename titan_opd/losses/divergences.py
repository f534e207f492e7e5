"""The divergences, as the term that one outcome adds to the sum.

Each function takes the teacher's and the student's log-probabilities of outcomes (tokens, or the bucket of all tokens
outside a support), of any equal shape, and returns terms of that shape: finite, with finite gradients, for any finite
input.

Sources: forward and reverse KL and the generalised Jensen-Shannon divergence, GKD (arXiv 2306.13649, section 3); skew
KLs, DistiLLM (arXiv 2402.03898, equations 4 and 5); alpha-beta divergence, ABKD (arXiv 2505.04560, definition 3.1);
adaptive KL, AKL (arXiv 2404.02657, section 4).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from titan_opd.config.objective import Objective


def forward_kl_terms(log_q: Tensor, log_p: Tensor) -> Tensor:
    """Of KL(q ‖ p) = sum q (log q - log p)."""
    return log_q.exp() * (log_q - log_p)


def reverse_kl_terms(log_q: Tensor, log_p: Tensor) -> Tensor:
    """Of KL(p ‖ q) = sum p (log p - log q)."""
    return forward_kl_terms(log_p, log_q)


def divergence_terms(objective: Objective, log_q: Tensor, log_p: Tensor, *, head_share: Tensor | None = None) -> Tensor:
    """The terms of the objective's divergence.

    Args:
        objective: one whose `is_divergence` holds.
        log_q, log_p: the teacher's and the student's log-probabilities.
        head_share: for adaptive_kl, the forward KL's weight, broadcastable to the terms.
    """
    alpha, beta = objective.alpha, objective.beta
    match objective.kind:
        case "forward_kl":
            return forward_kl_terms(log_q, log_p)
        case "reverse_kl":
            return reverse_kl_terms(log_q, log_p)
        case "mixed_kl":
            return _mixed_kl_terms(log_q, log_p, alpha)
        case "adaptive_kl":
            return _mixed_kl_terms(log_q, log_p, head_share)
        case "jsd":
            log_m = _log_mixture(log_q, log_p, beta)
            return beta * forward_kl_terms(log_q, log_m) + (1 - beta) * forward_kl_terms(log_p, log_m)
        case "skew_forward_kl":
            return forward_kl_terms(log_q, _log_mixture(log_q, log_p, alpha))
        case "skew_reverse_kl":
            return forward_kl_terms(log_p, _log_mixture(log_p, log_q, alpha))
        case "total_variation":
            return (log_q.exp() - log_p.exp()).abs() / 2
        case "alpha_beta":
            total = alpha + beta
            cross = (alpha * log_q + beta * log_p).exp()
            own = alpha / total * (total * log_q).exp() + beta / total * (total * log_p).exp()
            return (own - cross) / (alpha * beta)
    raise AssertionError(objective.kind)


def _mixed_kl_terms(log_q: Tensor, log_p: Tensor, forward_weight: float | Tensor) -> Tensor:
    forward, reverse = forward_kl_terms(log_q, log_p), reverse_kl_terms(log_q, log_p)
    return forward_weight * forward + (1 - forward_weight) * reverse


def _log_mixture(log_a: Tensor, log_b: Tensor, share: float) -> Tensor:
    """log (share a + (1 - share) b)."""
    if share == 0:
        return log_b
    return torch.logaddexp(log_a + math.log(share), log_b + math.log1p(-share))
