"""Every objective in a few lines of plain PyTorch: the definition that the fused loss head is held to.

Works on full logits, one row (one response token) at a time, with ordinary autograd; give it float64. Nothing here is
shared with the fused path. With p the student and q the teacher:

V vocabulary, N rows, K candidates or m samples of a row (padding already removed), M tokens that truncated sampling
kept; `log_q_K` is the teacher's log-probability of each candidate.

Sources: forward and reverse KL and the generalised Jensen-Shannon divergence, GKD (arXiv 2306.13649); skew KLs,
DistiLLM (arXiv 2402.03898); adaptive KL, AKL (arXiv 2404.02657); alpha-beta divergence, ABKD (arXiv 2505.04560);
hybrid, HPD (arXiv 2604.20244); stale samples and the learner's advantage, AsyncOPD (arXiv 2606.24143); PPO (arXiv
1707.06347); dual clip (arXiv 1912.09729); decoupled PPO (arXiv 2110.00641); M2PO (arXiv 2510.01161).
"""

from __future__ import annotations

import torch
from torch import Tensor

from titan_opd.config.objective import Objective
from titan_opd.losses.scores import TeacherScores


def reference_per_token(
    logits_NV: Tensor, objective: Objective, scores: TeacherScores, *, teacher_logits_NV: Tensor | None = None
) -> Tensor:
    """The value of every row, [N], differentiable in the student's logits.

    Args:
        logits_NV: the student's logits before the temperature, only of tokens that exist.
        objective: what is minimised.
        scores: as for `distillation_loss`; for a dense `hybrid`, `ids` [N, 2] hold the expert's and the drawn token.
        teacher_logits_NV: the teacher's logits before the temperature, for the dense support.
    """
    log_p_NV = (logits_NV / objective.temperature).log_softmax(-1)
    log_q_NV = None
    if teacher_logits_NV is not None:
        log_q_NV = (teacher_logits_NV / objective.temperature).log_softmax(-1).clamp(min=objective.min_logprob)

    bound = _m2po_bound(log_p_NV, objective, scores) if objective.correction == "m2po" else None
    values = []
    for row, log_p_V in enumerate(log_p_NV):
        if objective.kind == "cross_entropy":
            values.append(-log_p_V[scores.labels[row]])
            continue
        if objective.is_divergence and objective.support == "dense":
            values.append(divergence(log_q_NV[row], log_p_V, objective))
            continue
        valid_K = scores.valid[row] if scores.valid is not None else torch.ones_like(scores.ids[row], dtype=torch.bool)
        ids_K = scores.ids[row][valid_K]
        if log_q_NV is not None:
            log_q_K = log_q_NV[row][ids_K]
        else:
            log_q_K = scores.logprobs[row][valid_K].clamp(min=objective.min_logprob)
        if objective.is_divergence:
            outcomes = _outcomes(log_p_V, ids_K, log_q_K, row, objective, scores)
            values.append(divergence(*outcomes, objective))
        elif objective.kind == "mc_forward_kl":
            values.append((log_q_K - log_p_V[ids_K]).mean())
        elif objective.kind == "hybrid":
            values.append(_hybrid(log_p_V[ids_K], log_q_K, same=bool(ids_K[0] == ids_K[1])))
        else:
            values.append(_policy_gradient(log_p_V, ids_K, log_q_K, valid_K, row, objective, scores, bound))
    return torch.stack(values) if values else log_p_NV.new_zeros(0)


def divergence(log_q: Tensor, log_p: Tensor, objective: Objective) -> Tensor:
    """The divergence of two distributions over the same outcomes."""
    q, p = log_q.exp(), log_p.exp()
    alpha, beta = objective.alpha, objective.beta
    forward, reverse = (q * (log_q - log_p)).sum(), (p * (log_p - log_q)).sum()
    match objective.kind:
        case "forward_kl":
            return forward
        case "reverse_kl":
            return reverse
        case "mixed_kl":
            return alpha * forward + (1 - alpha) * reverse
        case "jsd":
            log_m = (beta * q + (1 - beta) * p).log()
            return beta * (q * (log_q - log_m)).sum() + (1 - beta) * (p * (log_p - log_m)).sum()
        case "skew_forward_kl":
            log_m = (alpha * q + (1 - alpha) * p).log()
            return (q * (log_q - log_m)).sum()
        case "skew_reverse_kl":
            log_m = (alpha * p + (1 - alpha) * q).log()
            return (p * (log_p - log_m)).sum()
        case "total_variation":
            return (q - p).abs().sum() / 2
        case "alpha_beta":
            total = alpha + beta
            terms = q**alpha * p**beta - alpha / total * q**total - beta / total * p**total
            return -terms.sum() / (alpha * beta)
        case "adaptive_kl":
            gap = (q - p).abs().detach()
            mass_at_least_as_likely = (q[None, :] >= q[:, None]).to(q.dtype) @ q
            in_head = (mass_at_least_as_likely <= objective.mu) | (q == q.max())
            head_share = gap[in_head].sum() / gap.sum().clamp(min=torch.finfo(gap.dtype).tiny)
            return head_share * forward + (1 - head_share) * reverse
    raise AssertionError(objective.kind)


def _outcomes(
    log_p_V: Tensor, ids_K: Tensor, log_q_K: Tensor, row: int, objective: Objective, scores: TeacherScores
) -> tuple[Tensor, Tensor]:
    """Teacher's and student's log-probabilities of the support's outcomes, after the treatment of the tail."""
    log_p_K = log_p_V[ids_K]
    if objective.tail == "renormalize":
        return log_q_K.log_softmax(0), log_p_K.log_softmax(0)
    outside_V = torch.ones_like(log_p_V, dtype=torch.bool)
    outside_V[ids_K] = False
    if objective.tail == "drop" or not outside_V.any():
        return log_q_K, log_p_K
    given = scores.tail_logprobs
    log_q_tail = torch.log1p(-log_q_K.exp().sum()) if given is None else given[row]
    log_q_tail = log_q_tail.clamp(min=objective.min_logprob)
    log_p_tail = log_p_V[outside_V].logsumexp(0)
    return torch.cat([log_q_K, log_q_tail[None]]), torch.cat([log_p_K, log_p_tail[None]])


def _hybrid(log_p_2: Tensor, log_q_2: Tensor, *, same: bool) -> Tensor:
    """HPD: the expert's token with weight w*, the student's own with weight w where the teacher likes it less."""
    gain_2 = (log_p_2.exp() * (log_q_2 - log_p_2)).detach()
    q_expert, gain_expert, gain_own = log_q_2[0].exp(), gain_2[0], gain_2[1]
    if gain_expert > 0 and gain_own < 0:
        weight_expert = 2 * q_expert + gain_expert
    elif gain_expert <= 0:
        weight_expert = gain_expert
    else:
        weight_expert = q_expert + gain_expert
    weight_own = 0 if same or gain_own >= 0 else gain_own
    return -weight_expert * log_p_2[0] - weight_own * log_p_2[1]


def _policy_gradient(
    log_p_V: Tensor,
    ids_K: Tensor,
    log_q_K: Tensor,
    valid_K: Tensor,
    row: int,
    objective: Objective,
    scores: TeacherScores,
    bound: Tensor | None,
) -> Tensor:
    """The mean over a row's samples of -rho A under the chosen correction."""
    log_p_K = log_p_V[ids_K]
    log_base_K = log_p_K.detach()
    if objective.advantage == "rollout":
        log_base_K = scores.behavior_logprobs[row][valid_K]
    advantage_K = log_q_K - log_base_K

    log_policy_K = _log_policy(log_p_V, ids_K, row, scores)  # what the ratios' numerator is
    if objective.correction == "none":
        terms_K = -(log_policy_K - log_policy_K.detach()).exp() * advantage_K
    else:
        log_behavior_K = scores.behavior_logprobs[row][valid_K]
        log_ratio_K = (log_policy_K - log_behavior_K).clamp(-20, 20)
        ratio_K = log_ratio_K.exp()
        match objective.correction:
            case "importance":
                terms_K = -ratio_K * advantage_K
            case "truncated":
                terms_K = -ratio_K.detach().clamp(max=objective.cap) * advantage_K * log_policy_K
            case "masked":
                low, high = objective.band
                inside_K = (ratio_K >= low) & (ratio_K <= high)
                terms_K = -(ratio_K.detach() * inside_K) * advantage_K * log_policy_K
            case "ppo_clip":
                terms_K = _clipped(ratio_K, advantage_K, 1 - objective.clip_low, 1 + objective.clip_high, objective)
            case "m2po":
                terms_K = _clipped(ratio_K, advantage_K, (-bound).exp(), bound.exp(), objective)
            case "decoupled":
                log_proximal_K = scores.proximal_logprobs[row][valid_K]
                ratio_K = (log_policy_K - log_proximal_K).clamp(-20, 20).exp()
                weight_K = (log_proximal_K - log_behavior_K).clamp(-20, 20).exp()
                weight_K = torch.where(weight_K <= objective.cap, weight_K, 0)
                clipped_K = _clipped(ratio_K, advantage_K, 1 - objective.clip_low, 1 + objective.clip_high, objective)
                terms_K = weight_K * clipped_K
    if objective.support == "student_topk":
        return (log_base_K.softmax(0) * terms_K).sum()
    return terms_K.mean()


def _log_policy(log_p_V: Tensor, ids_K: Tensor, row: int, scores: TeacherScores) -> Tensor:
    """log p of the samples; renormalised on the tokens that truncated sampling kept, where it did."""
    if scores.behavior_support is None:
        return log_p_V[ids_K]
    support_M = scores.behavior_support[row]
    return log_p_V[ids_K] - log_p_V[support_M[support_M >= 0]].logsumexp(0)


def _clipped(
    ratio: Tensor, advantage: Tensor, low: float | Tensor, high: float | Tensor, objective: Objective
) -> Tensor:
    loss = torch.maximum(-ratio * advantage, -ratio.clamp(low, high) * advantage)
    if objective.dual_clip is None:
        return loss
    return torch.where(advantage < 0, loss.clamp(max=-objective.dual_clip * advantage), loss)


def _m2po_bound(log_p_NV: Tensor, objective: Objective, scores: TeacherScores) -> Tensor:
    """The largest tau with mean min(d^2, tau^2) <= m2_budget over the batch's samples whose clip would bind."""
    squares = []
    for row, log_p_V in enumerate(log_p_NV.detach()):
        valid_K = scores.valid[row] if scores.valid is not None else torch.ones_like(scores.ids[row], dtype=torch.bool)
        ids_K = scores.ids[row][valid_K]
        log_behavior_K = scores.behavior_logprobs[row][valid_K]
        log_base_K = log_behavior_K if objective.advantage == "rollout" else log_p_V[ids_K]
        advantage_K = scores.logprobs[row][valid_K].clamp(min=objective.min_logprob) - log_base_K
        log_ratio_K = (_log_policy(log_p_V, ids_K, row, scores) - log_behavior_K).clamp(-20, 20)
        squares.append(log_ratio_K[advantage_K * log_ratio_K > 0].square())
    squares = torch.cat(squares).sort().values
    budget = objective.m2_budget * len(squares)
    for clipped in range(len(squares), 0, -1):  # the smallest `len - clipped` squares count in full, the rest as tau^2
        kept = len(squares) - clipped
        tau_squared = (budget - squares[:kept].sum()) / clipped
        if tau_squared <= squares[kept]:
            return tau_squared.clamp(min=0).sqrt()
    return log_p_NV.new_tensor(torch.inf)
