"""Part 1: at the same prefixes, written by the current policy, what stale candidates and samples do to a gradient.

Shape suffixes: N prefixes, V vocabulary, R redraws, B numbers of a gradient's sketch.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from titan_opd.losses import Objective
from titan_opd.rollout import Recording

from .gradients import (
    Distributions,
    GradientSketch,
    SampleMoments,
    dense_gradient,
    expected_gradient,
    gradient_of_each_token,
    next_token_logits,
    sampled_gradient,
    topk_gradient,
)
from .policies import STALENESS, PolicyChain, without_scores
from .statistics import Estimate, relative_distance, total_variance, variance_error

SIZES_K = (1, 2, 4, 8)
NUM_SAMPLES = (1, 4, 16, 64)

FORWARD_TOPK = {tail: Objective("forward_kl", tail=tail) for tail in ("bucket", "renormalize", "drop")}
REVERSE_TOPK = {tail: Objective("reverse_kl", tail=tail) for tail in ("bucket", "renormalize", "drop")}
POLICY_TOPK = {
    (advantage, correction): Objective(
        "policy_gradient", support="student_topk", advantage=advantage, correction=correction
    )
    for advantage in ("rollout", "learner")
    for correction in ("none", "importance")
}
POLICY_SAMPLED = {
    (advantage, correction): Objective("policy_gradient", advantage=advantage, correction=correction)
    for advantage in ("learner", "rollout")
    for correction in ("none", "importance", "truncated", "masked", "ppo_clip", "decoupled")
}
DUAL_CLIP = Objective("policy_gradient", correction="ppo_clip", dual_clip=3.0)
M2PO = Objective("policy_gradient", correction="m2po")
TEACHER_SAMPLED = Objective("mc_forward_kl")
REDRAWN = {
    **{correction: POLICY_SAMPLED["learner", correction] for correction in ("none", "importance", "ppo_clip")},
    "mc_forward_kl": TEACHER_SAMPLED,
}


@dataclass(frozen=True)
class PolicyFacts:
    """How far a stale policy is from the current one, means over the prefixes.

    Attributes:
        divergence: KL(current ‖ stale), nats a token.
        effective_sample_share: 1 / E rho², rho the importance ratio: the share of samples that weights leave.
        support_mass: by K, the current student's mass on the stale policy's K most likely tokens.
    """

    divergence: float
    effective_sample_share: float
    support_mass: dict[int, float]


@dataclass
class FixedPrefixes:
    """Results. Biases and deviations are over the length of the dense gradient of the same divergence.

    Keys: `objective` is one of this module's, `s` the staleness.

    Attributes:
        num_prefixes: N.
        student_entropy, teacher_entropy, reverse_kl: nats a token, of the current policy.
        facts: by s.
        topk_bias: by (objective, K, s), exact.
        sample_bias: by (objective, s); exact, except m2po's, which is estimated from redraws of the most samples.
        one_sample_deviation: by (objective, s): the root of one sample's variance, exact.
        variance_ratio: by (name in REDRAWN, m, s): m times the variance of m samples over that of one.
    """

    num_prefixes: int
    student_entropy: float
    teacher_entropy: float
    reverse_kl: float
    facts: dict[int, PolicyFacts] = field(default_factory=dict)
    topk_bias: dict[tuple[Objective, int, int], float] = field(default_factory=dict)
    sample_bias: dict[tuple[Objective, int], Estimate] = field(default_factory=dict)
    one_sample_deviation: dict[tuple[Objective, int], float] = field(default_factory=dict)
    variance_ratio: dict[tuple[str, int, int], Estimate] = field(default_factory=dict)


def dense_kind(objective: Objective) -> str:
    """The divergence that the objective stands for."""
    return "forward_kl" if objective.kind in ("forward_kl", "mc_forward_kl") else "reverse_kl"


@torch.no_grad()
def measure_fixed_prefixes(
    chain: PolicyChain, *, num_answers: int, num_redraws: int, sketch: GradientSketch
) -> FixedPrefixes:
    """Bias and variance of every estimator at the prefixes of `num_answers` answers of the current policy."""
    trajectories = chain.write(0, chain.parts.prompts.take(num_answers), Recording())
    batch = without_scores(trajectories)

    def logprobs(decoder: torch.nn.Module) -> Tensor:
        return next_token_logits(decoder, batch, chain.vocab_size).log_softmax(-1)

    log_p_NV, log_q_NV = logprobs(chain.current), logprobs(chain.teacher)
    sketch_BNV = sketch.at_prefixes(chain.current, batch, chain.vocab_size)
    result = FixedPrefixes(
        num_prefixes=len(log_p_NV),
        student_entropy=-_mean_under(log_p_NV, log_p_NV),
        teacher_entropy=-_mean_under(log_q_NV, log_q_NV),
        reverse_kl=_mean_under(log_p_NV, log_p_NV - log_q_NV),
    )
    for staleness in STALENESS:
        rows = Distributions(log_p_NV, log_q_NV, logprobs(chain.policies[staleness]))
        result.facts[staleness] = _facts(rows)
        _Measurement(result, rows, sketch_BNV, staleness).run(num_redraws)
    return result


def _facts(rows: Distributions) -> PolicyFacts:
    log_ratio_NV = rows.log_p - rows.log_behavior
    second_moment = _mean_under(rows.log_behavior, (2 * log_ratio_NV).exp())
    masses = {}
    for k in SIZES_K:
        ids_NK = rows.log_behavior.topk(k, dim=-1).indices
        masses[k] = float(rows.log_p.gather(1, ids_NK).exp().sum(-1).mean())
    return PolicyFacts(_mean_under(rows.log_p, log_ratio_NV), 1 / second_moment, masses)


def _mean_under(log_weights_NV: Tensor, values_NV: Tensor) -> float:
    return float((log_weights_NV.exp() * values_NV).sum(-1).mean())


class _Measurement:
    """All estimators when one of the policies chose the candidates and samples."""

    def __init__(self, result: FixedPrefixes, rows: Distributions, sketch_BNV: Tensor, staleness: int) -> None:
        self.result = result
        self.rows = rows
        self.sketch_BNV = sketch_BNV
        self.staleness = staleness
        self._moments: dict[Objective, SampleMoments] = {}
        self.dense = {kind: self._sketched(dense_gradient(kind, rows)) for kind in ("forward_kl", "reverse_kl")}

    def run(self, num_redraws: int) -> None:
        for objective in (*FORWARD_TOPK.values(), *REVERSE_TOPK.values(), *POLICY_TOPK.values()):
            for k in SIZES_K:
                gradient_B = self._sketched(topk_gradient(objective, self.rows, k))
                self.result.topk_bias[objective, k, self.staleness] = self._relative_bias(objective, gradient_B)
        for objective in (*POLICY_SAMPLED.values(), DUAL_CLIP, TEACHER_SAMPLED):
            self._enumerate(objective)
        for name, objective in REDRAWN.items():
            if objective is not TEACHER_SAMPLED or self.staleness == 0:  # the teacher's samples do not get stale
                self._check_variance(name, objective, num_redraws)
        gradients_RB = self._redraw(M2PO, max(NUM_SAMPLES), num_redraws)
        dense_RB = self._dense(M2PO).expand_as(gradients_RB)
        self.result.sample_bias[M2PO, self.staleness] = relative_distance(gradients_RB - dense_RB, dense_RB)

    def _enumerate(self, objective: Objective) -> None:
        gradient_ANV, proposal_NV = gradient_of_each_token(objective, self.rows), self.rows.proposal(objective)
        mean_B = self._sketched(expected_gradient(gradient_ANV, proposal_NV))
        moments = SampleMoments.of(gradient_ANV, proposal_NV, self.sketch_BNV)
        key = objective, self.staleness
        self.result.sample_bias[key] = Estimate(self._relative_bias(objective, mean_B), 0.0)
        self.result.one_sample_deviation[key] = moments.variance**0.5 / float(self._dense(objective).norm())
        self._moments[objective] = moments

    def _check_variance(self, name: str, objective: Objective, num_redraws: int) -> None:
        for num_samples in NUM_SAMPLES:
            moments = self._moments[objective].of_mean(num_samples)
            error = variance_error(
                num_redraws,
                covariance_square=moments.covariance_square,
                fourth_cumulant=moments.fourth_cumulant,
            )
            found = float(total_variance(self._redraw(objective, num_samples, num_redraws)))
            ratio = Estimate(found / moments.variance, error / moments.variance)
            self.result.variance_ratio[name, num_samples, self.staleness] = ratio

    def _redraw(self, objective: Objective, num_samples: int, num_redraws: int) -> Tensor:
        """[R, B] independent gradients at the same prefixes."""
        gradients = [sampled_gradient(objective, self.rows, num_samples, seed) for seed in range(num_redraws)]
        return torch.stack([self._sketched(gradient_NV) for gradient_NV in gradients])

    def _sketched(self, gradient_NV: Tensor) -> Tensor:
        return torch.einsum("bnv,nv->b", self.sketch_BNV, gradient_NV)

    def _dense(self, objective: Objective) -> Tensor:
        return self.dense[dense_kind(objective)]

    def _relative_bias(self, objective: Objective, gradient_B: Tensor) -> float:
        dense_B = self._dense(objective)
        return float((gradient_B - dense_B).norm() / dense_B.norm())
